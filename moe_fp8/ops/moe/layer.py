"""The routed experts of a layer, from the tokens to the weighted sums of their experts' results.

The layer is that of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); each expert is a SwiGLU MLP (arXiv
2002.05202).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fp8 import limits
from moe_fp8.errors import ArgumentError
from moe_fp8.ops import arguments, sequence
from moe_fp8.ops import workspace as workspaces
from moe_fp8.ops.moe import checks
from moe_fp8.ops.scales import empty_mn_major

#: The tensors among the arguments of `fused_moe`, but for the workspace.
_TENSORS = (
    "x", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale", "x_scale", "expert_map", "out"
)  # fmt: skip


def _sizes(
    rows: int, num_experts: int, hidden_size: int, intermediate_size: int, interleaved: bool
) -> tuple[int, ...]:
    """Bytes of each buffer: FP8 rows, bf16 rows, scales of both inputs, the experts' offsets, places.

    The rows of the second input take the place of those of the first, and so do the outputs: each kernel
    begins to write only when the kernel before has read everything. But a GEMM that ends in SiLU writes the
    second input while it reads the first.
    """
    padded = -(-rows // 4) * 4
    fp8, wide = max(hidden_size, intermediate_size), max(hidden_size, 2 * intermediate_size)
    if interleaved:
        fp8, wide = hidden_size + intermediate_size, hidden_size
    return (
        rows * fp8,
        2 * rows * wide,
        4 * padded * (hidden_size // 128),
        4 * padded * (intermediate_size // 128),
        4 * (num_experts + 1),
        4 * rows,
    )


def moe_workspace_bytes(
    *,
    num_tokens: int,
    topk: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    interleaved: bool = False,
) -> int:
    """The bytes that `fused_moe` takes of its workspace.

    num_tokens: T, or the largest T of several calls. topk: experts of a token. num_experts: experts of this
    rank. hidden_size: K. intermediate_size: I, the width of an expert. interleaved: as in `fused_moe`.
    Raises ArgumentError unless K and I are positive multiples of 128 and the other sizes are from 0 to what
    `fused_moe` takes.
    """
    op = "moe_workspace_bytes"
    interleaved = arguments.flag(op, "interleaved", interleaved)
    num_tokens = arguments.integer(op, "num_tokens", num_tokens, 0)
    topk = arguments.integer(op, "topk", topk, 0)
    num_experts = arguments.integer(op, "num_experts", num_experts, 0)
    hidden_size = arguments.integer(op, "hidden_size", hidden_size)
    intermediate_size = arguments.integer(op, "intermediate_size", intermediate_size)
    for name, size, most in (
        ("topk", topk, limits.MAX_EXPERTS_PER_TOKEN),
        ("num_experts", num_experts, limits.MAX_EXPERTS),
    ):
        if size > most:
            raise ArgumentError(op, name, f"at most {most}", size)
    for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if limits.refuse_k(size):
            raise ArgumentError(op, name, "a positive multiple of 128", size)
    return workspaces.total_bytes(
        _sizes(num_tokens * topk, num_experts, hidden_size, intermediate_size, interleaved)
    )


def fused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    *,
    x_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    limit: float | None = None,
    power_of_two: bool = False,
    rounded: bool = False,
    interleaved: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum over each token's experts of weight * w2 @ (SiLU(w1 @ x) * (w3 @ x)), for prefill and decode.

    x: bf16 `[T, K]`, which is quantized, or float8_e4m3fn with x_scale: as in `moe_permute`.
    topk_ids: int32 or int64 `[T, k]`: the experts of each token, as in `moe_permute`; an id below 0 is none.
    topk_weights: fp32 `[T, k]`, as in `moe_combine`, or None if every weight is 1.
    w13: float8_e4m3fn `[E, 2I, K]`, contiguous: w1 (gate) stacked over w3 (up) of the E experts of this rank.
    w13_scale: fp32 `[E, 2I/128, K/128]`. w2: float8_e4m3fn `[E, K, I]`; w2_scale: fp32
    `[E, K/128, I/128]`. K and I are multiples of 128.
    x_scale, expert_map: as in `moe_permute`. limit, rounded: as in `silu_mul_quantize`.
    power_of_two: round the scales of both GEMMs' inputs up to powers of two.
    interleaved: w13 comes from `interleave_gate_up`. The results have the same bits, and there are four
    launches, since the first GEMM ends in SiLU and the quantization.
    workspace: uint8 `[bytes]`, contiguous, 16-byte aligned, of at least `moe_workspace_bytes`; its contents
    are lost. None: the op allocates it. It may not overlap any other argument.
    out: bf16 `[T, K]` as in `moe_combine`, or None. It may be x itself, which is read first, and shares no
    memory with any other argument.

    Returns out. A token without experts of this rank gets 0. The same call gives the same bits. A shared
    expert of the same width is one more expert, whose number every token has among its ids, with weight 1:
    the last column of buffers of k + 1 columns keeps both, and `route_topk` writes to the first k columns.

    Five launches: `moe_permute`, `grouped_gemm_fp8_contiguous` on rows without padding, `silu_mul_quantize`,
    the second GEMM, `moe_combine`; four if interleaved. No host synchronization; safe to capture: a replay
    reads ids anew. Nothing is allocated but the workspace and out. But a traced call (torch.compile) leaves
    the workspace alone and has a tensor for each part: Inductor would copy the parts that ops write, and get
    wrong addresses for some. Raises ArgumentError; in checked mode what its ops raise.
    """
    if x.dim() != 2 or topk_ids.dim() != 2:
        arguments.rank("fused_moe", "x", x, "[T, K]", 2)
        arguments.rank("fused_moe", "topk_ids", topk_ids, "[T, k]", 2)
    if interleaved is not True and interleaved is not False:  # no op reads it
        interleaved = arguments.flag("fused_moe", "interleaved", interleaved)
    if limit is not None:  # before any step has run
        arguments.swiglu_limit("fused_moe", limit)
    if out is None:
        out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if workspace is None and not arguments.traced():
        checks.layer_weights(x, w13, w13_scale, w2, w2_scale)
        sizes = _sizes(topk_ids.numel(), w13.shape[0], x.shape[1], w2.shape[2], interleaved)
        workspace = workspaces.new(workspaces.total_bytes(sizes), x)
    others = x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, x_scale, expert_map, out
    sequence.run(
        "fused_moe",
        (*_TENSORS, "workspace"),
        (*others, workspace),
        (limit, power_of_two, rounded, interleaved),
        partial(_check_memory, workspace, others),
        partial(_steps, others, workspace, limit, power_of_two, rounded, interleaved),
    )
    return out


