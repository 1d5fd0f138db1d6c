"""CUDA launches of the quantizers: problem -> spec, grid and the parameter struct of the kernel."""

from __future__ import annotations

import math

from torch import Tensor

from moe_fp8.ops import launch, scales
from moe_fp8.ops.arguments import IN_DTYPES
from moe_fp8.ops.parameters import Prepared, prepared
from moe_fp8.params import QUANTIZE, SILU_MUL_QUANTIZE
from moe_fp8.problems import QuantizeProblem, SiluMulQuantizeProblem
from moe_fp8.specs import select_quantize, select_silu_mul_quantize


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> Prepared:
    """x [M,K] -> q [M,K] fp8 and scale [M,K/128]."""
    num_sms = launch.num_sms(x.get_device())
    m, k = x.shape
    chosen = select_quantize(QuantizeProblem(m, k, IN_DTYPES[x.dtype], power_of_two, num_sms))
    return prepared(QUANTIZE, chosen.spec, chosen.grid, x, q, scale, x.stride(0), scales.pitch(scale), m, k)


def silu_mul_quantize(
    x: Tensor,
    masked_m: Tensor | None,
    q: Tensor,
    scale: Tensor,
    power_of_two: bool,
    limit: float | None,
    rounded: bool,
) -> Prepared:
    """x [M,2I] or [E,M,2I] -> q fp8 [...,I] and scale [...,I/128]."""
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
        scales.pitch(scale),
        m,
        k,
        num_experts or 1,
        math.inf if limit is None else limit,
    )
