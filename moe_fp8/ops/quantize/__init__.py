"""FP8 quantization of activations (`quantize_fp8`), of SiLU(gate) * up (`silu_mul_quantize`) and of weights
(`quantize_fp8_blocks`).
"""

from moe_fp8.ops.quantize.public import quantize_fp8, quantize_fp8_blocks, silu_mul_quantize

__all__ = ["quantize_fp8", "quantize_fp8_blocks", "silu_mul_quantize"]
