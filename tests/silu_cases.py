"""Random cases of silu_mul_quantize and checks of its results, for the CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_fp8 import silu_mul_quantize
from tests import cases
from tests.cases import F64, NAN_BYTE, SENTINEL

#: Relative error of exp and of the reciprocal in the CUDA kernel, as far as it shows in a scale.
EXP_TOLERANCE = 6e-6


def rows(m: int, intermediate: int, padding: int = 0, seed: int = 0) -> Tensor:
    """bf16 [m, 2 * intermediate]; rows differ in magnitude, with `padding` columns of NaN between them."""
    gen = cases.generator(seed + 31 * m + intermediate, "cpu")
    width = 2 * intermediate
    storage = torch.full((m, width + padding), float("nan"), dtype=torch.bfloat16)
    values = torch.randn(m, width, generator=gen) * (2 * torch.randn(m, 1, generator=gen)).exp()
    if m > 2:
        values[1] = 0
        # These gates let nothing of their up projection through, or all of it.
        values[2, :4] = torch.tensor([-60.0, 60.0, -300.0, 300.0])
    storage[:, :width] = values
    return storage[:, :width]


def expert_rows(counts: Sequence[int], m: int, intermediate: int, padding: int = 0, seed: int = 0) -> Tensor:
    """bf16 [E, m, 2 * intermediate]; rows past an expert's count are NaN."""
    x = rows(len(counts) * m, intermediate, padding, seed)
    x = x.unflatten(0, (len(counts), m))
    for e, count in enumerate(counts):
        x[e, max(count, 0) :] = float("nan")
    return x


def poisoned(*shape: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Outputs (q, scale) of `shape`: values are NaN, scales hold a number that is never a scale."""
    q = torch.full(shape, NAN_BYTE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    *leading, m, width = shape
    groups, pitch = width // 128, -(-m // 4) * 4
    stride = (pitch * groups, 1, pitch)[-len(shape) :] if leading else (1, pitch)
    scale = torch.empty_strided((*leading, m, groups), stride, device=device).fill_(SENTINEL)
    return q, scale


def exact(x: Tensor, limit: float | None = None) -> Tensor:
    """SiLU(gate) * up in float64, straight from the definition."""
    gate, up = x.to(F64).chunk(2, -1)
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate * torch.sigmoid(gate) * up


def check_values(q: Tensor, scale: Tensor, y: Tensor, power_of_two: bool = False) -> None:
    """Check (q, scale) against the float64 `y` [M, I].

    Scales must be equal up to rounding, values to half a step of e4m3.
    """
    m, width = y.shape
    groups = y.view(m, width // 128, 128)
    wanted = groups.abs().amax(-1).clamp_min(1e-10) / 448
    got = scale.to(F64)
    ratio = got / wanted
    if power_of_two:
        assert torch.equal(got.log2(), got.log2().round()), "a scale is no power of two"
        assert ((ratio > 1 - EXP_TOLERANCE) & (ratio < 2 * (1 + EXP_TOLERANCE))).all()
    else:
        assert ((ratio - 1).abs() < EXP_TOLERANCE).all()
    back = q.to(torch.float32).to(F64).view_as(groups) * got[..., None]
    # Values have three mantissa bits; below 2^-6, steps are 2^-9.
    step = torch.maximum(groups.abs() / 16, got[..., None] * 2**-10)
    assert ((back - groups).abs() <= step * 1.001 + groups.abs() * EXP_TOLERANCE).all()


def _order(q: Tensor) -> Tensor:
    """Codes as integers in the order of their values; neighbours differ by one."""
    code = q.view(torch.uint8).int()
    return torch.where(code < 0x80, code, 0x80 - code)


def check_like(
    got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], power_of_two: bool = False
) -> None:
    """Check that two results [M, I] are equal except for the error of exp.

    Scales must be equal up to rounding, and few values may differ, by one step.
    """
    q, scale = got[0].cpu(), got[1].cpu()
    ratio = scale / expected[1]
    same = (ratio - 1).abs() < EXP_TOLERANCE
    if power_of_two:
        # Close to a power of two, one scale may be rounded up and the other not.
        assert (same | (ratio == 2) | (ratio == 0.5)).all()
        assert same.float().mean() > 0.99
    else:
        assert same.all()
    m, groups = scale.shape
    difference = (_order(q) - _order(expected[0])).abs().view(m, groups, 128)[same]
    assert difference.max() <= 1
    assert (difference > 0).sum() <= 1 + difference.numel() // 1000


def check_masked(
    x: Tensor, counts: Sequence[int], limit: float | None = None, power_of_two: bool = False
) -> None:
    """Run the op on x's device: valid rows must be as on the CPU, other rows unchanged."""
    num_experts, m, width = x.shape
    shape = (num_experts, m, width // 2)
    out = poisoned(*shape, device=x.device.type)
    masked_m = torch.tensor(counts, dtype=torch.int32, device=x.device)
    got = silu_mul_quantize(x, masked_m=masked_m, limit=limit, power_of_two=power_of_two, out=out)
    assert got[0] is out[0] and got[1] is out[1]
    check_experts(out, x, counts, limit, power_of_two)


def check_experts(
    out: tuple[Tensor, Tensor],
    x: Tensor,
    counts: Sequence[int],
    limit: float | None = None,
    power_of_two: bool = False,
) -> None:
    """Check outputs that were poisoned before the op ran on them with these counts."""
    host = x.cpu()
    for e, wanted in enumerate(counts):
        count = min(max(wanted, 0), x.shape[1])
        q, scale = out[0][e].cpu(), out[1][e].cpu()
        assert (q[count:].view(torch.uint8) == NAN_BYTE).all(), f"expert {e}: wrote a value behind its rows"
        assert (scale[count:] == SENTINEL).all(), f"expert {e}: wrote a scale behind its rows"
        if count:
            valid = q[:count], scale[:count]
            check_values(*valid, exact(host[e, :count], limit), power_of_two)
            expected = silu_mul_quantize(host[e, :count], limit=limit, power_of_two=power_of_two)
            check_like(valid, expected, power_of_two)
