"""Registration of the ops with torch: schema, meta, CPU (reference) and CUDA implementations.

Every op writes into outputs that the caller allocates, so one schema serves eager calls, graphs and
`torch.compile` (which functionalises it). The low-level `Library` route is used because
`torch.library.custom_op` costs several microseconds a call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_fp8.ops import checks, checks_cache, checks_logits, checks_topk, contracts, reference, scales
from moe_fp8.ops.keys import Call

_DEFINITIONS = (
    "quantize_fp8(Tensor x, Tensor(a!) q, Tensor(b!) scale, bool power_of_two) -> ()",
    "indexer_quantize_and_cache(Tensor k, Tensor(a!) kv_cache, Tensor slot_mapping, bool power_of_two) -> ()",
    "indexer_topk(Tensor logits, SymInt k, Tensor? starts, Tensor? ends, bool by_value, Tensor(a!) out, "
    "Tensor(b!)? values, SymInt first_column=0, Tensor? carried=None) -> ()",
    "gemm_fp8(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, str? config=None) -> ()",
    "grouped_gemm_fp8_contiguous(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor index, "
    "str layout, SymInt? expected_m, Tensor(a!) out, str? config=None) -> ()",
    "grouped_gemm_fp8_masked(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor masked_m, "
    "SymInt? expected_m, Tensor(a!) out, str? config=None) -> ()",
    "mqa_logits_fp8(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor ks, Tensor ke, "
    "bool compressed, bool fill, Tensor(a!) out, SymInt whole_queries=0, SymInt whole_keys=0) -> ()",
    "paged_mqa_logits_metadata(Tensor context_lens, SymInt block_size, SymInt next_n, Tensor(a!) out) -> ()",
    "paged_mqa_logits_fp8(Tensor q, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, Tensor metadata, Tensor(a!) out) -> ()",
)

# Any: torch leaves Library's methods untyped.
_library: Any = torch.library.Library("moe_fp8", "DEF")


class _Launcher:
    """`moe_fp8.ops.cuda`, imported at the first CUDA call: importing the ops loads no CUDA binding."""

    module: ModuleType | None = None


def _cuda() -> ModuleType:
    if _Launcher.module is None:
        from moe_fp8.ops import cuda

        _Launcher.module = cuda
    return _Launcher.module


def _quantize_fp8(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> None:
    call: Call | None = None
    if x.is_cuda:
        call = ("quantize", power_of_two), (x, q, scale)
        if _cuda().repeat(call):
            return
    checks.quantize(x, q, scale)
    if x.shape[0] == 0:
        return
    if not x.is_cuda:
        reference.quantize(x, q, scale, power_of_two)
    elif scales.is_mn_major(scale):
        _cuda().quantize(x, q, scale, power_of_two, call)
    else:
        # torch's functionalisation may replace an output by a clone, which drops the padding of its stride.
        padded = scales.empty_mn_major(scale.shape[0], scale.shape[1], scale)
        _cuda().quantize(x, q, padded, power_of_two)
        scale.copy_(padded)


def _indexer_quantize_and_cache(
    k: Tensor, kv_cache: Tensor, slot_mapping: Tensor, power_of_two: bool
) -> None:
    call: Call | None = None
    if k.is_cuda and not contracts.enabled(k):
        call = ("indexer_quantize_and_cache", power_of_two), (k, kv_cache, slot_mapping)
        if _cuda().repeat(call):
            return
    checks_cache.indexer_quantize_and_cache(k, kv_cache, slot_mapping)
    if contracts.enabled(k):
        contracts.cache_slots(slot_mapping, kv_cache.shape[0] * kv_cache.shape[1])
    if k.shape[0] == 0 or kv_cache.shape[0] == 0:
        return
    if k.is_cuda:
        _cuda().indexer_quantize_and_cache(k, kv_cache, slot_mapping, power_of_two, call)
    else:
        reference.indexer_quantize_and_cache(k, kv_cache, slot_mapping, power_of_two)


def _indexer_topk(
    logits: Tensor,
    k: int,
    starts: Tensor | None,
    ends: Tensor | None,
    by_value: bool,
    out: Tensor,
    values: Tensor | None,
    first_column: int = 0,
    carried: Tensor | None = None,
) -> None:
    call: Call | None = None
    if logits.is_cuda and not contracts.enabled(logits):
        optional = starts, ends, values, carried
        given = [tensor is not None for tensor in optional]
        terms = "indexer_topk", k, by_value, first_column, *given
        call = terms, (logits, out, *(tensor for tensor in optional if tensor is not None))
        if _cuda().repeat(call):
            return
    checks_topk.indexer_topk(logits, k, starts, ends, out, values, first_column, carried)
    if contracts.enabled(logits):
        contracts.column_ranges(starts, ends, logits.shape[0], logits.shape[1])
    if logits.shape[0] == 0:
        return
    if logits.is_cuda:
        _cuda().indexer_topk(logits, k, starts, ends, by_value, out, values, first_column, carried, call)
    else:
        reference.indexer_topk(logits, k, starts, ends, by_value, out, values, first_column, carried)


def _gemm_fp8(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, config: str | None = None
) -> None:
    call: Call | None = None
    if a.is_cuda:
        call = ("dense", config), (a, a_scale, b, b_scale, out)
        if _cuda().repeat(call):
            return
    mn_major = checks.gemm(a, a_scale, b, b_scale, out)
    if config is not None:
        checks.gemm_config("dense", a, b, config)
    if out.numel() == 0:
        return
    if a.is_cuda:
        call = call if mn_major is a_scale else None
        _cuda().gemm("dense", a, mn_major, b, b_scale, out, None, None, config, call)
    else:
        reference.gemm(a, mn_major, b, b_scale, out)


def _grouped_gemm_fp8_contiguous(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    index: Tensor,
    layout: str,
    expected_m: int | None,
    out: Tensor,
    config: str | None = None,
) -> None:
    call: Call | None = None
    if a.is_cuda and not contracts.enabled(a):
        call = (layout, expected_m, config), (a, a_scale, b, b_scale, out, index)
        if _cuda().repeat(call):
            return
    mn_major = checks.gemm_contiguous(layout, a, a_scale, b, b_scale, index, out)
    if config is not None:
        checks.gemm_config(layout, a, b, config)
    if contracts.enabled(a):
        contracts.contiguous_layout(layout, index, a.shape[0], b.shape[0])
    if out.numel() == 0 or b.shape[0] == 0:
        return
    if a.is_cuda:
        call = call if mn_major is a_scale else None
        _cuda().gemm(layout, a, mn_major, b, b_scale, out, index, expected_m, config, call)
    else:
        reference.gemm_contiguous(layout, a, mn_major, b, b_scale, index, out)


def _grouped_gemm_fp8_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    masked_m: Tensor,
    expected_m: int | None,
    out: Tensor,
    config: str | None = None,
) -> None:
    call: Call | None = None
    if a.is_cuda and not contracts.enabled(a):
        call = ("masked", expected_m, config), (a, a_scale, b, b_scale, out, masked_m)
        if _cuda().repeat(call):
            return
    mn_major = checks.gemm_masked(a, a_scale, b, b_scale, masked_m, out)
    if config is not None:
        checks.gemm_config("masked", a, b, config)
    if contracts.enabled(a):
        contracts.masked_m(masked_m, a.shape[1])
    if out.numel() == 0:
        return
    if a.is_cuda:
        call = call if mn_major is a_scale else None
        _cuda().gemm("masked", a, mn_major, b, b_scale, out, masked_m, expected_m, config, call)
    else:
        reference.gemm_masked(a, mn_major, b, b_scale, masked_m, out)


def _mqa_logits_fp8(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    compressed: bool,
    fill: bool,
    out: Tensor,
    whole_queries: int = 0,
    whole_keys: int = 0,
) -> None:
    """whole_queries, whole_keys: of the selection that this is a chunk of, whose bits it gets; 0 for none."""
    call: Call | None = None
    if q.is_cuda and not contracts.enabled(q):
        terms = "mqa_logits", k.shape, out.shape, compressed, fill, whole_queries, whole_keys
        call = terms, (q, k, k_scale, weights, ks, ke, out)
        if _cuda().repeat(call):
            return
    checks_logits.mqa_logits(q, k, k_scale, weights, ks, ke, out, compressed)
    if contracts.enabled(q):
        contracts.query_ranges(ks, ke, k.shape[0], out.shape[1])
    if out.numel() == 0:
        return
    if k.shape[0] == 0:
        if fill:
            out.fill_(float("-inf"))
    elif q.is_cuda:
        whole = (whole_queries or q.shape[0], whole_keys or k.shape[0])
        _cuda().mqa_logits(q, k, k_scale, weights, ks, ke, out, compressed, fill, whole, call)
    else:
        reference.mqa_logits(q, k, k_scale, weights, ks, ke, out, compressed, fill)


def _paged_mqa_logits_metadata(context_lens: Tensor, block_size: int, next_n: int, out: Tensor) -> None:
    call: Call | None = None
    if context_lens.is_cuda:
        call = ("paged_mqa_logits_metadata", block_size, next_n), (context_lens, out)
        if _cuda().repeat(call):
            return
    checks_logits.paged_mqa_logits_metadata(context_lens, block_size, next_n, out)
    if context_lens.shape[0] == 0:
        out.zero_()
    elif context_lens.is_cuda:
        _cuda().paged_mqa_logits_metadata(context_lens, block_size, out.shape[0] - 1, next_n, out, call)
    else:
        reference.paged_mqa_logits_metadata(context_lens, out.shape[0] - 1, next_n, out)


def _paged_mqa_logits_fp8(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    metadata: Tensor,
    out: Tensor,
) -> None:
    call: Call | None = None
    if q.is_cuda and not contracts.enabled(q):
        tensors = q, kv_cache, weights, context_lens, block_table, metadata, out
        call = ("paged_mqa_logits", out.shape), tensors
        if _cuda().repeat(call):
            return
    checks_logits.paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, metadata, out)
    if contracts.enabled(q):
        contracts.paged_contexts(
            context_lens, q.shape[1], block_table, kv_cache.shape[1], kv_cache.shape[0], out.shape[1]
        )
    if out.numel() == 0 or kv_cache.shape[0] == 0 or block_table.shape[1] == 0:
        return
    if q.is_cuda:
        _cuda().paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, metadata, out, call)
    else:
        reference.paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, out)


def _fake(*_arguments: object) -> None:
    """Meta implementation of most ops: outputs are given, so there is nothing to infer."""


def _fake_gemm(layout: str | None) -> Callable[..., None]:
    """Meta implementation of a GEMM: says at least, where a call is traced, that there is no such config.

    `layout` None: the call names it.
    """

    def fake(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *rest: Any) -> None:
        *others, config = rest  # the last argument, if it is given
        if isinstance(config, str):
            checks.gemm_config(layout or others[1], a, b, config)

    return fake


def _register() -> None:
    implementations = {
        "quantize_fp8": _quantize_fp8,
        "indexer_quantize_and_cache": _indexer_quantize_and_cache,
        "indexer_topk": _indexer_topk,
        "gemm_fp8": _gemm_fp8,
        "grouped_gemm_fp8_contiguous": _grouped_gemm_fp8_contiguous,
        "grouped_gemm_fp8_masked": _grouped_gemm_fp8_masked,
        "mqa_logits_fp8": _mqa_logits_fp8,
        "paged_mqa_logits_metadata": _paged_mqa_logits_metadata,
        "paged_mqa_logits_fp8": _paged_mqa_logits_fp8,
    }
    fakes = {
        "gemm_fp8": _fake_gemm("dense"),
        "grouped_gemm_fp8_contiguous": _fake_gemm(None),
        "grouped_gemm_fp8_masked": _fake_gemm("masked"),
    }
    for definition in _DEFINITIONS:
        name = definition.split("(", 1)[0]
        _library.define(definition)
        _library.impl(name, implementations[name], "CPU")
        _library.impl(name, implementations[name], "CUDA")
        _library.impl(name, fakes.get(name, _fake), "Meta")


_register()

_dispatch_modes = torch._C._len_torch_dispatch_stack
_gradients_on, _compiling = torch.is_grad_enabled, torch.compiler.is_compiling


def _eager(op: Callable[..., None], implementation: Callable[..., None]) -> Callable[..., None]:
    """`op` past torch's dispatcher, which is 1.5 us of a call, where that changes nothing.

    That is for plain CUDA tensors with gradients off, as engines run, and where nothing traces or intercepts.
    """

    def call(first: Tensor, *rest: Any) -> None:
        if (
            type(first) is Tensor
            and first.is_cuda
            and not _gradients_on()
            and not _compiling()
            and not _dispatch_modes()
        ):
            implementation(first, *rest)
        else:
            op(first, *rest)

    return call


_ops = torch.ops.moe_fp8
quantize_fp8 = _eager(_ops.quantize_fp8.default, _quantize_fp8)
indexer_quantize_and_cache = _eager(_ops.indexer_quantize_and_cache.default, _indexer_quantize_and_cache)
indexer_topk = _eager(_ops.indexer_topk.default, _indexer_topk)
gemm_fp8 = _eager(_ops.gemm_fp8.default, _gemm_fp8)
grouped_gemm_fp8_contiguous = _eager(_ops.grouped_gemm_fp8_contiguous.default, _grouped_gemm_fp8_contiguous)
grouped_gemm_fp8_masked = _eager(_ops.grouped_gemm_fp8_masked.default, _grouped_gemm_fp8_masked)
mqa_logits_fp8 = _eager(_ops.mqa_logits_fp8.default, _mqa_logits_fp8)
paged_mqa_logits_metadata = _eager(_ops.paged_mqa_logits_metadata.default, _paged_mqa_logits_metadata)
paged_mqa_logits_fp8 = _eager(_ops.paged_mqa_logits_fp8.default, _paged_mqa_logits_fp8)
