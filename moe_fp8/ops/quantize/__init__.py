"""FP8 quantization: `quantize_fp8` of activations, `silu_mul_quantize` of what SiLU makes of them,
`quantize_fp8_blocks` of weights.
"""

from moe_fp8.ops.quantize.public import quantize_fp8, quantize_fp8_blocks, silu_mul_quantize

__all__ = ["quantize_fp8", "quantize_fp8_blocks", "silu_mul_quantize"]
