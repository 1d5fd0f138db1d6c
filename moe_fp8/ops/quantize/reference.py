"""The definition of the quantizers in plain torch: the CPU implementation and the oracle of the tests."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from moe_fp8.limits import SCALE_BLOCK

#: The largest finite float8_e4m3fn value.
FP8_MAX = 448.0

#: The least amax of a group: groups with a smaller amax use this value, so that no scale is zero.
MIN_AMAX = 1e-10


def scale_from_amax(amax: Tensor, power_of_two: bool) -> Tensor:
    """fp32 scales for groups of largest magnitude `amax` (fp32): amax / 448, rounded up if asked.

    The rounding `2**ceil(log2(scale))` works on the exponent bits, so that it is exact.
    """
    # The divisor is a tensor, because torch on CUDA turns division by a Python number into a multiplication.
    scale = torch.div(amax.clamp_min(MIN_AMAX), amax.new_full((), FP8_MAX))
    if power_of_two:
        bits = scale.view(torch.int32)
        rounded = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        scale = torch.where(scale.isnan(), scale, rounded)
    return scale


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    return (values * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> None:
    """x [M,K] -> q fp8 [M,K], scale fp32 [M,K/128] (any strides)."""
    m, k = x.shape
    groups = x.float().reshape(m, k // SCALE_BLOCK, SCALE_BLOCK)
    group_scale = scale_from_amax(groups.abs().amax(-1), power_of_two)
    q.copy_(to_fp8(groups, group_scale[..., None]).reshape(m, k))
    scale.copy_(group_scale)


def silu_mul(x: Tensor, limit: float | None, rounded: bool = False) -> Tensor:
    """x [..., 2K], gate then up -> SiLU(gate) * up in fp32, [..., K]; gate and up are clamped by `limit`.

    `rounded`: SiLU(gate) and the product are rounded to bf16.
    """
    gate, up = x.float().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = gate / (1 + torch.exp(-gate))
    return (silu.bfloat16().float() * up).bfloat16().float() if rounded else silu * up


def silu_mul_quantize(
    x: Tensor,
    masked_m: Tensor | None,
    q: Tensor,
    scale: Tensor,
    power_of_two: bool,
    limit: float | None,
    rounded: bool = False,
) -> None:
    """`quantize` of `silu_mul`, for all rows or, with `masked_m`, for the first rows of each expert."""
    if masked_m is None:
        quantize(silu_mul(x, limit, rounded), q, scale, power_of_two)
        return
    for e, count in enumerate(masked_m.tolist()):
        rows = slice(0, max(count, 0))  # a slice stops at the end of the buffer
        quantize(silu_mul(x[e, rows], limit, rounded), q[e, rows], scale[e, rows], power_of_two)


def quantize_blocks(w: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """w [N,K] -> fp8 [N,K], fp32 [ceil(N/128), ceil(K/128)]."""
    n, k = w.shape
    blocks_n, blocks_k = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
    padded = w.new_zeros((blocks_n * SCALE_BLOCK, blocks_k * SCALE_BLOCK), dtype=torch.float32)
    padded[:n, :k] = w
    blocks = padded.view(blocks_n, SCALE_BLOCK, blocks_k, SCALE_BLOCK)
    scale = scale_from_amax(blocks.abs().amax((1, 3)), power_of_two)
    q = to_fp8(blocks, scale[:, None, :, None]).view_as(padded)
    return q[:n, :k].contiguous(), scale


@cache
def _fp8_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


def fp8_values(q: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of an fp8 tensor, as a new tensor."""
    if q.is_cuda:
        return q.to(dtype)
    # On a CPU, looking up the codes is five times as fast as torch's conversion.
    codes = q.view(torch.uint8).reshape(-1).int()
    return _fp8_table(dtype).index_select(0, codes).view(q.shape)
