"""The GEMM of ragged K: weight gradients of the experts, whose K is the tokens of each expert.

Scaling follows DeepSeek-V3 (arXiv 2412.19437, section 3.3): in the backward pass of weights both operands
have 1 x 128 scales along the tokens. The partial sum over each 128 of K is multiplied by the product of the
two scales and added in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_fp8.ops import arguments
from moe_fp8.ops.gemm import checks, contracts, reference
from moe_fp8.ops.gemm.addend import add_to
from moe_fp8.ops.modes import launches
from moe_fp8.ops.registry import register


def _empty(a: Tensor, out: Tensor, accumulate: bool) -> bool:
    """Without columns of any expert, no kernel runs, and products are zero."""
    if a.shape[1] == 0 and not accumulate and launches(out):
        out.detach().zero_()
    return a.shape[1] == 0 or out.numel() == 0


k_grouped_op = register(
    "k_grouped_gemm_fp8(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offsets, Tensor(a!) out, "
    "bool accumulate=False) -> ()",
    check=checks.k_grouped_gemm,
    contract=lambda a, a_scale, b, b_scale, offsets, out, accumulate: contracts.k_grouped(
        offsets, a_scale, b_scale
    ),
    empty=lambda a, a_scale, b, b_scale, offsets, out, accumulate: _empty(a, out, accumulate),
    reference=reference.k_grouped_gemm,
    cuda="moe_fp8.ops.gemm.cuda:k_grouped",
)


def k_grouped_gemm_fp8(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    c: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Each expert's own columns of `a` and `b` are multiplied: out[e] = c[e] + a[:, ke] @ b[:, ke]^T.

    a: float8_e4m3fn `[M, K]`, b: float8_e4m3fn `[N, K]`; the columns of all experts follow one another. Each
    row is contiguous, and rows are a multiple of 16 bytes apart.
    a_scale: fp32 `[M, K/128]`, b_scale: fp32 `[N, K/128]`, both MN-major as in `gemm_fp8`; any other stride
    is converted and counted. `quantize_fp8` of `[M, K]` and of `[N, K]` makes values and scales.
    offsets: int32 `[E+1]`, contiguous, on a's device: expert e has the columns `offsets[e]` to
    `offsets[e+1]`. They do not fall, and each is a multiple of 128: pad an expert's tokens with zeros, whose
    scales may be any numbers of up to 1e19. An expert may have no columns.
    c: fp32 `[E, M, N]`, or None for zeros. It may be `out`, which then accumulates in place; any other c
    shares no memory with out.
    out: fp32 `[E, M, N]`, stride `(M*S, S, 1)`, S a multiple of 4, or None to allocate it.
    K % 128 == 0, N % 64 == 0, addresses 16-byte aligned. M = 0 returns at once. K = 0, as on a rank without
    tokens, launches no kernel: out is c, or zeros.

    Returns out. Sums are fp32, and their order depends on nothing: the same call gives the same bits.
    Subnormal sums may be flushed to zero where `c` is given. No host synchronization; safe to capture: a
    replay reads `offsets` again.
    Raises ArgumentError; in checked mode ContractError for offsets that break these rules and for a scale
    that is NaN or infinite; JitMissError after `freeze()` if its kernel was not loaded.
    """
    op = "k_grouped_gemm_fp8"
    if out is None:
        if a.dim() != 2 or b.dim() != 2 or offsets.dim() != 1:
            arguments.rank(op, "a", a, "[M, K]", 2)
            arguments.rank(op, "b", b, "[N, K]", 2)
            arguments.rank(op, "offsets", offsets, "[E+1]", 1)
        shape = (max(offsets.shape[0] - 1, 0), a.shape[0], b.shape[0])
        out = torch.empty(shape, dtype=torch.float32, device=a.device)
    operands = (a, a_scale, b, b_scale, offsets, out)
    if c is None:
        k_grouped_op(*operands, False)
    else:
        add_to(c, out, op, *operands, True)
    return out
