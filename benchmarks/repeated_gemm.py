"""Cases of `repetition`: the GEMMs with configs of every family of tiles, and the quantizers before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fp8

from . import inputs
from .repetition import Case, Work
from .shapes import DenseShape, GroupedShape, KGroupedShape, SiluMulShape, aligned_starts


@dataclass(frozen=True)
class QuantizeShape:
    """`m` is a multiple of 4, so scales have no padding between their columns."""

    m: int
    k: int


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, device=inputs.DEVICE, dtype=torch.int32)


def _addend(size: tuple[int, ...], accumulate: bool) -> Tensor | None:
    """Values that never change, to which products are added."""
    return torch.randn(size, device=inputs.DEVICE) if accumulate else None


def dense(
    shape: DenseShape,
    config: str | None = None,
    out_dtype: str = "bfloat16",
    accumulate: bool = False,
    of_rows: bool = False,
) -> Work:
    """`of_rows`: both operands have scales of 1 x 128."""
    a = inputs.activations(shape.m, shape.k)
    b = inputs.activations(shape.n, shape.k) if of_rows else inputs.weights(shape.n, shape.k)
    size = (shape.m, shape.n)
    c = _addend(size, accumulate)

    def call(out: Tensor) -> None:
        moe_fp8.gemm_fp8(*a, *b, c=c, out=out, config=config, constant_weights=True)

    return Work(call, size, getattr(torch, out_dtype), inputs.DEVICE)


def contiguous(
    shape: GroupedShape, config: str | None = None, out_dtype: str = "bfloat16", accumulate: bool = False
) -> Work:
    """Rows between segments belong to no expert; they are not defined, or with `accumulate` those of `c`."""
    counts = shape.counts()
    starts = aligned_starts(counts)
    if shape.layout == "offsets":
        starts = [sum(counts[:expert]) for expert in range(len(counts) + 1)]
    owners = [-1] * starts[-1]
    for expert, count in enumerate(counts):
        owners[starts[expert] : starts[expert] + count] = [expert] * count
    ends = [start + count for start, count in zip(starts[:-1], counts, strict=True)]
    index = {"m_indices": owners, "psum": ends, "offsets": starts}[shape.layout]
    layout: dict[str, Any] = {shape.layout: _int32(index)}
    a, b = inputs.activations(starts[-1], shape.k), inputs.weights(shape.n, shape.k, len(counts))
    size = (starts[-1], shape.n)
    c = _addend(size, accumulate)

    def call(out: Tensor) -> None:
        moe_fp8.grouped_gemm_fp8_contiguous(
            *a, *b, **layout, expected_m=shape.rows_per_expert, c=c, out=out, config=config
        )

    defined = None if shape.layout == "offsets" or accumulate else (_int32(owners) >= 0)[:, None]
    return Work(call, size, getattr(torch, out_dtype), inputs.DEVICE, defined)


def masked(
    shape: GroupedShape, config: str | None = None, out_dtype: str = "bfloat16", accumulate: bool = False
) -> Work:
    """Each expert's buffer has room for the longest expert.

    Rows past the expert's count are not defined, or with `accumulate` those of `c`.
    """
    counts = shape.counts()
    m_max = -(-max(counts) // 64) * 64
    a = inputs.expert_activations(len(counts), m_max, shape.k)
    b = inputs.weights(shape.n, shape.k, len(counts))
    masked_m = _int32(counts)
    size = (len(counts), m_max, shape.n)
    c = _addend(size, accumulate)

    def call(out: Tensor) -> None:
        moe_fp8.grouped_gemm_fp8_masked(
            *a, *b, masked_m, expected_m=shape.rows_per_expert, c=c, out=out, config=config
        )

    rows = torch.arange(m_max, device=inputs.DEVICE)
    defined = None if accumulate else (rows < masked_m[:, None])[:, :, None]
    return Work(call, size, getattr(torch, out_dtype), inputs.DEVICE, defined)


def k_grouped(shape: KGroupedShape, accumulate: bool = False) -> Work:
    counts = shape.counts()
    offsets = _int32([sum(counts[:expert]) for expert in range(len(counts) + 1)])
    a, b = inputs.activations(shape.m, sum(counts)), inputs.activations(shape.n, sum(counts))
    size = (len(counts), shape.m, shape.n)
    c = _addend(size, accumulate)

    def call(out: Tensor) -> None:
        moe_fp8.k_grouped_gemm_fp8(*a, *b, offsets, c=c, out=out)

    return Work(call, size, torch.float32, inputs.DEVICE)


def quantize(shape: QuantizeShape, power_of_two: bool = False, in_dtype: str = "bfloat16") -> Work:
    """The output holds bytes: all values, then all scales."""
    m, k = shape.m, shape.k
    x = torch.randn(m, k, device=inputs.DEVICE).to(getattr(torch, in_dtype))

    def call(out: Tensor) -> None:
        data = out.view(-1)
        q = data[: m * k].view(torch.float8_e4m3fn).view(m, k)
        scale = data[m * k :].view(torch.float32).view(k // 128, m).t()
        moe_fp8.quantize_fp8(x, power_of_two=power_of_two, out=(q, scale))

    return Work(call, (m, k + k // 32), torch.uint8, inputs.DEVICE)


def silu_mul(shape: SiluMulShape, power_of_two: bool = False, limit: float | None = None) -> Work:
    """The output holds bytes as in `quantize`: all values, then all scales.

    Rows past an expert's count are not defined.
    """
    counts, k = shape.counts(), shape.intermediate
    if shape.num_experts is None:
        experts, m, masked_m = 1, shape.m, None
    else:
        experts, m, masked_m = shape.num_experts, shape.buffer_rows or shape.m, _int32(counts)
    x = torch.randn(experts, m, 2 * k, device=inputs.DEVICE).bfloat16()
    valid = torch.arange(m, device=inputs.DEVICE) < _int32(counts)[:, None]
    defined = torch.empty(experts * m * (k + k // 32), device=inputs.DEVICE, dtype=torch.bool)
    values = experts * m * k
    defined[:values].view(experts, m, k)[:] = valid[..., None]
    defined[values:].view(experts, k // 128, m, 4)[:] = valid[:, None, :, None]

    def call(out: Tensor) -> None:
        data = out.view(-1)
        q = data[:values].view(torch.float8_e4m3fn).view(experts, m, k)
        scale = data[values:].view(torch.float32).view(experts, k // 128, m).mT
        if masked_m is None:
            moe_fp8.silu_mul_quantize(x[0], power_of_two=power_of_two, limit=limit, out=(q[0], scale[0]))
        else:
            moe_fp8.silu_mul_quantize(
                x, masked_m=masked_m, power_of_two=power_of_two, limit=limit, out=(q, scale)
            )

    size = experts * m, k + k // 32
    return Work(call, size, torch.uint8, inputs.DEVICE, defined.view(size))


def quantize_and_multiply(shape: DenseShape, weights: bool = False) -> Work:
    """quantize_fp8 writes an operand twice; a GEMM that reads the operand too early finds the first values.

    `weights`: the operand is B. A GEMM may read a constant B while the kernel before it still runs.
    """
    a, (b, b_scale) = inputs.activations(shape.m, shape.k), inputs.weights(shape.n, shape.k)
    rows = shape.n if weights else shape.m
    others, x = (torch.randn(rows, shape.k, device=inputs.DEVICE).bfloat16() for _ in range(2))
    written = moe_fp8.quantize_fp8(x)
    if weights:
        b = written[0]
    else:
        a = written

    def call(out: Tensor) -> None:
        moe_fp8.quantize_fp8(others, out=written)
        moe_fp8.quantize_fp8(x, out=written)
        moe_fp8.gemm_fp8(*a, b, b_scale, out=out)

    return Work(call, (shape.m, shape.n), torch.bfloat16, inputs.DEVICE)


def _dense(m: int, n: int, k: int, config: str | None = None, **options: Any) -> Case:
    given = {} if config is None else {"config": config}
    return Case("gemm_fp8", DenseShape(m, n, k), dense, given | options)


def _grouped(shape: GroupedShape, config: str | None = None, **options: Any) -> Case:
    given = {} if config is None else {"config": config}
    if shape.layout == "masked":
        return Case("grouped_gemm_fp8_masked", shape, masked, given | options)
    return Case("grouped_gemm_fp8_contiguous", shape, contiguous, given | options)


#: Weights are on the M side of wgmma and tokens on the N side. With 64 weight rows, warpgroups alternate.
_FEW_TOKENS = [
    _dense(1, 2112, 7168),
    _dense(1, 2112, 7168, "8x64"),
    _dense(7, 7168, 2048, "8x64/2k", out_dtype="float32"),
    _dense(5, 24576, 4096, "8x128"),
    _dense(8, 4096, 7168, "8x128/4k"),
    _dense(16, 2112, 7168, "16x64/3k"),
    _dense(13, 9216, 4096, "16x128"),
    _dense(32, 3072, 1536, "32x64"),
    _dense(30, 7168, 2048, "32x128/2k", out_dtype="float32"),
]

_MANY_TOKENS = [
    _dense(64, 4096, 7168, out_dtype="float32"),
    _dense(64, 2112, 1024, "64x64"),
    _dense(50, 2112, 7168, "64x64/3k"),
    _dense(64, 6144, 2048, "64x96"),
    _dense(64, 7168, 2048, "64x128/2k", out_dtype="float32"),
    _dense(128, 2112, 7168, "128x64/2k"),
    _dense(100, 4096, 2048, "128x96"),
    _dense(128, 3072, 7168, "128x96/2k"),
    _dense(128, 24576, 1536, "128x128"),
    _dense(180, 8192, 2048, "128x128/3k"),
    _dense(479, 3072, 6144, "128x128", out_dtype="float32"),
    _dense(1191, 4096, 7168, "128x192"),
    _dense(4096, 4096, 7168, "128x256/2p"),
    _dense(4096, 7168, 2048, "128x256/2p", out_dtype="float32"),
    _dense(2160, 9216, 4096, "128x256/2p"),
    _dense(330, 3072, 1536, "192x96"),
    _dense(1000, 4096, 2048, "192x128", out_dtype="float32"),
    _dense(1191, 4096, 7168),
]

_CONTIGUOUS = [
    _grouped(GroupedShape("offsets", 32, 8, 4096, 7168)),
    _grouped(GroupedShape("offsets", 32, 24, 7168, 2048, "zipf"), "32x128"),
    _grouped(GroupedShape("offsets", 16, 200, 4096, 4096, "sparse"), "192x96", out_dtype="float32"),
    _grouped(GroupedShape("psum", 32, 8, 1536, 2048, "routed"), "8x128"),
    _grouped(GroupedShape("offsets", 4, 120, 4096, 2048, "zipf"), "128x64"),
    _grouped(GroupedShape("psum", 8, 130, 3072, 2048, "spread"), "128x96"),
    _grouped(GroupedShape("psum", 16, 150, 4096, 7168, "zipf")),
    _grouped(GroupedShape("psum", 8, 500, 7168, 2048, "sparse"), "192x128"),
    _grouped(GroupedShape("psum", 4, 600, 4096, 7168, "zipf"), "128x192/2p"),
    _grouped(GroupedShape("m_indices", 16, 40, 4096, 4096, "spread"), "64x64"),
    _grouped(GroupedShape("m_indices", 8, 300, 4096, 7168, "zipf"), out_dtype="float32"),
    _grouped(GroupedShape("m_indices", 6, 250, 3072, 2048, "spread"), "128x128"),
    _grouped(GroupedShape("m_indices", 4, 1000, 7168, 2048), "128x256/2p"),
    _grouped(GroupedShape("m_indices", 3, 387, 4096, 2048, "zipf"), "192x128"),
]

_MASKED = [
    _grouped(GroupedShape("masked", 32, 4, 4096, 7168)),
    _grouped(GroupedShape("masked", 128, 8, 1536, 2048, "sparse"), "16x128"),
    _grouped(GroupedShape("masked", 48, 60, 7168, 2048, "zipf")),
    _grouped(GroupedShape("masked", 32, 64, 1536, 4096), "64x96", out_dtype="float32"),
    _grouped(GroupedShape("masked", 8, 120, 4096, 2048, "zipf"), "128x128"),
    _grouped(GroupedShape("masked", 8, 300, 4096, 4096, "zipf"), "128x192/2p", out_dtype="float32"),
    _grouped(GroupedShape("masked", 2, 512, 4096, 7168), "192x128"),
]

_K_GROUPED = [
    Case("k_grouped_gemm_fp8", KGroupedShape(8, 1024, 1536, 2048), k_grouped),
    Case("k_grouped_gemm_fp8", KGroupedShape(16, 256, 1000, 2112, "zipf", empty=3), k_grouped),
    Case("k_grouped_gemm_fp8", KGroupedShape(3, 4096, 2176, 1344), k_grouped, {"accumulate": True}),
    Case(
        "k_grouped_gemm_fp8",
        KGroupedShape(32, 512, 768, 2048, "zipf", empty=4),
        k_grouped,
        {"accumulate": True},
    ),
]

_ADDED: dict[str, Any] = {"out_dtype": "float32", "accumulate": True}

#: Products that are added to fp32, and the dense GEMM of operands that both have scales of 1 x 128.
_SUMS = [
    _dense(7, 7168, 2048, "8x64/2k", **_ADDED),
    _dense(30, 3072, 1536, "32x128", **_ADDED),
    _dense(64, 7168, 2048, "64x128/2k", **_ADDED),
    _dense(330, 3072, 1536, "192x96", **_ADDED),
    _dense(2160, 4096, 2048, "128x256/2p", **_ADDED),
    _grouped(GroupedShape("offsets", 16, 200, 4096, 4096, "sparse"), **_ADDED),
    _grouped(GroupedShape("m_indices", 8, 300, 4096, 7168, "zipf"), **_ADDED),
    _grouped(GroupedShape("masked", 32, 64, 1536, 4096), "64x96", **_ADDED),
    _dense(1536, 2048, 4096, of_rows=True),
    _dense(1000, 2112, 1024, of_rows=True, **_ADDED),
    _dense(2176, 1344, 8192, of_rows=True, **_ADDED),
]

_quantize_weights_and_multiply = partial(quantize_and_multiply, weights=True)

_QUANTIZE = [
    Case("quantize_fp8", QuantizeShape(64, 7168), quantize),
    Case("quantize_fp8", QuantizeShape(4096, 1536), quantize, {"power_of_two": True, "in_dtype": "float32"}),
    Case("quantize_fp8", QuantizeShape(16384, 7168), quantize),
    Case("silu_mul_quantize", SiluMulShape(64, 2048), silu_mul),
    Case("silu_mul_quantize", SiluMulShape(8192, 768), silu_mul, {"power_of_two": True, "limit": 7.0}),
    Case("silu_mul_quantize", SiluMulShape(64, 2048, num_experts=32, buffer_rows=128), silu_mul),
    Case("quantize_fp8 + gemm_fp8", DenseShape(16, 2112, 7168), quantize_and_multiply),
    Case("quantize_fp8 + gemm_fp8", DenseShape(1024, 4096, 2048), quantize_and_multiply),
    Case("quantize_fp8 of weights + gemm_fp8", DenseShape(16, 2112, 7168), _quantize_weights_and_multiply),
    Case("quantize_fp8 of weights + gemm_fp8", DenseShape(1024, 4096, 2048), _quantize_weights_and_multiply),
]

CASES = [*_FEW_TOKENS, *_MANY_TOKENS, *_CONTIGUOUS, *_MASKED, *_K_GROUPED, *_SUMS, *_QUANTIZE]
