"""Stand-ins in plain torch for the engines' compiled ops. They run on any device and in CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

FP8_MAX = 448.0

#: The logits that the selections of the last step were given, in order.
seen_logits: list[Tensor] = []


def quantize(x: Tensor, q: Tensor, scale: Tensor, power_of_two: bool, live: Tensor | None = None) -> None:
    """Quantize groups of 128 of x [..., K] into q, with fp32 `scale` [..., K/128] of any strides.

    Rows that are not `live` [...] keep what q and scale hold.
    """
    groups = x.float().unflatten(-1, (-1, 128))
    step = groups.abs().amax(-1).clamp_min(1e-10) / FP8_MAX
    if power_of_two:
        step = step.log2().ceil().exp2()
    values = (groups / step[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(q.dtype)
    if live is not None:
        step = torch.where(live[..., None], step, scale)
        values = torch.where(live[..., None], values.view(torch.uint8), q.view(torch.uint8)).view(q.dtype)
    q.copy_(values)
    scale.copy_(step)


def silu_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of x [..., 2 K] times the second half, in fp32."""
    gate, up = x.float().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def below(counts: Tensor, rows: int) -> Tensor:
    """bool [E, rows]: the rows of each expert's buffer that hold tokens."""
    return torch.arange(rows, device=counts.device) < counts[:, None]


def select(logits: Tensor, starts: Tensor, ends: Tensor, out: Tensor) -> None:
    """int32 `out` [M, top-k]: columns of the largest logits in [start, end) from `start` on, then -1."""
    seen_logits.append(logits)
    columns = torch.arange(logits.shape[1], device=logits.device)
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    width = min(out.shape[1], logits.shape[1])
    best = logits.masked_fill(~inside, float("-inf")).topk(width, dim=-1, sorted=False)
    out.fill_(-1)
    out[:, :width] = torch.where(best.values > float("-inf"), best.indices - starts[:, None], -1)


def top_k_per_row_prefill(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    out: Tensor,
    rows: int,
    stride0: int,
    stride1: int,
    topk: int,
) -> None:
    assert (rows, stride0, stride1) == (logits.shape[0], *logits.stride()) and topk == out.shape[1]
    select(logits, starts, ends, out)


def gather_cache(kv_cache: Tensor, k: Tensor, scale: Tensor, block_table: Tensor, starts: Tensor) -> None:
    """Keys and scales of pages [.., 64, 132], request behind request; request b begins at starts[b]."""
    pages, block, width = kv_cache.shape
    row = torch.arange(len(k), device=k.device)
    request = torch.searchsorted(starts, row, right=True, out_int32=True) - 1
    request = request.clamp(0, len(block_table) - 1)
    place = row - starts[request]
    page, within = block_table[request, place // block].clamp(0, pages - 1).long(), place % block
    bytes_of = kv_cache.reshape(pages, block * width)
    dim = width - 4
    k.copy_(bytes_of[:, : block * dim].unflatten(1, (block, dim))[page, within].view(k.dtype))
    scale.copy_(bytes_of[:, block * dim :].unflatten(1, (block, 4))[page, within])


def _per_token_group_quant(
    x: Tensor, q: Tensor, scale: Tensor, group: int, eps: float, low: float, high: float,
    power_of_two: bool, column_major: bool, aligned: bool,
) -> None:  # fmt: skip
    assert (group, low, high) == (128, -FP8_MAX, FP8_MAX)
    quantize(x, q, scale, power_of_two)


def _masked_silu_mul_quant(y: Tensor, counts: Tensor, q: Tensor, scale: Tensor, power_of_two: bool) -> None:
    quantize(silu_mul(y), q, scale, power_of_two, below(counts, y.shape[1]))


def _decode_topk(
    logits: Tensor, lengths: Tensor, out: Tensor, workspace: Tensor, topk: int, max_length: int
) -> None:
    assert lengths.numel() == len(logits) and topk == out.shape[1]
    select(logits, torch.zeros_like(lengths).view(-1), lengths.view(-1), out)


_TOPK = (
    "(Tensor logits, Tensor lengths, Tensor(a!) out, Tensor(b!) workspace, int topk, int max_length) -> ()"
)
_VLLM: dict[str, tuple[str, Callable[..., None]]] = {
    "per_token_group_fp8_quant": (
        "(Tensor x, Tensor(a!) q, Tensor(b!) scale, int group, float eps, float low, float high, "
        "bool power_of_two, bool column_major, bool aligned) -> ()",
        _per_token_group_quant,
    ),
    "persistent_masked_m_silu_mul_quant": (
        "(Tensor y, Tensor counts, Tensor(a!) q, Tensor(b!) scale, bool power_of_two) -> ()",
        _masked_silu_mul_quant,
    ),
    "cooperative_topk": (_TOPK, _decode_topk),
    "persistent_topk": (_TOPK, _decode_topk),
}


@functools.cache
def register_vllms() -> torch.library.Library:
    """Define vLLM's compiled ops, `torch.ops._C.*`; once in a process."""
    library = torch.library.Library("_C", "FRAGMENT")
    for name, (schema, function) in _VLLM.items():
        library.define(name + schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    return library
