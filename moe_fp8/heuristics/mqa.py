"""Tiles of the MQA-logits kernels. Pure; standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moe_fp8.heuristics.tiles import BARRIER_BYTES, WARPGROUP
from moe_fp8.problems import MqaLogitsProblem, PagedMqaLogitsProblem

#: Keys per chunk of the paged kernel's schedule; `paged_mqa_logits_metadata` counts in these.
PAGED_CHUNK = 256

#: Columns (query token x head) of one MQA-logits tile: wgmma's largest N, so that K is read least often.
MQA_COLUMNS = 256

#: Query tokens of one tile: each costs registers for its key range.
MQA_MAX_QUERIES = 8

#: Keys of one pipeline stage; math warpgroups take turns with them.
MQA_BLOCK_KV = 64

#: One producer and three math warpgroups: ReLU and weights take longer than the product, and beside it.
MQA_THREADS = 4 * WARPGROUP


@dataclass(frozen=True)
class MqaConfig:
    """Tile of the MQA-logits kernels: `block_q` query tokens x heads against `MQA_BLOCK_KV` keys a stage.

    The three math warpgroups take turns with `num_stages`, a multiple of three.
    """

    block_q: int
    num_stages: int


def mqa_smem_bytes(config: MqaConfig, num_heads: int, head_dim: int) -> int:
    """Dynamic shared memory of the prefill and paged logits kernels, in bytes."""
    columns = config.block_q * num_heads
    queries = columns * head_dim + -(-columns * 4 // 128) * 128  # FP8 rows and their fp32 weights
    keys = MQA_BLOCK_KV * head_dim + MQA_BLOCK_KV * 4
    return BARRIER_BYTES + 2 * queries + config.num_stages * keys + 1024


def mqa_config(problem: MqaLogitsProblem) -> MqaConfig:
    """Tile of the prefill indexer."""
    return MqaConfig(block_q=min(MQA_COLUMNS // problem.num_heads, MQA_MAX_QUERIES), num_stages=12)


#: What a prefill work item costs beside its keys, in keys: queries to load, a pipeline to fill and to drain.
_ITEM_KEYS = 128

#: Rounds of work items over the SMs that are looked at.
_MOST_ROUNDS = 24


@lru_cache(maxsize=4096)
def mqa_chunk(query_blocks: int, columns: int, num_sms: int) -> int:
    """Keys of one work item of the prefill indexer, a multiple of 128.

    Items are dealt out round robin, each a query block and a chunk of the columns: of the numbers of chunks
    that fill a number of rounds, the one whose rounds take least.
    """
    fewest = {1, *(rounds * num_sms // query_blocks for rounds in range(1, _MOST_ROUNDS + 1))}
    chunks = {-(-columns // (128 * max(count, 1))) * 128 for count in fewest}

    def takes(chunk: int) -> int:
        items = query_blocks * -(-columns // chunk)
        return -(-items // num_sms) * (min(chunk, columns) + _ITEM_KEYS)

    return min(chunks, key=lambda chunk: (takes(chunk), -chunk))


def paged_mqa_config(problem: PagedMqaLogitsProblem) -> MqaConfig:
    """Tile of the decode indexer: the least power of two of tokens that covers next_n, or several passes."""
    block_q = 1
    while block_q < min(problem.next_n, MQA_MAX_QUERIES) and 2 * block_q * problem.num_heads <= MQA_COLUMNS:
        block_q *= 2
    return MqaConfig(block_q=block_q, num_stages=12)
