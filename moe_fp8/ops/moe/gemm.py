"""The first GEMM of experts with SiLU(gate) * up and the quantization at its end, and weights for it.

SiLU(gate) * up is SwiGLU (arXiv 2002.05202).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments
from moe_fp8.ops.gemm import contracts
from moe_fp8.ops.moe import checks, reference
from moe_fp8.ops.registry import register
from moe_fp8.ops.scales import empty_mn_major


def interleave_gate_up(w13: Tensor) -> Tensor:
    """Weights for `grouped_gemm_silu_mul_fp8`: eight rows of the gate, the same eight of up, and so on.

    w13: `[E, 2I, K]` of any dtype, w1 (gate) stacked over w3 (up); I is a multiple of 8. Returns a new tensor
    of the same shape and dtype. Block scales stay as they are. For offline use; it allocates a copy. Raises
    ArgumentError.
    """
    arguments.demand_tensors("interleave_gate_up", {"w13": w13})
    if w13.is_quantized or w13.layout is not torch.strided:
        raise ArgumentError("interleave_gate_up", "w13", "a dense tensor", f"{w13.dtype}, {w13.layout}")
    if w13.dim() != 3 or w13.shape[1] % 16:
        raise ArgumentError("interleave_gate_up", "w13", "[E, 2I, K] with I a multiple of 8", list(w13.shape))
    num_experts, n, k = w13.shape
    if w13.numel() == 0:
        return w13.clone()
    # torch on a CPU moves no FP8, so bytes are moved.
    w13 = w13.resolve_conj().resolve_neg()
    moved = w13.contiguous().view(torch.uint8).view(num_experts, 2, n // 16, 8, -1).transpose(1, 2)
    return moved.reshape(num_experts, n, -1).view(w13.dtype).view(num_experts, n, k)


gemm_silu_mul_op = register(
    "grouped_gemm_silu_mul_fp8(Tensor a, Tensor a_scale, Tensor w13, Tensor w13_scale, Tensor offsets, "
    "SymInt? expected_m, float? limit, bool power_of_two, bool rounded, Tensor(a!) q, Tensor(b!) scale) "
    "-> ()",
    check=checks.gemm_silu_mul,
    contract=lambda a, a_scale, w13, w13_scale, offsets, *_: contracts.contiguous(
        "grouped_gemm_silu_mul_fp8", "offsets", offsets, a_scale, w13_scale, "w13_scale"
    ),
    empty=lambda a, *_: a.numel() == 0,
    reference=reference.gemm_silu_mul,
    cuda="moe_fp8.ops.moe.cuda:gemm_silu_mul",
    mn_major="scale",
)


def grouped_gemm_silu_mul_fp8(
    a: Tensor,
    a_scale: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    *,
    offsets: Tensor,
    expected_m: int | None = None,
    limit: float | None = None,
    power_of_two: bool = False,
    rounded: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_fp8_contiguous` into bf16 and `silu_mul_quantize` of its rows, in one kernel.

    a: float8_e4m3fn `[M, K]`, contiguous; a_scale: fp32 `[M, K/128]`, MN-major, or of any strides for one
    more kernel. offsets, expected_m: as in `grouped_gemm_fp8_contiguous`.
    w13: float8_e4m3fn `[E, 2I, K]`, contiguous, as `interleave_gate_up` returns it; w13_scale: fp32
    `[E, 2I/128, K/128]`, contiguous, which interleaving leaves as it is. K and I are multiples of 128.
    limit, power_of_two, rounded: as in `silu_mul_quantize`.
    out: tensors `(q, scale)` to write to, as returned, or None.

    Returns `(q, scale)`: q float8_e4m3fn `[M, I]`, contiguous; scale fp32 `[M, I/128]`, MN-major. The bits
    are those of the two ops, which round the product to bf16 in between. Rows of no expert keep their
    values. Launches one kernel; no host synchronization; safe to capture: a replay reads offsets anew.
    Raises ArgumentError; in checked mode ContractError, as `grouped_gemm_fp8_contiguous` does.
    """
    op = "grouped_gemm_silu_mul_fp8"
    if out is None:
        if a.dim() != 2 or w13.dim() != 3:
            arguments.rank(op, "a", a, "[M, K]", 2)
            arguments.rank(op, "w13", w13, "[E, 2I, K]", 3)
        m, width = a.shape[0], w13.shape[1] // 2
        out = (
            torch.empty((m, width), dtype=torch.float8_e4m3fn, device=a.device),
            empty_mn_major((m, width // 128), a),
        )
    else:
        arguments.outputs(op, out, "q", "scale")
    gemm_silu_mul_op(a, a_scale, w13, w13_scale, offsets, expected_m, limit, power_of_two, rounded, *out)
    return out
