"""Quantization of index keys into the indexer's paged cache, with one scale a key.

The definition is DeepSeek-V3's (arXiv 2412.19437, section 3.3.2): scale = amax / 448, value = fp8 x scale.
"""

from __future__ import annotations

from torch import Tensor

from moe_fp8.ops.indexer import checks, contracts, reference
from moe_fp8.ops.registry import register

cache_op = register(
    "indexer_quantize_and_cache(Tensor k, Tensor(a!) kv_cache, Tensor slot_mapping, bool power_of_two) -> ()",
    check=checks.indexer_quantize_and_cache,
    contract=lambda k, kv_cache, slot_mapping, power_of_two: contracts.cache_slots(
        slot_mapping, kv_cache.shape[0] * kv_cache.shape[1]
    ),
    empty=lambda k, kv_cache, slot_mapping, power_of_two: k.shape[0] == 0 or kv_cache.shape[0] == 0,
    reference=reference.indexer_quantize_and_cache,
    cuda="moe_fp8.ops.indexer.cuda:indexer_quantize_and_cache",
)


def indexer_quantize_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, power_of_two: bool = False
) -> None:
    """Quantize index keys to FP8, one scale a row, and write them into the indexer's paged cache, in place.

    k: bf16, fp16 or fp32 `[T, D]`, D one of 32, 64, 128; T = 0 is allowed. Its rows are contiguous, 16-byte
    aligned and any multiple of 16 bytes apart, 0 included.
    kv_cache: uint8 `[pages, block_size, 1, D + 4]`, block_size 32, 64 or 128, 16-byte aligned. A page is
    block_size * D bytes of fp8 keys, then block_size fp32 scales. The page stride may be larger than a page,
    by a multiple of 16 bytes. `paged_mqa_logits_fp8` reads the same cache.
    slot_mapping: int64 or int32 `[T]`, contiguous. Row t goes to slot_mapping[t] = page * block_size +
    offset. If a slot is negative or past the cache, its row is not written.
    power_of_two: round scales up to powers of two, kept as fp32.

    Values and scales are as in `quantize_fp8`, with the row as the group. No other byte of kv_cache
    changes. If several rows name the same slot, each byte of the slot comes from any of these rows.

    The op launches one kernel and does not synchronize the host. It is safe to capture: a replay reads k and
    slot_mapping anew. Raises ArgumentError, UnsupportedError (another D or block_size); in checked mode
    ContractError naming the row whose slot is past the cache, before anything is written.
    """
    cache_op(k, kv_cache, slot_mapping, power_of_two)
