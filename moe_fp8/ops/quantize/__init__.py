"""FP8 quantization of activations (`quantize_fp8`), of SiLU(gate) * up (`silu_mul_quantize`) and of weights
(`quantize_fp8_blocks`).
"""
