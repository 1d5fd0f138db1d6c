"""FP8 quantization: activations per 1 x 128 group, alone or after SiLU; weights per 128 x 128 block.

The definition is from DeepSeek-V3 (arXiv 2412.19437, section 3.3.2): scale = amax / 448, value = fp8 x scale.
SiLU(gate) * up is SwiGLU (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments
from moe_fp8.ops.quantize import checks, contracts, reference
from moe_fp8.ops.registry import register
from moe_fp8.ops.scales import empty_mn_major

quantize_op = register(
    "quantize_fp8(Tensor x, Tensor(a!) q, Tensor(b!) scale, bool power_of_two) -> ()",
    check=checks.quantize,
    empty=lambda x, q, scale, power_of_two: x.shape[0] == 0,
    reference=reference.quantize,
    cuda="moe_fp8.ops.quantize.cuda:quantize",
    mn_major="scale",
)


def quantize_fp8(
    x: Tensor, *, power_of_two: bool = False, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize activations to FP8 with one scale per 1 x 128 group along K.

    x: bf16, fp16 or fp32 `[M, K]`, K a positive multiple of 128; M = 0 is allowed. Rows are contiguous in
    themselves, 16-byte aligned, and any multiple of 16 bytes apart, 0 included.
    power_of_two: round scales up to powers of two (UE8M0-representable), kept as fp32.
    out: tensors `(q, scale)` to write to, as returned, or None. The scales' stride may also be `(1, P)`, P a
    larger multiple of 4, as in the first M rows of a larger buffer. Scales of any other stride take two
    more kernels.

    Returns `(q, scale)`: q float8_e4m3fn `[M, K]`, contiguous; scale fp32 `[M, K/128]`, MN-major: stride
    `(1, align(M, 4))`, which the GEMMs read without conversion. `q * scale` approximates x in x's unit.

    For a group, amax = max |x| in fp32, at least 1e-10; scale = amax / 448 (IEEE division), or
    `2**ceil(log2(scale))`; q = round-to-nearest-even(clamp(x * (1 / scale), -448, 448)). The CPU and CUDA
    implementations agree bit for bit on finite inputs. The results of a group that holds NaN or infinity
    are unspecified; other groups are unaffected.

    Launches one kernel; safe to capture. Raises ArgumentError.
    """
    if x.dim() != 2:
        arguments.rank("quantize_fp8", "x", x, "[M, K]", 2)
    if out is None:
        m, k = x.shape
        out = torch.empty_like(x, dtype=torch.float8_e4m3fn), empty_mn_major((m, k // 128), x)
    else:
        arguments.outputs("quantize_fp8", out, "q", "scale")
    q, scale = out
    quantize_op(x, q, scale, power_of_two)
    return out


silu_mul_quantize_op = register(
    "silu_mul_quantize(Tensor x, Tensor? masked_m, Tensor(a!) q, Tensor(b!) scale, bool power_of_two, "
    "float? limit, bool rounded=False) -> ()",
    check=checks.silu_mul_quantize,
    contract=lambda x, masked_m, *_: contracts.silu_mul_quantize(x, masked_m),
    empty=lambda x, masked_m, q, *_: q.numel() == 0,
    reference=reference.silu_mul_quantize,
    cuda="moe_fp8.ops.quantize.cuda:silu_mul_quantize",
    mn_major="scale",
)


def silu_mul_quantize(
    x: Tensor,
    *,
    masked_m: Tensor | None = None,
    power_of_two: bool = False,
    limit: float | None = None,
    rounded: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """SiLU(gate) * up, quantized as by `quantize_fp8`: from an MLP's first GEMM to the input of its second.

    x: bf16 `[M, 2I]`. Columns 0 to I - 1 are the gate and the others are the up projection, as in the product
    with w1 stacked over w3. I is a positive multiple of 128; M = 0 is allowed. Each row is contiguous and
    16-byte aligned. Rows, and experts, are any multiple of 16 bytes apart, 0 included.
    masked_m: int32 `[E]`, contiguous, on x's device, or None. If it is given, x is `[E, Mmax, 2I]`, and only
    the first `masked_m[e]` rows of each expert, clamped to 0 to Mmax, are read and written. Other rows may
    hold anything (NaN included) in x and keep their values in out.
    power_of_two: round scales up to powers of two, as in `quantize_fp8`.
    limit: None, or the positive limit of DeepSeek-V4's clamp before SiLU: gate = min(gate, limit) and
    up = clamp(up, -limit, limit).
    rounded: round SiLU(gate) and the product to bf16, as a layer does whose steps all end in bf16 (vLLM,
    transformers). Without it, both stay in fp32 up to the quantization.
    out: tensors `(q, scale)` to write to, as returned, or None; the scales' stride as in `quantize_fp8`.

    Returns `(q, scale)`: q float8_e4m3fn `[M, I]` or `[E, Mmax, I]`, contiguous; scale fp32 `[..., I/128]`,
    MN-major: stride `(1, align(M, 4))` or `(align(Mmax, 4) * I/128, 1, align(Mmax, 4))`, which the GEMMs read
    without conversion. `q * scale` approximates `gate / (1 + exp(-gate)) * up`, whose unit is x's unit
    squared.

    The CUDA kernel uses the hardware's exp and reciprocal, which are within 5e-6 of the fp32 functions.
    Therefore its scales differ from the CPU reference by a few units in the last place; a scale that is
    rounded up to a power of two may be the next power. A value differs by at most one rounding step of FP8.
    Gates below -87 give 0. The results of a group that holds NaN or infinity are unspecified; other groups
    are unaffected.

    Launches one kernel without host synchronization; safe to capture: a replay reads masked_m again. Raises
    ArgumentError; in checked mode ContractError, which names the expert, for a count outside 0 to Mmax.
    """
    dims = 2 if masked_m is None else 3
    if x.dim() != dims:
        expected = "[M, 2I]" if masked_m is None else "[E, Mmax, 2I], as masked_m is given"
        arguments.rank("silu_mul_quantize", "x", x, expected, dims)
    if out is None:
        shape = *x.shape[:-1], x.shape[-1] // 2
        q = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
        out = q, empty_mn_major((*shape[:-1], shape[-1] // 128), x)
    else:
        arguments.outputs("silu_mul_quantize", out, "q", "scale")
    q, scale = out
    silu_mul_quantize_op(x, masked_m, q, scale, power_of_two, limit, rounded)
    return out


def quantize_fp8_blocks(w: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize weights to FP8 with one scale per 128 x 128 block, in plain torch, for offline use.

    w: bf16, fp16 or fp32 `[N, K]` or `[E, N, K]`. N and K need not be multiples of 128, since the blocks at
    the edge may be smaller; but the GEMMs require K % 128 == 0 and N % 64 == 0.
    power_of_two: round scales up to powers of two, kept as fp32.

    Returns `(q, scale)`: q float8_e4m3fn of w's shape, contiguous; scale fp32 `[ceil(N/128), ceil(K/128)]`
    or `[E, ...]`, row-major. Scales are defined as in `quantize_fp8`, with amax over the block. Raises
    ArgumentError. The function allocates memory and is not meant for capture.
    """
    arguments.demand_tensors("quantize_fp8_blocks", {"w": w})
    power_of_two = arguments.flag("quantize_fp8_blocks", "power_of_two", power_of_two)
    if w.dim() not in (2, 3):
        raise ArgumentError("quantize_fp8_blocks", "w", "shape [N, K] or [E, N, K]", list(w.shape))
    if w.dtype not in arguments.IN_DTYPES:
        raise ArgumentError("quantize_fp8_blocks", "w", "dtype bfloat16, float16 or float32", w.dtype)
    if w.shape[-2] == 0 or w.shape[-1] == 0:
        raise ArgumentError("quantize_fp8_blocks", "w", "N and K of at least 1", list(w.shape))
    w = w.detach()
    if w.dim() == 2:
        return reference.quantize_blocks(w, power_of_two)
    num_experts, n, k = w.shape
    q = torch.empty((num_experts, n, k), dtype=torch.float8_e4m3fn, device=w.device)
    scale = w.new_empty((num_experts, -(-n // 128), -(-k // 128)), dtype=torch.float32)
    # This loop quantizes expert by expert, so that the fp32 working copy holds only one expert.
    for e in range(num_experts):
        q[e], scale[e] = reference.quantize_blocks(w[e], power_of_two)
    return q, scale
