"""Block-scaled FP8 GEMMs, dense and grouped by expert; all NT: D[M,N] = A[M,K] @ B[N,K]^T, or C + A @ B^T.

Scaling follows DeepSeek-V3 (arXiv 2412.19437, section 3.3): activations have 1 x 128 scales and weights have
128 x 128 scales; for gradients of weights both operands have 1 x 128 scales. The partial sum over each 128 of
K is multiplied by the product of the two scales and added in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments
from moe_fp8.ops.gemm import checks, contracts, reference
from moe_fp8.ops.gemm.addend import add_to
from moe_fp8.ops.registry import register

gemm_op = register(
    "gemm_fp8(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) out, str? config=None, "
    "bool constant_weights=False, bool accumulate=False) -> ()",
    check=checks.gemm,
    contract=lambda a, a_scale, b, b_scale, *_: contracts.dense(b, a_scale, b_scale),
    empty=lambda a, a_scale, b, b_scale, out, *_: out.numel() == 0,
    reference=lambda a, a_scale, b, b_scale, out, config, constant_weights, accumulate: reference.gemm(
        a, a_scale, b, b_scale, out, accumulate
    ),
    cuda="moe_fp8.ops.gemm.cuda:dense",
    fake=checks.traced_config("dense", 1),
)


def gemm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: str | None = None,
    constant_weights: bool = False,
) -> Tensor:
    """Dense product of quantized activations and weights: out = c + (a * a_scale) @ (b * b_scale)^T.

    a: float8_e4m3fn `[M, K]`. a_scale: fp32 `[M, K/128]`, MN-major: stride `(1, P)`, P a multiple of 4 and at
    least M, as `quantize_fp8` and `to_mn_major` return. An additional kernel converts any other stride;
    `moe_fp8.jit.counters().scale_conversions` counts these conversions.
    b: float8_e4m3fn `[N, K]`. b_scale: fp32 `[ceil(N/128), K/128]`, contiguous, for a scale per 128 x 128; or
    fp32 `[N, K/128]`, MN-major as a_scale is, for a scale per 1 x 128, as gradients of weights have.
    c: fp32 `[M, N]` of any strides, or None for zeros. With c, out is fp32. It may be `out`, which then
    accumulates in place; any other c shares no memory with out, and one more kernel copies it into out first.
    out: bf16 or fp32 `[M, N]`, or None to allocate it with `out_dtype` (by default bf16, with c fp32).
    Each row of a, b and out is contiguous. Rows are a multiple of 16 bytes apart and do not overlap.
    K % 128 == 0, N % 64 == 0, addresses 16-byte aligned. M = 0 returns at once.
    config: the tile as text, such as "128x64" or "64x64/3k" (docs/tuning.md), or None for the selector's
    choice. It never changes more than the last bits: configs that divide K (a "k" at the end, or 64 weight
    rows and up to 32 tokens) round parts of the sum separately. With scales of 1 x 128 on b it must be None.
    constant_weights: True promises that no kernel that may still run writes `b` or `b_scale`, which holds for
    weights loaded long before. The kernel then reads them while the previous kernel ends, which shortens a
    short call (docs/graphs.md, "Launches that overlap"). If the promise is false, the result is wrong.

    Returns out. Accumulates in fp32; the same call gives the same bits, with c too. With c and scales of
    1 x 128 on b, subnormal sums may be flushed to zero. No host synchronization; safe to capture.
    Raises ArgumentError; in checked mode ContractError, which names the row, for a scale that is NaN or
    infinite; TileError for a config that this call may not use; JitMissError after `freeze()` if warmup did
    not cover the shape. Plans do not include configs that callers ask for.
    """
    if out is None:
        if a.dim() != 2 or b.dim() != 2:
            arguments.rank("gemm_fp8", "a", a, "[M, K]", 2)
            arguments.rank("gemm_fp8", "b", b, "[N, K]", 2)
        dtype = _dtype("gemm_fp8", out_dtype, c)
        out = torch.empty((a.shape[0], b.shape[0]), dtype=dtype, device=a.device)
    elif out_dtype is not None:
        arguments.given_out("gemm_fp8", out, out_dtype)
    if c is None:
        gemm_op(a, a_scale, b, b_scale, out, config, constant_weights, False)
    else:
        operands = a, a_scale, b, b_scale, out, config, constant_weights, True
        add_to(c, out, "gemm_fp8", *operands)
    return out


def _dtype(op: str, given: torch.dtype | None, c: Tensor | None) -> torch.dtype:
    """The dtype of an output that the op allocates."""
    return arguments.out_dtype(op, given, torch.bfloat16 if c is None else torch.float32)


contiguous_op = register(
    "grouped_gemm_fp8_contiguous(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor index, "
    "str layout, SymInt? expected_m, Tensor(a!) out, str? config=None, bool constant_weights=False, "
    "bool accumulate=False) -> ()",
    check=checks.gemm_contiguous,
    contract=lambda a, a_scale, b, b_scale, index, layout, *_: contracts.contiguous(
        "grouped_gemm_fp8_contiguous", layout, index, a_scale, b_scale
    ),
    empty=lambda a, a_scale, b, b_scale, index, layout, expected_m, out, *_: (
        out.numel() == 0 or b.shape[0] == 0
    ),
    reference=lambda a, a_scale, b, b_scale, index, layout, expected_m, out, *options: (
        reference.gemm_contiguous(layout, a, a_scale, b, b_scale, index, out, accumulate=options[-1])
    ),
    cuda="moe_fp8.ops.gemm.cuda:contiguous",
    fake=checks.traced_config(None, 4),
)


def grouped_gemm_fp8_contiguous(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m_indices: Tensor | None = None,
    psum: Tensor | None = None,
    offsets: Tensor | None = None,
    expected_m: int | None = None,
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: str | None = None,
    constant_weights: bool = False,
) -> Tensor:
    """Product of each expert's rows of `a` and its own weights; the rows of all experts follow one another.

    a, a_scale: as in `gemm_fp8`. b: float8_e4m3fn `[E, N, K]`, rows as in `gemm_fp8`, an expert right behind
    the other: stride `(N*S, S, 1)`. b_scale: fp32 `[E, ceil(N/128), K/128]`, contiguous. out: bf16 or fp32
    `[M, N]` as in `gemm_fp8`, or None. c: fp32 `[M, N]`, to which the products are added, as in `gemm_fp8`.

    Give exactly one of these three index tensors (int32, contiguous, on a's device):
    m_indices `[M]`: the expert of each row, -1 for padding; an expert's rows start at multiples of 128.
    psum `[E]`: one past each expert's last row; expert e starts at `align(psum[e-1], 128)`, expert 0 at 0.
    offsets `[E+1]`: expert e has rows `offsets[e]` to `offsets[e+1]`, without alignment or padding.

    expected_m: the expected rows of an expert, by default the mean of a's rows without the padding to be
    expected. It affects only speed; any value is safe. In `m_indices` and `psum`, the number of a's rows may
    count for more (docs/tuning.md).
    config: the tile as text (docs/tuning.md), or None. Results are bitwise independent of `expected_m` and
    `config`.
    constant_weights: as in `gemm_fp8`; the promise includes the index tensor.

    Returns out. Rows of no expert may hold anything in `a` and `a_scale` (NaN included) and are unspecified
    in out. With c, out has c's values there, except in rows of -1 that an expert's rows follow within the
    same 128. Experts may be empty. No host synchronization; safe to capture: a replay reads the index again.
    Raises ArgumentError; in checked mode ContractError, which names the expert and the row, if the index
    breaks the rules above or a scale that counts is NaN or infinite; TileError for a config that this call
    may not use; JitMissError after `freeze()` if warmup did not cover the shape or the selector would not
    choose the config.
    """
    op = "grouped_gemm_fp8_contiguous"
    if offsets is not None:
        layout, index, given = "offsets", offsets, m_indices is None and psum is None
    elif psum is not None:
        layout, index, given = "psum", psum, m_indices is None
    elif m_indices is not None:
        layout, index, given = "m_indices", m_indices, True
    else:
        raise ArgumentError(op, "m_indices, psum, offsets", "exactly one of the three", "none")
    if not given:
        raise ArgumentError(op, "m_indices, psum, offsets", "exactly one of the three", "several")
    if not isinstance(index, Tensor):
        arguments.demand_tensors(op, {layout: index})
    if out is None:
        if a.dim() != 2 or b.dim() != 3:
            arguments.rank(op, "a", a, "[M, K]", 2)
            arguments.rank(op, "b", b, "[E, N, K]", 3)
        dtype = _dtype(op, out_dtype, c)
        out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    elif out_dtype is not None:
        arguments.given_out(op, out, out_dtype)
    operands = (a, a_scale, b, b_scale, index, layout, expected_m, out, config, constant_weights)
    if c is None:
        contiguous_op(*operands, False)
    else:
        add_to(c, out, op, *operands, True)
    return out


masked_op = register(
    "grouped_gemm_fp8_masked(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor masked_m, "
    "SymInt? expected_m, Tensor(a!) out, str? config=None, bool accumulate=False) -> ()",
    check=checks.gemm_masked,
    contract=lambda a, a_scale, b, b_scale, masked_m, *_: contracts.masked(masked_m, a_scale, b_scale),
    empty=lambda a, a_scale, b, b_scale, masked_m, expected_m, out, *_: out.numel() == 0,
    reference=lambda a, a_scale, b, b_scale, masked_m, expected_m, out, config, accumulate: (
        reference.gemm_masked(a, a_scale, b, b_scale, masked_m, out, accumulate)
    ),
    cuda="moe_fp8.ops.gemm.cuda:masked",
    fake=checks.traced_config("masked", 3),
)


def grouped_gemm_fp8_masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    masked_m: Tensor,
    *,
    expected_m: int | None = None,
    c: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: str | None = None,
) -> Tensor:
    """Product of the first `masked_m[e]` rows of each expert's buffer and the expert's weights.

    a: float8_e4m3fn `[E, Mmax, K]`, stride `(Mmax*S, S, 1)`. a_scale: fp32 `[E, Mmax, K/128]`, MN-major:
    stride `(P*K/128, 1, P)`, P a multiple of 4 and at least Mmax; any other stride is converted and counted.
    b, b_scale: as in `grouped_gemm_fp8_contiguous`.
    masked_m: int32 `[E]`, contiguous, on a's device, 0 <= masked_m[e] <= Mmax.
    expected_m: the expected rows of an expert. It affects only speed; any value is safe.
    config: the tile as text (docs/tuning.md), or None. Results are bitwise independent of `expected_m` and
    `config`.
    c: fp32 `[E, Mmax, N]`, to which the products are added, as in `gemm_fp8`.
    out: bf16 or fp32 `[E, Mmax, N]`, stride `(Mmax*S, S, 1)`, or None. Every S is a multiple of 16 bytes.

    Returns out. Rows from masked_m[e] on may hold anything in `a` and `a_scale` (NaN included) and are
    unspecified in out; with c, out has c's values there. No host synchronization; safe to capture: a replay
    reads masked_m again.
    Raises ArgumentError; in checked mode ContractError, which names the expert, and the row of a scale that
    is NaN or infinite; TileError for a config that this call may not use; JitMissError after `freeze()` if
    its kernel was not loaded.
    """
    op = "grouped_gemm_fp8_masked"
    if out is None:
        if a.dim() != 3 or b.dim() != 3:
            arguments.rank(op, "a", a, "[E, Mmax, K]", 3)
            arguments.rank(op, "b", b, "[E, N, K]", 3)
        dtype = _dtype(op, out_dtype, c)
        out = torch.empty((a.shape[0], a.shape[1], b.shape[1]), dtype=dtype, device=a.device)
    elif out_dtype is not None:
        arguments.given_out(op, out, out_dtype)
    operands = (a, a_scale, b, b_scale, masked_m, expected_m, out, config)
    if c is None:
        masked_op(*operands, False)
    else:
        add_to(c, out, op, *operands, True)
    return out
