"""CUDA launches of the quantizers: problem -> spec, grid and the parameter struct of the kernel."""

from __future__ import annotations

import math

from torch import Tensor

from moe_fp8.ops import launch, registry, scales
from moe_fp8.ops.parameters import Prepared, prepared
from moe_fp8.params import QUANTIZE, SILU_MUL_QUANTIZE
from moe_fp8.problems import QuantizeProblem, SiluMulQuantizeProblem
from moe_fp8.specs import select_quantize, select_silu_mul_quantize


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> Prepared | None:
    """x [M,K] -> q [M,K] fp8 and scale [M,K/128].

    If `scale` is not MN-major, MN-major scales are computed and copied to it; then the result is None.
    """
    pitch = scales.pitch(scale)
    if pitch == 0:
        # torch's functionalisation may replace an output by a clone without the padding of its stride. (The
        # copy of the scales is what `compile_only` leaves.)
        padded = scales.to_mn_major(scale)
        registry.OPS["quantize_fp8"].run(x, q, padded, power_of_two)
        scale.copy_(padded)
        return None
    num_sms = launch.num_sms(x.get_device())
    m, k = x.shape
    chosen = select_quantize(QuantizeProblem(m, k, launch.IN_DTYPES[x.dtype], power_of_two, num_sms))
    return prepared(QUANTIZE, chosen.spec, chosen.grid, x, q, scale, x.stride(0), pitch, m, k)


def silu_mul_quantize(
    x: Tensor,
    masked_m: Tensor | None,
    q: Tensor,
    scale: Tensor,
    power_of_two: bool,
    limit: float | None,
    rounded: bool = False,
) -> Prepared | None:
    """x [M,2I] or [E,M,2I] -> q fp8 [...,I] and scale [...,I/128]; `scale` is handled as in `quantize`."""
    pitch = scales.pitch(scale)
    if pitch == 0:
        # to_mn_major copies the scales, so that rows that are not written keep their values.
        padded = scales.to_mn_major(scale)
        registry.OPS["silu_mul_quantize"].run(x, masked_m, q, padded, power_of_two, limit, rounded)
        scale.copy_(padded)
        return None
    num_experts = None if masked_m is None else x.shape[0]
    m, k = q.shape[-2:]
    num_sms = launch.num_sms(x.get_device())
    problem = SiluMulQuantizeProblem(m, k, num_experts, power_of_two, rounded, num_sms)
    chosen = select_silu_mul_quantize(problem)
    return prepared(
        SILU_MUL_QUANTIZE,
        chosen.spec,
        chosen.grid,
        x,
        masked_m,
        q,
        scale,
        0 if masked_m is None else x.stride(0),
        x.stride(-2),
        pitch,
        m,
        k,
        num_experts or 1,
        math.inf if limit is None else limit,
    )
