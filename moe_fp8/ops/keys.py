"""Keys of calls: every attribute of its arguments that a call's checks and its launch look at.

Calls of equal keys pass the same checks and launch the same kernel with the same parameters, so that only
the first need be checked and prepared. Contents of tensors are no part of a key: neither checks nor launches
read them. Reading each attribute once (40 to 90 ns) and looking the key up (0.3 us) is the least that a
call costs without trusting the identity of tensors, whose attributes can change in place.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

#: The first item is the op or, of a GEMM, the layout.
Key: TypeAlias = tuple[object, ...]


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> Key:
    """The key of `quantize_fp8`."""
    return (
        "quantize", power_of_two,
        x.shape, q.shape, scale.shape,
        x.is_contiguous(), q.is_contiguous(), scale.stride(),
        x.dtype, q.dtype, scale.dtype,
        x.get_device(), q.get_device(), scale.get_device(),
        x.data_ptr(), q.data_ptr(), scale.data_ptr(),
    )  # fmt: skip


def indexer_quantize_and_cache(k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, power_of_two: bool) -> Key:
    """The key of `indexer_quantize_and_cache`."""
    return (
        "indexer_quantize_and_cache", power_of_two,
        k.shape, kv_cache.shape, slot_mapping.shape,
        k.stride(), kv_cache.stride(), slot_mapping.is_contiguous(),
        k.dtype, kv_cache.dtype, slot_mapping.dtype,
        k.get_device(), kv_cache.get_device(), slot_mapping.get_device(),
        k.data_ptr(), kv_cache.data_ptr(), slot_mapping.data_ptr(),
    )  # fmt: skip


def indexer_topk(
    logits: Tensor,
    k: int,
    starts: Tensor | None,
    ends: Tensor | None,
    by_value: bool,
    out: Tensor,
    values: Tensor | None,
    first_column: int,
    carried: Tensor | None,
) -> Key:
    """The key of `indexer_topk`."""
    return (
        "indexer_topk", k, by_value, first_column, _of(starts), _of(ends), _of(values), _of(carried),
        logits.shape, out.shape,
        logits.stride(), out.is_contiguous(),
        logits.dtype, out.dtype,
        logits.get_device(), out.get_device(),
        logits.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def _of(tensor: Tensor | None) -> Key:
    """A contiguous argument that may be left away."""
    if tensor is None:
        return ()
    return (tensor.shape, tensor.is_contiguous(), tensor.dtype, tensor.get_device(), tensor.data_ptr())


def gemm(
    layout: str,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    index: Tensor | None,
    expected_m: int | None,
    config: str | None,
) -> Key:
    """The key of a GEMM of any layout."""
    return (
        layout, expected_m, config, _of(index),
        a.shape, a_scale.shape, b.shape, b_scale.shape, out.shape,
        a.is_contiguous(), a_scale.stride(), b.is_contiguous(), b_scale.is_contiguous(), out.is_contiguous(),
        a.dtype, a_scale.dtype, b.dtype, b_scale.dtype, out.dtype,
        a.get_device(), a_scale.get_device(), b.get_device(), b_scale.get_device(), out.get_device(),
        a.data_ptr(), a_scale.data_ptr(), b.data_ptr(), b_scale.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def mqa_logits(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    out: Tensor,
    compressed: bool,
    fill: bool,
    whole_queries: int,
    whole_keys: int,
) -> Key:
    """The key of `mqa_logits_fp8`."""
    return (
        "mqa_logits", compressed, fill, whole_queries, whole_keys,
        q.shape, k.shape, k_scale.shape, weights.shape, ks.shape, ke.shape, out.shape,
        q.is_contiguous(), k.is_contiguous(), k_scale.is_contiguous(), weights.is_contiguous(),
        ks.is_contiguous(), ke.is_contiguous(), out.stride(),
        q.dtype, k.dtype, k_scale.dtype, weights.dtype, ks.dtype, ke.dtype, out.dtype,
        q.get_device(), k.get_device(), k_scale.get_device(), weights.get_device(),
        ks.get_device(), ke.get_device(), out.get_device(),
        q.data_ptr(), k.data_ptr(), k_scale.data_ptr(), weights.data_ptr(),
        ks.data_ptr(), ke.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def paged_mqa_logits_metadata(context_lens: Tensor, block_size: int, next_n: int, out: Tensor) -> Key:
    """The key of `paged_mqa_logits_metadata`."""
    return (
        "paged_mqa_logits_metadata", block_size, next_n,
        context_lens.shape, out.shape,
        context_lens.is_contiguous(), out.is_contiguous(),
        context_lens.dtype, out.dtype,
        context_lens.get_device(), out.get_device(),
        context_lens.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    metadata: Tensor,
    out: Tensor,
) -> Key:
    """The key of `paged_mqa_logits_fp8`."""
    return (
        "paged_mqa_logits",
        q.shape, kv_cache.shape, weights.shape, context_lens.shape,
        block_table.shape, metadata.shape, out.shape,
        q.is_contiguous(), kv_cache.stride(), weights.is_contiguous(), context_lens.is_contiguous(),
        block_table.stride(), metadata.is_contiguous(), out.stride(),
        q.dtype, kv_cache.dtype, weights.dtype, context_lens.dtype,
        block_table.dtype, metadata.dtype, out.dtype,
        q.get_device(), kv_cache.get_device(), weights.get_device(), context_lens.get_device(),
        block_table.get_device(), metadata.get_device(), out.get_device(),
        q.data_ptr(), kv_cache.data_ptr(), weights.data_ptr(), context_lens.data_ptr(),
        block_table.data_ptr(), metadata.data_ptr(), out.data_ptr(),
    )  # fmt: skip
