"""Clusters of the top-k kernel. Pure; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from moe_fp8.problems import IndexerTopkProblem

#: Most columns that a row can be asked for.
TOPK_MAX_K = 4096

#: Logits of one CTA's share that stay in shared memory while the threshold is found: with two histograms of
#: 2048 bins that is 80 KiB, so that two CTAs share an SM and one row's barriers hide behind another's loads.
TOPK_CAPACITY = 8192

#: Bins of one of its histograms.
TOPK_BINS = 2048


@dataclass(frozen=True)
class TopkConfig:
    """`cluster` CTAs of `num_threads` a row."""

    cluster: int
    num_threads: int


def topk_smem_bytes() -> int:
    """Dynamic shared memory of the top-k kernel: keys and numbers of the candidates, two histograms."""
    return TOPK_CAPACITY * 8 + 2 * TOPK_BINS * 4


def topk_config(problem: IndexerTopkProblem) -> TopkConfig:
    """As many CTAs a row as the GPU has SMs for, if each has enough columns.

    Where rows alone fill the GPU, two smaller CTAs share an SM.
    """
    problem = problem.for_selection()
    if problem.num_rows > problem.num_sms:
        return TopkConfig(1, 512)
    cluster = 1
    while (
        cluster < 8
        and 2 * cluster * problem.num_rows <= problem.num_sms
        and problem.num_columns >= 2 * cluster * TOPK_CAPACITY
    ):
        cluster *= 2
    return TopkConfig(cluster, 1024)
