"""Random cases of every op, their float64 answers and the tolerances, for the CPU and GPU tests.

Padding is NaN wherever possible: rows, scales, page tails, keys that no query sees. The reference quantizer
makes the tensors, so that an op under test never makes its own inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_fp8.ops.gemm import reference as gemm_reference
from moe_fp8.ops.indexer import reference as indexer_reference
from moe_fp8.ops.quantize import reference as quantize_reference
from moe_fp8.ops.scales import to_mn_major

#: ||out - ref|| / ||ref|| of a GEMM against float64 on the same quantized inputs. Rounding to bf16 alone
#: gives 1.7e-3.
BF16_TOLERANCE = 3e-3

#: The same for fp32 output: Hopper's FP8 tensor core keeps about 14 bits within 128 of K.
F32_TOLERANCE = 1e-3

#: The same for fp32 logits, over all written elements.
LOGITS_TOLERANCE = 1e-3

#: The content of outputs before a call, if the test checks that elements stay untouched. It is exact in fp32
#: and not a plausible result.
SENTINEL = -12345.0

NAN_BYTE = 0x7F
F64 = torch.float64


def tolerance(dtype: torch.dtype) -> float:
    return BF16_TOLERANCE if dtype is torch.bfloat16 else F32_TOLERANCE


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected|| in float64; NaN if either holds a NaN."""
    difference = (out.to(F64) - expected.to(F64)).norm()
    return float(difference / expected.to(F64).norm().clamp_min(1e-30))


