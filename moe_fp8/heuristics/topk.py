"""Clusters of the top-k kernel. Pure; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from moe_fp8.problems import IndexerTopkProblem

#: Logits of a CTA's share that stay in shared memory during the search for the threshold. With two
#: histograms of 2048 bins they take 80 KiB, so that two CTAs share an SM and the barriers of one row overlap
#: the loads of another row.
TOPK_CAPACITY = 8192

#: Bins of one histogram.
TOPK_BINS = 2048


@dataclass(frozen=True)
class TopkConfig:
    """Each row gets `cluster` CTAs of `num_threads` threads."""

    cluster: int
    num_threads: int


def topk_smem_bytes() -> int:
    """Dynamic shared memory of the top-k kernel: keys and numbers of the candidates, two histograms."""
    return TOPK_CAPACITY * 8 + 2 * TOPK_BINS * 4


def topk_config(problem: IndexerTopkProblem) -> TopkConfig:
    """Up to eight CTAs per row, as far as the GPU has SMs and each CTA gets enough columns.

    If the rows outnumber the SMs, each row gets one smaller CTA, and two CTAs share an SM.
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
