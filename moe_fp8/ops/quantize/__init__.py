"""FP8 quantisation of activations (`quantize_fp8`) and of weights (`quantize_fp8_blocks`)."""

from moe_fp8.ops.quantize.public import quantize_fp8, quantize_fp8_blocks

__all__ = ["quantize_fp8", "quantize_fp8_blocks"]