def generator(seed: int, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def activations(m: int, k: int, gen: torch.Generator, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """fp8 [m,k] and MN-major scales; the rows are normal and differ by orders of magnitude."""
    device = gen.device
    x = torch.randn(m, k, generator=gen, device=device)
    x *= torch.randn(m, 1, generator=gen, device=device).exp()
    q = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(m, k // 128, device=device)
    if m:
        quantize_reference.quantize(x, q, scale, power_of_two)
    return q, to_mn_major(scale)


def weights(num_experts: int, n: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """fp8 [E,n,k] and fp32 scales [E,ceil(n/128),k/128]; the blocks have different magnitudes."""
    device = gen.device
    q = torch.empty(num_experts, n, k, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(num_experts, -(-n // 128), k // 128, device=device)
    for e in range(num_experts):
        w = torch.randn(n, k, generator=gen, device=device)
        w *= torch.rand(n, 1, generator=gen, device=device) + 0.5
        q[e], scale[e] = quantize_reference.quantize_blocks(w, False)
    return q, scale


@dataclass(frozen=True)
class GemmCase:
    """Operands of a GEMM.

    `runs` are (expert, first row, one past the last row) of `a`'s valid rows. For "masked", rows count within
    the expert's buffer.
    """

    layout: str
    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    index: Tensor | None
    runs: tuple[tuple[int, int, int], ...]

    def out_shape(self) -> tuple[int, ...]:
        return (*self.a.shape[:-1], self.b.shape[-2])

    def poisoned(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full(self.out_shape(), float("nan"), dtype=dtype, device=self.a.device)


def dense_case(m: int, n: int, k: int, device: str = "cpu", seed: int = 0) -> GemmCase:
    gen = generator(seed, device)
    a, a_scale = activations(m, k, gen)
    b, b_scale = weights(1, n, k, gen)
    return GemmCase("dense", a, a_scale, b[0], b_scale[0], None, ((0, 0, m),))


def _align(rows: int) -> int:
    return -(-rows // 128) * 128


def segments_of(rows: Sequence[int], alignment: int) -> tuple[list[int], list[int]]:
    """(the end of each expert's rows, the expert of each row); experts start at multiples of `alignment`.

    The rows up to the next multiple belong to expert -1.
    """
    ends: list[int] = []
    owners: list[int] = []
    for expert, count in enumerate(rows):
        ends.append(len(owners) + count)
        owners += [expert] * count + [-1] * (-count % alignment)
    return ends, owners


def layout_of(layout: str, rows: Sequence[int], total: int | None = None) -> tuple[int, list[int]]:
    """(M, contents of the index tensor); expert e has rows[e] rows.

    `total` adds padding rows at the end. In "m_indices" an expert with more than two rows gets a -1 in the
    middle of its rows.
    """
    owned: list[list[int]] = []
    start = end = 0
    index: list[int] = []
    for count in rows:
        if layout == "m_indices" and count > 2:
            middle = start + count // 2
            numbers = [row for row in range(start, start + count + 1) if row != middle]
        else:
            numbers = list(range(start, start + count))
        end = numbers[-1] + 1 if numbers else start
        owned.append(numbers)
        index.append(end)
        start = end if layout == "offsets" else _align(end)
    m = max(end if layout == "offsets" else _align(end), total or 0)
    if layout == "offsets":
        return m, [0, *index]
    if layout == "psum":
        return m, index
    experts = [-1] * m
    for e, numbers in enumerate(owned):
        for row in numbers:
            experts[row] = e
    return m, experts


def _spoil(a: Tensor, a_scale: Tensor, valid: Tensor) -> None:
    a.view(torch.uint8)[~valid] = NAN_BYTE
    a_scale[~valid] = float("nan")


def contiguous_case(
    layout: str,
    rows: Sequence[int],
    n: int,
    k: int,
    device: str = "cpu",
    seed: int = 0,
    total: int | None = None,
) -> GemmCase:
    gen = generator(seed, device)
    m, values = layout_of(layout, rows, total)
    index = torch.tensor(values, dtype=torch.int32, device=device)
    a, a_scale = activations(m, k, gen)
    b, b_scale = weights(len(rows), n, k, gen)
    case = GemmCase(layout, a, a_scale, b, b_scale, index, ())
    return with_index(case, values)


def with_index(case: GemmCase, values: Sequence[int]) -> GemmCase:
    """`case` with new contents of the index tensor, written in place; rows of no expert become NaN."""
    assert case.index is not None
    case.index.copy_(torch.tensor(values, dtype=torch.int32))
    if case.layout == "masked":
        runs = [(e, 0, count) for e, count in enumerate(values) if count > 0]
        valid = torch.arange(case.a.shape[1])[None, :] < torch.tensor(values)[:, None]
    else:
        runs = gemm_reference.segments(case.layout, case.index.cpu())
        valid = torch.zeros(case.a.shape[0], dtype=torch.bool)
        for _, start, end in runs:
            valid[start:end] = True
    _spoil(case.a, case.a_scale, valid.to(case.a.device))
    return replace(case, runs=tuple(runs))


def masked_case(
    counts: Sequence[int], m_max: int, n: int, k: int, device: str = "cpu", seed: int = 0
) -> GemmCase:
    gen = generator(seed, device)
    num_experts = len(counts)
    a, a_scale = activations(num_experts * m_max, k, gen)
    b, b_scale = weights(num_experts, n, k, gen)
    scale = to_mn_major(a_scale.reshape(num_experts, m_max, k // 128))
    index = torch.zeros(num_experts, dtype=torch.int32, device=device)
    case = GemmCase("masked", a.view(num_experts, m_max, k), scale, b, b_scale, index, ())
    return with_index(case, counts)


def run_reference(case: GemmCase, run: tuple[int, int, int]) -> Tensor:
    """The float64 answer for one run of rows."""
    e, start, end = run
    if case.layout == "dense":
        a, scale, b, b_scale = case.a, case.a_scale, case.b, case.b_scale
    elif case.layout == "masked":
        a, scale, b, b_scale = case.a[e], case.a_scale[e], case.b[e], case.b_scale[e]
    else:
        a, scale, b, b_scale = case.a, case.a_scale, case.b[e], case.b_scale[e]
    out = torch.empty(end - start, b.shape[0], dtype=F64, device=a.device)
    gemm_reference.gemm(a[start:end], scale[start:end], b, b_scale, out, compute_dtype=F64)
    return out


def check_gemm(case: GemmCase, out: Tensor) -> None:
    """Check each expert's valid rows together within the tolerance, and each row within twice the tolerance.

    A wrong row hardly shows in a norm among thousands of good rows, or among rows that are a hundred times as
    large.
    """
    limit = tolerance(out.dtype)
    for run in case.runs:
        e, start, end = run
        got = out[e, start:end] if case.layout == "masked" else out[start:end]
        expected = run_reference(case, run)
        error = relative_error(got, expected)
        assert error < limit, f"{case.layout}: expert {e}, rows {start} to {end}: relative error {error:.2e}"
        if start < end:
            by_row = (got.to(F64) - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
            row = int(by_row.argmax())
            message = f"{case.layout}: expert {e}, row {start + row}: relative error {float(by_row[row]):.2e}"
            assert by_row[row] < 2 * limit, message


@dataclass(frozen=True)
class MqaCase:
    q: Tensor
    k: Tensor
    k_scale: Tensor
    weights: Tensor
    ks: Tensor
    ke: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.k_scale, self.weights, self.ks, self.ke)


def random_fp8(shape: Sequence[int], gen: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=gen, device=gen.device).to(torch.float8_e4m3fn)


def query_ranges(kind: str, m: int, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """int32 ks, ke [m]: "causal" (the last query sees all keys), "random" (some are empty) or "empty"."""
    gen = generator(seed, "cpu")
    if kind == "causal":
        ks = torch.zeros(m, dtype=torch.int32)
        ke = (torch.arange(m) + n - m + 1).clamp(0, n).int()
    elif kind == "random":
        edges = torch.randint(0, n + 1, (m, 2), generator=gen).sort(1).values.int()
        ks, ke = edges[:, 0].contiguous(), edges[:, 1].contiguous()
        ke[::5] = ks[::5]
    elif kind == "empty":
        ks = ke = torch.randint(0, n + 1, (m,), generator=gen).int()
    else:
        raise ValueError(kind)
    return ks, ke


def mqa_case(
    m: int, n: int, heads: int, kind: str = "causal", device: str = "cpu", seed: int = 0, dim: int = 128
) -> MqaCase:
    gen = generator(seed, device)
    ks, ke = (t.to(device) for t in query_ranges(kind, m, n, seed))
    k = random_fp8((n, dim), gen)
    k_scale = torch.rand(n, generator=gen, device=device) + 0.1
    unseen = torch.ones(n, dtype=torch.bool)
    for start, end in zip(ks.tolist(), ke.tolist(), strict=True):
        unseen[start:end] = False
    k.view(torch.uint8)[unseen.to(device)] = NAN_BYTE
    k_scale[unseen.to(device)] = float("nan")
    return MqaCase(
        q=random_fp8((m, heads, dim), gen),
        k=k,
        k_scale=k_scale,
        weights=torch.randn(m, heads, generator=gen, device=device),
        ks=ks,
        ke=ke,
    )


def negative_scores(case: MqaCase) -> MqaCase:
    """`case` with keys and queries such that the score of every head is negative."""
    q = case.q.view(torch.uint8).bitwise_and(0x7F).clamp(min=0x20)  # magnitudes from 1/8 on
    k = case.k.view(torch.uint8).bitwise_or(0x80).clamp(min=0xA0)
    return replace(case, q=q.view(case.q.dtype), k=k.view(case.k.dtype))


def mqa_expected(case: MqaCase, columns: int | None = None, rest: float = SENTINEL) -> Tensor:
    """float64 logits, full or compressed to `columns`; elements that nothing writes are `rest`."""
    m, n = case.q.shape[0], case.k.shape[0]
    out = torch.full((m, n if columns is None else columns), rest, dtype=F64, device=case.q.device)
    indexer_reference.mqa_logits(*case.arguments(), out, columns is not None, False, F64)
    return out


def check_logits(out: Tensor, expected: Tensor, rest: float = SENTINEL) -> None:
    """Check that the written elements of `out` are right and that all other elements are `rest`.

    The written elements must be within tolerance together, and no single element may be plainly wrong.
    """
    written = expected != rest
    assert torch.equal(out[~written], torch.full_like(out[~written], rest)), "wrote outside of the ranges"
    if written.any():
        got, wanted = out[written].to(F64), expected[written].to(F64)
        error = relative_error(got, wanted)
        limit = tolerance(out.dtype) if out.dtype is torch.bfloat16 else LOGITS_TOLERANCE
        assert error < limit, f"relative error {error:.2e}"
        # A single wrong element does not show in the norm of a million elements.
        usual = wanted.square().mean().sqrt()
        assert ((got - wanted).abs() <= 0.05 * (wanted.abs() + usual)).all(), "an element is wrong"


@dataclass(frozen=True)
class PagedCase:
    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor

    @property
    def next_n(self) -> int:
        return self.q.shape[1]

    @property
    def block_size(self) -> int:
        return self.kv_cache.shape[1]


def paged_case(
    lengths: Sequence[int] | Sequence[Sequence[int]],
    next_n: int,
    heads: int,
    block_size: int,
    device: str = "cpu",
    seed: int = 0,
    page_padding: int = 0,
    max_pages: int = 0,
    dim: int = 128,
) -> PagedCase:
    """Requests of `lengths` ([B] or [B][next_n]) over shuffled pages with `page_padding` bytes between them.

    The table has at least `max_pages` columns; entries that must not be read point far outside the cache.
    """
    # The case is built on the CPU: page by page on a GPU would be thousands of launches.
    gen = generator(seed, "cpu")
    batch = len(lengths)
    longest = [max(length) if isinstance(length, Sequence) else length for length in lengths]
    pages_of = [-(-length // block_size) for length in longest]
    columns = max([max_pages, 1, *pages_of])
    num_pages = sum(pages_of) + 3
    page_bytes = block_size * (dim + 4)
    storage = torch.full((num_pages, page_bytes + page_padding), NAN_BYTE, dtype=torch.uint8)
    keys = random_fp8((num_pages, block_size * dim), gen).view(torch.uint8)
    scales = torch.rand(num_pages, block_size, generator=gen) + 0.1
    order = torch.randperm(num_pages, generator=gen).tolist()
    block_table = torch.full((batch, columns), 1 << 30, dtype=torch.int32)
    for b, pages in enumerate(pages_of):
        for at in range(pages):
            page = order.pop()
            block_table[b, at] = page
            used = min(block_size, longest[b] - at * block_size)
            storage[page, : used * dim] = keys[page, : used * dim]
            scale_bytes = scales[page, :used].contiguous().view(torch.uint8)
            storage[page, block_size * dim : block_size * dim + used * 4] = scale_bytes
            tail = storage[page, block_size * dim : page_bytes].view(torch.float32)
            tail[used:] = float("nan")
    return PagedCase(
        q=random_fp8((batch, next_n, heads, dim), gen).to(device),
        kv_cache=storage.to(device)[:, :page_bytes].view(num_pages, block_size, 1, dim + 4),
        weights=torch.randn(batch * next_n, heads, generator=gen).to(device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=block_table.to(device),
    )


def paged_expected(case: PagedCase, columns: int, rest: float = SENTINEL) -> Tensor:
    """float64 logits [B*next_n, columns]; elements that nothing writes are `rest`."""
    rows = case.q.shape[0] * case.next_n
    out = torch.full((rows, columns), rest, dtype=F64, device=case.q.device)
    indexer_reference.paged_mqa_logits(
        case.q, case.kv_cache, case.weights, case.context_lens, case.block_table, out, F64
    )
    return out
