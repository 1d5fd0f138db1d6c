"""Tiles of the MQA-logits kernels. Pure; standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_fp8.heuristics.sm90 import BARRIER_BYTES, WARPGROUP
from moe_fp8.problems import MqaLogitsProblem, PagedMqaLogitsProblem

#: Keys per chunk of the paged kernel's schedule; `paged_mqa_logits_metadata` counts in chunks.
PAGED_CHUNK = 64

#: Columns (query token x head) of one MQA-logits tile: wgmma's largest N, which reads K the least often.
MQA_COLUMNS = 256

#: Columns that are copied and multiplied at a time.
MQA_PART_COLUMNS = 128

#: The most query tokens of one tile; each token needs registers for its key range.
MQA_MAX_QUERIES = 8

#: Keys of one pipeline stage; math warpgroups take turns with the stages.
MQA_BLOCK_KV = 64

#: Math warpgroups, which take turns with the stages, because ReLU and weights take longer than the product.
MQA_MATH_WARPGROUPS = 3

#: Threads of a CTA: the math warpgroups and one warpgroup that copies.
MQA_THREADS = (1 + MQA_MATH_WARPGROUPS) * WARPGROUP


@dataclass(frozen=True)
class MqaConfig:
    """Tile of the MQA-logits kernels: `block_q` query tokens x heads against `MQA_BLOCK_KV` keys per stage.

    The three math warpgroups take turns with `num_stages` stages, a multiple of three. With `terms` the
    tensor core computes the linear part of ReLU. This needs fewer instructions per score but more work per
    query tile.
    """

    block_q: int
    num_stages: int
    terms: bool = False


def query_box_rows(block_q: int, num_heads: int) -> int:
    """Rows, each of a token and a head, in one copy of queries."""
    return min(block_q * num_heads, MQA_PART_COLUMNS)


def key_box_rows(page_size: int) -> int:
    """Keys of one copy from a cache's page."""
    return min(page_size, MQA_BLOCK_KV)


def mqa_smem_bytes(config: MqaConfig, num_heads: int, head_dim: int) -> int:
    """Dynamic shared memory of the prefill and paged logits kernels, in bytes."""
    columns = config.block_q * num_heads
    parts = -(-columns // MQA_PART_COLUMNS)
    # Four rows of terms for each token, rounded up to pairs of tokens.
    terms = parts * 8 * -(-config.block_q // parts // 2) if config.terms else 0
    queries = (columns + terms) * head_dim + -(-columns * 4 // 128) * 128  # FP8 rows and their fp32 weights
    keys = MQA_BLOCK_KV * head_dim + MQA_BLOCK_KV * 4
    return BARRIER_BYTES + 2 * queries + config.num_stages * keys + 1024


def _block_q(num_heads: int) -> int:
    """Query tokens of a tile of the prefill indexer."""
    return min(MQA_COLUMNS // num_heads, MQA_MAX_QUERIES)


#: Pairs of a query and a key per SM from which `terms` saves time (H200: break-even at 3313 x 4149).
_TERMS_FROM = 1 << 16


def mqa_config(problem: MqaLogitsProblem) -> MqaConfig:
    """Tile of the prefill indexer."""
    problem = problem.for_selection()
    large = problem.num_queries * problem.num_keys >= _TERMS_FROM * problem.num_sms
    return MqaConfig(
        block_q=_block_q(problem.num_heads),
        num_stages=12,
        terms=large and not problem.batch_invariant,
    )


#: The most keys of one work item, a multiple of `MQA_BLOCK_KV`: in total 17 MB, which stay in L2.
_MOST_CHUNK = 1 << 17


#: The prefill kernel adds up the stages of all work items in unsigned 32 bits (`sched/even_share.cuh`).
_MOST_STAGES = 2**32 - 1

#: Stages that the kernel counts for an item itself, at most (kItemCost).
_ITEM_COST = 4


def mqa_most_queries(num_keys: int, num_heads: int) -> int:
    """Queries whose stages the prefill kernel can count if each of them sees all `num_keys` keys."""
    stages = -(-num_keys // MQA_BLOCK_KV) + _ITEM_COST * -(-num_keys // _MOST_CHUNK)
    return _MOST_STAGES // max(stages, 1) * _block_q(num_heads)


@dataclass(frozen=True)
class MqaDivision:
    """The division of prefill logits into work items of a query tile and `chunk_kv` keys.

    If `even`, the blocks count the stages of keys of all items, and each block takes an equal number of
    stages, which may be parts of items. Otherwise there is a block for each item.
    """

    chunk_kv: int
    even: bool


class MqaWork(NamedTuple):
    """The work of a launch for prefill logits: tile, division, number of query tiles, number of items."""

    config: MqaConfig
    division: MqaDivision
    query_blocks: int
    items: int


def mqa_division(query_blocks: int, num_keys: int, num_sms: int) -> MqaDivision:
    """A block for each item if no item is much longer than an even share; otherwise even shares.

    The blocks need about the time of one stage to find even shares.
    """
    chunks = num_sms // query_blocks
    if chunks > 0:
        stages = -(-num_keys // MQA_BLOCK_KV)
        longest, even = -(-stages // chunks), -(-query_blocks * stages // num_sms)
        chunk = longest * MQA_BLOCK_KV
        if chunk <= _MOST_CHUNK and -(-longest // MQA_MATH_WARPGROUPS) <= -(-even // MQA_MATH_WARPGROUPS) + 1:
            return MqaDivision(chunk, False)
    return MqaDivision(_MOST_CHUNK, True)


def paged_mqa_config(problem: PagedMqaLogitsProblem) -> MqaConfig:
    """Tile of the decode indexer: the least power of two of tokens that covers next_n, up to a limit.

    Above this limit, several passes cover next_n.
    """
    problem = problem.for_selection()
    block_q = 1
    while block_q < min(problem.next_n, MQA_MAX_QUERIES) and 2 * block_q * problem.num_heads <= MQA_COLUMNS:
        block_q *= 2
    # With twelve or six stages instead of nine, the copies are 1 to 5% slower (H200).
    return MqaConfig(block_q=block_q, num_stages=9)