def _check_memory(workspace: Tensor | None, others: tuple[Tensor | None, ...]) -> None:
    x = others[0]
    assert x is not None
    if workspace is not None:
        workspaces.check("fused_moe", workspace, x, _TENSORS, others)
    arguments.out_apart("fused_moe", _TENSORS[1:], others[1:])  # `out` may be x


class _Buffers(NamedTuple):
    """Tensors that the steps write, without `out`: both GEMMs' inputs and outputs, offsets, places of rows.

    `y` and `values` may lie where `wide` and `a` do. There is no `wide` if the first GEMM ends in SiLU.
    """

    a: Tensor
    a_scale: Tensor
    wide: Tensor | None
    values: Tensor
    scales: Tensor
    y: Tensor
    offsets: Tensor
    places: Tensor

    @classmethod
    def of(
        cls, workspace: Tensor | None, ids: Tensor, num_experts: int, k: int, width: int, interleaved: bool
    ) -> _Buffers:
        """The parts of the workspace, or new tensors. Raises ArgumentError if it is too small."""
        rows = ids.numel()
        sizes = _sizes(rows, num_experts, k, width, interleaved)
        num_bytes = workspaces.total_bytes(sizes)
        if workspace is not None and workspace.numel() < num_bytes:
            raise ArgumentError("fused_moe", "workspace", f"at least {num_bytes} bytes", workspace.numel())
        if workspace is None or arguments.traced():

            def new(dtype: torch.dtype, *size: int) -> Tensor:
                return torch.empty(size, dtype=dtype, device=ids.device)

            fp8, bf16, int32 = torch.float8_e4m3fn, torch.bfloat16, torch.int32
            return cls(
                new(fp8, rows, k),
                empty_mn_major((rows, k // 128), ids),
                None if interleaved else new(bf16, rows, 2 * width),
                new(fp8, rows, width),
                empty_mn_major((rows, width // 128), ids),
                new(bf16, rows, k),
                new(int32, num_experts + 1),
                new(int32, *ids.shape),
            )
        of_fp8, of_bf16, a_scale, scales, offsets, places = workspaces.buffers(workspace, sizes)
        of_fp8, of_bf16 = of_fp8.view(torch.float8_e4m3fn), of_bf16.view(torch.bfloat16)
        begin = rows * k if interleaved else 0
        return cls(
            of_fp8[: rows * k].view(rows, k),
            _mn_major(a_scale, rows, k),
            None if interleaved else of_bf16[: rows * 2 * width].view(rows, 2 * width),
            of_fp8[begin : begin + rows * width].view(rows, width),
            _mn_major(scales, rows, width),
            of_bf16[: rows * k].view(rows, k),
            offsets.view(torch.int32),
            places.view(torch.int32).view(ids.shape),
        )


def _steps(
    tensors: tuple[Any, ...],
    workspace: Tensor | None,
    limit: float | None,
    power_of_two: bool,
    rounded: bool,
    interleaved: bool,
) -> list[sequence.Step]:
    """The ops of the layer, and their arguments. `tensors` are in the order of _TENSORS."""
    x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, x_scale, expert_map, out = tensors
    checks.layer_weights(x, w13, w13_scale, w2, w2_scale)
    num_experts, rows = w13.shape[0], topk_ids.numel()
    buffers = _Buffers.of(workspace, topk_ids, num_experts, x.shape[1], w2.shape[2], interleaved)
    a, a_scale, wide, values, scales, y, offsets, places = buffers

    permute = x, x_scale, topk_ids, expert_map, a, a_scale, offsets, places, power_of_two
    steps: list[sequence.Step] = [("moe_permute", permute)]
    # Without a map, every place has a row; with a map, about the share of this rank's experts.
    expected_m = None if expert_map is None else -(-rows // max(expert_map.numel(), num_experts))

    def gemm(*operands: Tensor, out: Tensor, constant_weights: bool) -> sequence.Step:
        layout = offsets, "offsets", expected_m
        return "grouped_gemm_fp8_contiguous", (*operands, *layout, out, None, constant_weights, False)

    if wide is None:
        first = a, a_scale, w13, w13_scale, offsets, expected_m
        steps += [("grouped_gemm_silu_mul_fp8", (*first, limit, power_of_two, rounded, values, scales))]
    else:
        steps += [gemm(a, a_scale, w13, w13_scale, out=wide, constant_weights=False)]
        # Only the first offsets[num_experts] rows are rows of experts of this rank.
        silu = wide[None], offsets[num_experts:], values[None], scales[None]
        steps += [("silu_mul_quantize", (*silu, power_of_two, limit, rounded))]
    # Each kernel between `moe_permute` and this kernel lets the next begin only after its own wait, so the
    # offsets are written when this kernel begins. (A compiler may copy them, and run the copy later.)
    early = not arguments.traced()
    steps += [gemm(values, scales, w2, w2_scale, out=y, constant_weights=early)]
    return [*steps, ("moe_combine", (y, places, topk_weights, out))]


def _mn_major(buffer: Tensor, rows: int, width: int) -> Tensor:
    """The buffer as MN-major scales of rows of this width."""
    return buffer.view(torch.float32).view(width // 128, -(-rows // 4) * 4).t()[:rows]
