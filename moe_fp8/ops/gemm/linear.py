"""A linear layer on activations that are not quantized yet."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_fp8.ops import arguments, sequence
from moe_fp8.ops.scales import empty_mn_major

#: The tensors of `linear_fp8`; it allocates the last two.
_TENSORS = ("x", "weight", "weight_scale", "out", "q", "scale")


def linear_fp8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    power_of_two: bool = False,
    constant_weights: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight^T: `quantize_fp8` of x, and `gemm_fp8`.

    x: bf16, fp16 or fp32 `[M, K]`, as in `quantize_fp8`. power_of_two: round its scales up to powers of two.
    weight: float8_e4m3fn `[N, K]`; weight_scale: fp32 `[ceil(N/128), K/128]`: b and b_scale of `gemm_fp8`.
    constant_weights: as in `gemm_fp8`.
    out: bf16 or fp32 `[M, N]` as in `gemm_fp8`, or None for bf16. It may be x itself, which is read first.

    Returns out, with the bits of the two ops. Two launches. An eager call takes the CPU less time than calls
    of the two ops, since their launches are remembered together. It allocates the quantized x and its scales.
    No host synchronization; safe to capture. Raises what the two ops raise.
    """
    if x.dim() != 2 or weight.dim() != 2:
        arguments.rank("linear_fp8", "x", x, "[M, K]", 2)
        arguments.rank("linear_fp8", "weight", weight, "[N, K]", 2)
    if out is None:
        out = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16, device=x.device)
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = empty_mn_major((x.shape[0], x.shape[1] // 128), x)
    sequence.run(
        "linear_fp8",
        _TENSORS,
        (x, weight, weight_scale, out, q, scale),
        (power_of_two, constant_weights),
        # The other tensors are new, or may share memory.
        partial(arguments.out_apart, "linear_fp8", _TENSORS[1:4], (weight, weight_scale, out)),
        partial(_steps, (x, weight, weight_scale, out, q, scale), power_of_two, constant_weights),
    )
    return out


def _steps(
    tensors: tuple[Tensor, ...], power_of_two: bool, constant_weights: bool
) -> tuple[sequence.Step, sequence.Step]:
    """The ops of the layer, and their arguments. `tensors` are in the order of _TENSORS."""
    x, weight, weight_scale, out, q, scale = tensors
    arguments.demand_tensors("linear_fp8", {"weight_scale": weight_scale})
    if x.shape[1] != weight.shape[1]:
        expected = f"[M, {weight.shape[1]}], with the K of weight [N, K]"
        arguments.refuse_shape("linear_fp8", "x", x, expected)
    return (
        ("quantize_fp8", (x, q, scale, power_of_two)),
        ("gemm_fp8", (q, scale, weight, weight_scale, out, None, constant_weights, False)),
    )
