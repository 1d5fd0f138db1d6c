"""Random inputs on the GPU, and the float64 result of an op on them.

Values are normal and quantized as in serving. Zeros are never timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import moe_fp8

from .shapes import MqaShape, PagedShape

DEVICE = torch.device("cuda")
FP8 = torch.float8_e4m3fn
_BLOCK = 128

#: fp8 values and their scales.
Quantized = tuple[Tensor, Tensor]


def activations(rows: int, k: int) -> Quantized:
    """fp8 [rows, k] and its MN-major scales."""
    x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
    return moe_fp8.quantize_fp8(x)


def index_keys(rows: int, dim: int) -> Quantized:
    """fp8 [rows, dim], and fp32 scales [rows]."""
    x = torch.randn(rows, dim, device=DEVICE)
    scale = x.abs().amax(1) / torch.finfo(FP8).max
    return x.div_(scale[:, None]).to(FP8), scale


def expert_activations(num_experts: int, rows: int, k: int) -> Quantized:
    """fp8 [num_experts, rows, k] and its MN-major scales [num_experts, rows, k/128]."""
    fp8, scale = activations(num_experts * rows, k)
    return fp8.view(num_experts, rows, k), moe_fp8.to_mn_major(scale.view(num_experts, rows, -1))


def weights(n: int, k: int, num_experts: int | None = None) -> Quantized:
    """fp8 [n, k] or [num_experts, n, k] and its 128 x 128 block scales."""
    if num_experts is None:
        return moe_fp8.quantize_fp8_blocks(torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16))
    fp8 = torch.empty(num_experts, n, k, device=DEVICE, dtype=FP8)
    scale = torch.empty(num_experts, -(-n // _BLOCK), k // _BLOCK, device=DEVICE)
    for expert in range(num_experts):  # bf16 and fp32 copies of all experts would not fit
        fp8[expert], scale[expert] = weights(n, k)
    return fp8, scale


def dequantize_rows(fp8: Tensor, scale: Tensor) -> Tensor:
    """float64 [M, K] from 1 x 128 scales [M, K/128]."""
    return fp8.float().double() * scale.double().repeat_interleave(_BLOCK, dim=1)


def dequantize_blocks(fp8: Tensor, scale: Tensor) -> Tensor:
    """float64 [N, K] from 128 x 128 scales; N need not be a multiple of 128."""
    rows = scale.double().repeat_interleave(_BLOCK, dim=0)[: fp8.shape[0]]
    return fp8.float().double() * rows.repeat_interleave(_BLOCK, dim=1)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference|| in float64; NaN if `out` holds a NaN."""
    difference = torch.linalg.vector_norm(out.double() - reference)
    return float(difference / torch.linalg.vector_norm(reference))


