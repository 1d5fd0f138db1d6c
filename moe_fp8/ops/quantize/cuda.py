"""CUDA launch of the quantiser: problem -> spec, grid and the one struct that the kernel takes."""

from __future__ import annotations

from torch import Tensor

from moe_fp8.ops import launch, registry, scales
from moe_fp8.ops.launch import Prepared
from moe_fp8.params import QUANTIZE
from moe_fp8.problems import QuantizeProblem
from moe_fp8.specs import select_quantize


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> Prepared | None:
    """x [M,K] -> q [M,K] fp8 and scale [M,K/128], MN-major or to be copied from scales that are."""
    if not scales.is_mn_major(scale):
        # torch's functionalisation may replace an output by a clone, which drops the padding of its stride.
        padded = scales.empty_mn_major(scale.shape, scale)
        registry.OPS["quantize_fp8"].run(x, q, padded, power_of_two)
        scale.copy_(padded)
        return None
    num_sms = launch.num_sms(x.get_device())
    m, k = x.shape
    chosen = select_quantize(QuantizeProblem(m, k, launch.IN_DTYPES[x.dtype], power_of_two, num_sms))
    block = launch.new_block(QUANTIZE)
    QUANTIZE.pack_into(block.buffer, 0, x.data_ptr(), q.data_ptr(), scale.data_ptr(), k, (m + 3) & -4, m, k)
    return chosen.spec, chosen.grid, block
