"""Random cases of k_grouped_gemm_fp8 and checks of its results, for the CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from moe_fp8 import k_grouped_gemm_fp8
from tests import cases
from tests.cases import F64, NAN_BYTE

#: |out - exact| of any element, divided by the sum of the absolute values that it adds.
ELEMENT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class KGroupedCase:
    """Operands of the op. `ends`: the contents of `offsets`.

    Columns of no expert are NaN, and so are their scales.
    """

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offsets: Tensor
    ends: tuple[int, ...]

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.a, self.a_scale, self.b, self.b_scale, self.offsets

    def out_shape(self) -> tuple[int, int, int]:
        return len(self.ends) - 1, self.a.shape[0], self.b.shape[0]

    def poisoned(self) -> Tensor:
        return torch.full(self.out_shape(), float("nan"), device=self.a.device)

    def addend(self, seed: int = 0) -> Tensor:
        """fp32 [E, M, N], about as large as the product."""
        gen = cases.generator(seed + 7, str(self.a.device))
        return 30 * torch.randn(self.out_shape(), generator=gen, device=self.a.device)


def ends_of(sizes: Sequence[int], before: int = 0) -> tuple[int, ...]:
    """The contents of `offsets` of experts with so many columns, behind `before` columns of no expert."""
    return tuple(accumulate(sizes, initial=before))


def k_grouped_case(
    sizes: Sequence[int],
    m: int,
    n: int,
    device: str = "cpu",
    seed: int = 0,
    before: int = 0,
    after: int = 0,
) -> KGroupedCase:
    """Expert e has `sizes[e]` columns. `before` and `after` columns of no expert lie around them."""
    gen = cases.generator(seed, device)
    ends = ends_of(sizes, before)
    k = ends[-1] + after
    operands = []
    for rows in (m, n):
        values, scale = cases.activations(rows, k, gen)
        # The scales of one row differ too.
        scale.mul_(torch.randn(scale.shape, generator=gen, device=device).exp())
        operands += [values, scale]
    offsets = torch.zeros(len(ends), dtype=torch.int32, device=device)
    return with_ends(KGroupedCase(*operands, offsets, ()), ends)


def with_ends(case: KGroupedCase, ends: Sequence[int]) -> KGroupedCase:
    """`case` with new contents of `offsets`, written in place; columns of no expert become NaN."""
    case.offsets.copy_(torch.tensor(ends, dtype=torch.int32))
    for values, scale in ((case.a, case.a_scale), (case.b, case.b_scale)):
        for outside in (slice(0, ends[0]), slice(ends[-1], None)):
            values.view(torch.uint8)[:, outside] = NAN_BYTE
        scale[:, : ends[0] // 128] = float("nan")
        scale[:, ends[-1] // 128 :] = float("nan")
    return replace(case, ends=tuple(ends))


def flat_operands(case: KGroupedCase, row_major: bool = False) -> tuple[tuple[Tensor, Tensor], ...]:
    """Both operands as DeepGEMM takes them: values of each expert one behind the other, and the scales."""
    found = []
    for values, scale in ((case.a, case.a_scale), (case.b, case.b_scale)):
        parts = [values.view(torch.uint8)[:, start:end].flatten() for start, end in pairwise(case.ends)]
        found.append((torch.cat(parts).view(values.dtype), scale.contiguous() if row_major else scale))
    return tuple(found)


def _dequantized(values: Tensor, scale: Tensor, start: int, end: int) -> Tensor:
    own = scale[:, start // 128 : end // 128].to(F64)
    return values[:, start:end].float().to(F64) * own.repeat_interleave(128, 1)


def exact(case: KGroupedCase, expert: int) -> tuple[Tensor, Tensor]:
    """The float64 product of one expert, and the sums of the absolute values that its elements add."""
    start, end = case.ends[expert : expert + 2]
    left = _dequantized(case.a, case.a_scale, start, end)
    right = _dequantized(case.b, case.b_scale, start, end)
    return left @ right.T, left.abs() @ right.abs().T


def check(case: KGroupedCase, out: Tensor, addend: Tensor | None = None) -> None:
    """Every expert's result is `addend` plus its product; an expert without columns has exactly `addend`."""
    assert out.shape == case.out_shape() and out.dtype is torch.float32
    for e in range(out.shape[0]):
        before = torch.zeros_like(out[e]) if addend is None else addend[e]
        if case.ends[e] == case.ends[e + 1]:
            assert torch.equal(out[e], before), f"expert {e} has no columns"
            continue
        product, absolute = exact(case, e)
        expected = before.to(F64) + product
        assert cases.relative_error(out[e], expected) < cases.F32_TOLERANCE, f"expert {e}"
        bound = ELEMENT_TOLERANCE * (absolute + before.to(F64).abs())
        assert ((out[e].to(F64) - expected).abs() <= bound).all(), f"expert {e}"


def check_both_modes(case: KGroupedCase) -> None:
    """Without an addend into a poisoned output, and with one in place."""
    out = case.poisoned()
    assert k_grouped_gemm_fp8(*case.operands(), out=out) is out
    check(case, out)
    addend = case.addend()
    accumulated = addend.clone()
    k_grouped_gemm_fp8(*case.operands(), c=accumulated, out=accumulated)
    check(case, accumulated, addend)