def gemm_error(out: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> float:
    """Error of one expert's rows against the float64 product of the dequantized inputs."""
    return relative_error(out, dequantize_rows(a, a_scale) @ dequantize_blocks(b, b_scale).t())


@dataclass
class MqaInputs:
    """One input set of the prefill indexer, with ks = 0 and causal ke."""

    q: Tensor
    k: Tensor
    k_scale: Tensor
    weights: Tensor
    ks: Tensor
    ke: Tensor


def mqa_inputs(shape: MqaShape) -> MqaInputs:
    m, n = shape.num_queries, shape.context
    k, k_scale = index_keys(n, shape.head_dim)
    return MqaInputs(
        q=torch.randn(m, shape.heads, shape.head_dim, device=DEVICE).to(FP8),
        k=k,
        k_scale=k_scale,
        weights=torch.randn(m, shape.heads, device=DEVICE),
        ks=torch.zeros(m, device=DEVICE, dtype=torch.int32),
        ke=torch.arange(n - m + 1, n + 1, device=DEVICE, dtype=torch.int32),
    )


def mqa_error(out: Tensor, inputs: MqaInputs, sampled_rows: int = 64) -> float:
    """The worst error of evenly sampled rows over their valid ranges; the first and last rows are sampled."""
    m = inputs.q.shape[0]
    keys = inputs.k.float().double() * inputs.k_scale.double()[:, None]
    rows = torch.linspace(0, m - 1, min(m, sampled_rows)).long().tolist()
    worst = 0.0
    for row in rows:
        begin, end = int(inputs.ks[row]), int(inputs.ke[row])
        reference = _scores(inputs.q[row], keys[begin:end], inputs.weights[row])
        worst = worse(worst, relative_error(out[row, begin:end], reference))
    return worst


@dataclass
class PagedInputs:
    """One input set of the decode indexer. `lengths` int32 [B, next_n] holds each token's own length."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    lengths: Tensor
    block_table: Tensor
    max_context_len: int


def paged_lengths(shape: PagedShape) -> Tensor:
    """int32 [B, next_n]: token t of a request sees next_n - 1 - t positions fewer than the last token."""
    last = torch.tensor(shape.lengths(), dtype=torch.int32)[:, None]
    return (last - torch.arange(shape.next_n - 1, -1, -1, dtype=torch.int32)).contiguous().to(DEVICE)


def paged_inputs(shape: PagedShape) -> PagedInputs:
    lengths = shape.lengths()
    pages = [-(-length // shape.block_size) for length in lengths]
    total, block, dim = sum(pages), shape.block_size, shape.head_dim
    order = torch.randperm(total, dtype=torch.int32)
    table = torch.zeros(shape.batch, max(pages), dtype=torch.int32)
    for request, page_ids in enumerate(order.split(pages)):
        table[request, : pages[request]] = page_ids
    k, k_scale = index_keys(total * block, dim)
    cache = torch.empty(total, block * (dim + 4), device=DEVICE, dtype=torch.uint8)
    cache[:, : block * dim] = k.view(torch.uint8).reshape(total, block * dim)
    cache[:, block * dim :] = k_scale.view(total, block).view(torch.uint8)
    return PagedInputs(
        q=torch.randn(shape.batch, shape.next_n, shape.heads, dim, device=DEVICE).to(FP8),
        kv_cache=cache.view(total, block, 1, dim + 4),
        weights=torch.randn(shape.batch * shape.next_n, shape.heads, device=DEVICE),
        lengths=paged_lengths(shape),
        block_table=table.to(DEVICE),
        max_context_len=-(-max(lengths) // 256) * 256,
    )


def paged_error(out: Tensor, inputs: PagedInputs, sampled_requests: int = 16) -> float:
    """The worst error of evenly sampled requests over the positions that their tokens see."""
    batch, next_n, _, dim = inputs.q.shape
    pages, block = inputs.kv_cache.shape[:2]
    flat = inputs.kv_cache.view(pages, -1)
    worst = 0.0
    for request in torch.linspace(0, batch - 1, min(batch, sampled_requests)).long().tolist():
        longest = int(inputs.lengths[request].max())
        own = flat[inputs.block_table[request, : -(-longest // block)].long()]
        values = own[:, : block * dim].contiguous().view(FP8).view(-1, dim).float().double()
        scales = own[:, block * dim :].contiguous().view(torch.float32).view(-1).double()
        keys = values * scales[:, None]
        for token in range(next_n):
            row, length = request * next_n + token, int(inputs.lengths[request, token])
            reference = _scores(inputs.q[request, token], keys[:length], inputs.weights[row])
            worst = worse(worst, relative_error(out[row, :length], reference))
    return worst


def _scores(q: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """sum_h relu(q[h] . k[j]) * w[h] in float64; `keys` already include their scales, which are positive."""
    dots = keys @ q.float().double().t()
    return dots.relu_() @ head_weights.double()


def worse(left: float, right: float) -> float:
    """The larger error; NaN counts as the worst."""
    return right if right != right or right > left else left
