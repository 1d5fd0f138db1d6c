"""The GEMMs under DeepGEMM's names: operands are pairs (values, scales), results go to `d`.

Sources of the semantics: the Python signatures of DeepGEMM 2.5 and 2.8, and the callers in vLLM 0.24 and 0.33
and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_fp8.errors import ArgumentError, ContractError
from moe_fp8.integrations.deep_gemm.layout import get_mk_alignment_for_contiguous_layout
from moe_fp8.integrations.deep_gemm.modes import early_weights
from moe_fp8.integrations.forwarding import NotServed
from moe_fp8.limits import N_MULTIPLE
from moe_fp8.ops import (
    contents,
    gemm_fp8,
    grouped_gemm_fp8_contiguous,
    grouped_gemm_fp8_masked,
    to_mn_major,
)
from moe_fp8.ops.arguments import demand_tensors, integer, no_overlap, refuse_dtype, refuse_shape
from moe_fp8.ops.examine import examine
from moe_fp8.ops.gemm import checks
from moe_fp8.ops.gemm.contracts import psum_starts
from moe_fp8.ops.modes import launches
from moe_fp8.ops.registry import checked
from moe_fp8.problems import SEGMENT_ALIGNMENT

Pair = tuple[Tensor, Tensor]
Recipe = Sequence[int] | None

#: The recipe of scales of 1 x 128 on both operands.
_OF_ROWS = (1, 1, 128)
_CONTIGUOUS = "m_grouped_fp8_gemm_nt_contiguous"
_K_GROUPED = "k_grouped_fp8_gemm_nt_contiguous"


def fp8_gemm_nt(
    a: Pair,
    b: Pair,
    d: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: Any = None,
) -> None:
    """d = a @ b^T, or a @ b^T + c; see `moe_fp8.gemm_fp8` for shapes, strides and errors.

    a: (fp8 `[M, K]`, fp32 scales `[M, K/128]` of any stride). b: (fp8 `[N, K]`, fp32 `[ceil(N/128), K/128]`).
    With the recipe (1, 1, 128), the scales of b are fp32 `[N, K/128]` of any stride too.
    d: bf16 or fp32 `[M, N]`. c: fp32 `[M, N]`, or d itself; d is then fp32. The other options have no meaning
    on Hopper, but for further recipes, `alpha` and `epilogue`: such calls go to the engine's own copy. So do
    operands that are not FP8, a K that 128 does not divide, an N that 64 does not divide, and with c any c or
    d that is not fp32. With K = 0, d is c, or zeros. Safe to capture.
    """
    if d is None:  # the op would allocate it, and nobody would see the result
        demand_tensors("fp8_gemm_nt", {"d": d})
    of_rows = _of_rows(recipe, recipe_a, recipe_b)
    if of_rows:
        recipe = recipe_a = recipe_b = None
    _demand(a, b, recipe, recipe_a, recipe_b, alpha, epilogue)
    _demand_fp32(c, d)
    (a_values, a_scale), (b_values, b_scale) = a, b
    if of_rows != (b_scale.shape[:1] == b_values.shape[:1]):
        shape = "[N, K/128]" if of_rows else "[ceil(N/128), K/128]"
        raise ArgumentError("fp8_gemm_nt", "b[1]", f"shape {shape}, by the recipe", list(b_scale.shape))
    c = _addend(c, d)
    if a_values.shape[-1] == b_values.shape[-1] == 0:
        rows, columns = a_values.shape[0], b_values.shape[0]
        if d.shape != (rows, columns):
            refuse_shape("fp8_gemm_nt", "d", d, f"[{rows}, {columns}]")
        if d.dtype not in (torch.bfloat16, torch.float32):
            refuse_dtype("fp8_gemm_nt", "d", d, "bfloat16 or float32")
        return _sum_of_nothing("fp8_gemm_nt", c, d)
    # (Operands with scales of rows are no weights, and a kernel that makes scales contiguous may still run.)
    constant = not of_rows and early_weights(b_values, b_scale) and b_scale.is_contiguous()
    if not of_rows:
        b_scale = b_scale.contiguous()
    gemm_fp8(a_values, a_scale, b_values, b_scale, c=c, out=d, constant_weights=constant)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool | None = None,
    expected_m_for_psum_layout: int | None = None,
    epilogue: Any = None,
) -> None:
    """d = a @ b[e]^T for the rows of each expert e; see `moe_fp8.grouped_gemm_fp8_contiguous`.

    grouped_layout: int32 `[M]`, each row's expert, -1 for padding; with `use_psum_layout` int32 `[E]`, one
    past each expert's last row. Experts start at multiples of `get_mk_alignment_for_contiguous_layout()`. If
    128 does not divide this number, the experts of `[M]` ascend, and scales of padding are finite in checked
    mode.
    Rows of d that belong to no expert are unspecified, but zero with `ensure_zero_padding=True`. That takes
    further kernels, so it is not the default here: no engine reads padding.
    expected_m_for_psum_layout: the expected rows of an expert; any value is safe. Safe to capture.
    """
    if d is None:  # as in `fp8_gemm_nt`
        demand_tensors(_CONTIGUOUS, {"d": d})
    _demand(a, b, recipe, recipe_a, recipe_b, None, epilogue)
    (a_values, a_scale), (b_values, b_scale) = a, b
    alignment = get_mk_alignment_for_contiguous_layout()
    layout: dict[str, Any] = {"psum" if use_psum_layout else "m_indices": grouped_layout}
    if alignment % SEGMENT_ALIGNMENT or (use_psum_layout and alignment != SEGMENT_ALIGNMENT):
        m, num_experts = a_values.shape[0], b_values.shape[0]
        _demand_layout(grouped_layout, num_experts if use_psum_layout else m)
        if use_psum_layout:
            layout = {"offsets": _psum_ranges(grouped_layout, m, alignment)}
        else:
            layout = {"offsets": _index_ranges(grouped_layout, num_experts)}
    grouped_gemm_fp8_contiguous(
        a_values,
        a_scale,
        b_values,
        b_scale.contiguous(),
        out=d,
        expected_m=expected_m_for_psum_layout,
        **layout,
    )
    if ensure_zero_padding and launches(d):
        # A kernel may store a whole tile, so padding is zeroed after it.
        rows = _psum_padding(grouped_layout, len(d), alignment) if use_psum_layout else grouped_layout < 0
        d.detach().masked_fill_(rows[:, None], 0)


def _demand_layout(grouped_layout: Tensor, length: int) -> None:
    """Raise ArgumentError for a layout that the conversion to ranges would take for another layout."""
    if grouped_layout.dtype is not torch.int32 or grouped_layout.shape != (length,):
        raise ArgumentError(
            _CONTIGUOUS, "grouped_layout", f"int32 [{length}]",
            [*grouped_layout.shape, grouped_layout.dtype],
        )  # fmt: skip


def _index_ranges(m_indices: Tensor, num_experts: int) -> Tensor:
    """The ranges of rows of each expert, int32 `[E + 1]`; padding belongs to the expert before it."""
    if checked(m_indices):
        examine(
            _CONTIGUOUS, {"grouped_layout": m_indices}, partial(_demand_ascending, m_indices, num_experts)
        )
    experts = torch.arange(num_experts + 1, dtype=m_indices.dtype, device=m_indices.device)
    return torch.searchsorted(m_indices.cummax(0).values, experts, out_int32=True)


def _demand_ascending(m_indices: Tensor, num_experts: int) -> None:
    """Raise ContractError unless the rows that are no padding have experts that ascend."""
    highest = m_indices.cummax(0).values
    at = contents.first((m_indices >= num_experts) | ((m_indices >= 0) & (m_indices < highest)))
    if at is not None:
        expected = f"ascending experts from 0 to {num_experts - 1}, or -1 for padding"
        expert, row = int(m_indices[at]), at[0]
        got = f"{expert} at row {row}, behind {int(highest[at])}"
        raise ContractError(_CONTIGUOUS, "grouped_layout", expected, got, expert=expert, row=row)


def _psum_ranges(psum: Tensor, rows: int, alignment: int) -> Tensor:
    """The ranges of rows of each expert, int32 `[E + 1]`; each has the expert's own padding."""
    if checked(psum):
        check = partial(psum_starts, _CONTIGUOUS, "grouped_layout", psum.long(), rows, alignment)
        examine(_CONTIGUOUS, {"grouped_layout": psum}, check)
    return torch.nn.functional.pad(_aligned(psum, alignment).clamp(max=rows), (1, 0)).to(torch.int32)


def _psum_padding(psum: Tensor, rows: int, alignment: int) -> Tensor:
    """bool `[rows]`: the rows of no expert."""
    row = torch.arange(rows, dtype=psum.dtype, device=psum.device)
    expert = torch.searchsorted(_aligned(psum, alignment), row, right=True)
    return row >= torch.nn.functional.pad(psum, (0, 1))[expert]


def _aligned(ends: Tensor, alignment: int) -> Tensor:
    """Where each expert's padding ends."""
    return torch.div(ends + (alignment - 1), alignment, rounding_mode="floor") * alignment


def m_grouped_fp8_gemm_nt_masked(
    a: Pair,
    b: Pair,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: Recipe = None,
    recipe_b: Recipe = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    epilogue: Any = None,
    enable_overlap: bool = False,
    max_block_n: int = 256,
    signal: Tensor | None = None,
) -> None:
    """d[e] = a[e] @ b[e]^T for the first `masked_m[e]` rows; see `moe_fp8.grouped_gemm_fp8_masked`.

    expected_m: the expected rows of an expert; any value is safe. Calls that signal another kernel while they
    run (`enable_overlap`) go to the engine's own copy. Safe to capture.
    """
    if d is None:  # as in `fp8_gemm_nt`
        demand_tensors("m_grouped_fp8_gemm_nt_masked", {"d": d})
    _demand(a, b, recipe, recipe_a, recipe_b, None, epilogue)
    if enable_overlap or signal is not None:
        raise NotServed("no kernel of ours signals other kernels while it runs (enable_overlap, signal)")
    (a_values, a_scale), (b_values, b_scale) = a, b
    grouped_gemm_fp8_masked(
        a_values, a_scale, b_values, b_scale.contiguous(), masked_m, expected_m=expected_m, out=d
    )


def k_grouped_fp8_gemm_nt_contiguous(
    a: Pair,
    b: Pair,
    d: Tensor,
    ks_cpu: Sequence[int] | None,
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: Recipe = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    epilogue: Any = None,
) -> None:
    """d[e] = c[e] + a_e @ b_e^T for each expert e, by one call of `moe_fp8.gemm_fp8` for each expert.

    a: (fp8 of one dimension: the contiguous `[M, ks_cpu[e]]` of each expert, one behind the other; fp32
    scales `[M, sum of ks_cpu / 128]` of any stride). b: the same with N in the place of M.
    d: fp32 `[E, M, N]`. c: fp32 `[E, M, N]`, d itself, or None for zeros (DeepGEMM demands c).
    ks_cpu: K of each expert, on the host, in multiples of 128; 0 is allowed. `grouped_layout`, the same on
    the device, is not read.
    Other recipes, `use_psum_layout`, `epilogue`, no `ks_cpu`, an N that 64 does not divide, a K that 128 does
    not divide, a c or d of another dtype, and a d of another rank go to the engine's own copy.
    Raises ArgumentError. Safe to capture; a replay has the same `ks_cpu`.
    """
    if tuple(recipe or ()) != _OF_ROWS or use_psum_layout or ks_cpu is None or epilogue is not None:
        raise NotServed("ragged K needs the recipe (1, 1, 128) and ks_cpu, without psum and epilogue")
    ks_cpu = [integer(_K_GROUPED, f"ks_cpu[{expert}]", k) for expert, k in enumerate(ks_cpu)]
    if (
        d.dtype is not torch.float32
        or d.dim() != 3
        or d.shape[2] % N_MULTIPLE
        or any(k % 128 for k in ks_cpu)
    ):
        raise NotServed("d is fp32 [E, M, N], N a multiple of 64 and each K of 128")
    _demand_fp32(c, d)
    no_overlap(_K_GROUPED, "d", d)
    num_experts, m, n = d.shape
    total = sum(ks_cpu)
    if len(ks_cpu) != num_experts or any(k < 0 for k in ks_cpu):
        expected = f"{num_experts} numbers from 0 on, as d has experts"
        raise ArgumentError(_K_GROUPED, "ks_cpu", expected, list(ks_cpu))
    for name, (values, scale), rows in (("a", a, m), ("b", b, n)):
        if values.shape != (rows * total,) or not values.is_contiguous():
            expected = f"contiguous [{rows * total}], each expert's rows behind those of the expert before"
            raise ArgumentError(_K_GROUPED, name, expected, [*values.shape, values.stride()])
        if scale.shape != (rows, total // 128):
            raise ArgumentError(_K_GROUPED, f"{name}[1]", f"shape {[rows, total // 128]}", list(scale.shape))
    if c is not None:
        checks.addend(_K_GROUPED, c, d)
        checks.addend_memory(_K_GROUPED, c, d)
    (a_values, a_scale), (b_values, b_scale) = a, b
    a_scale, b_scale = to_mn_major(a_scale), to_mn_major(b_scale)
    empty: list[tuple[Tensor | None, Tensor]] = []
    start = 0
    for expert, k in enumerate(ks_cpu):
        out = d[expert]
        addend = _addend(None if c is None else c[expert], out)
        if k == 0:
            empty.append((addend, out))
            continue
        end = start + k
        groups = slice(start // 128, end // 128)
        gemm_fp8(
            a_values[m * start : m * end].view(m, k),
            a_scale[:, groups],
            b_values[n * start : n * end].view(n, k),
            b_scale[:, groups],
            c=addend,
            out=out,
        )
        start = end
    for addend, out in empty:  # behind the others, whose operands are checked then
        _sum_of_nothing(_K_GROUPED, addend, out)


def _of_rows(recipe: Recipe, recipe_a: Recipe, recipe_b: Recipe) -> bool:
    """Whether both operands have scales of 1 x 128."""
    if recipe is not None:
        return tuple(recipe) == _OF_ROWS and recipe_a is recipe_b is None
    return recipe_b is not None and tuple(recipe_b) == (1, 128) and tuple(recipe_a or (1, 128)) == (1, 128)


def _demand_fp32(c: Tensor | None, d: Tensor) -> None:
    if c is not None and not (c.dtype is d.dtype is torch.float32):
        raise NotServed(f"c is added in fp32, with d in fp32, got {c.dtype} and {d.dtype}")


def _addend(c: Tensor | None, d: Tensor) -> Tensor | None:
    """`d` itself if `c` is another name of its elements, else `c`."""
    if c is None or (c.data_ptr(), c.shape, c.stride()) != (d.data_ptr(), d.shape, d.stride()):
        return c
    return d


def _sum_of_nothing(op: str, c: Tensor | None, d: Tensor) -> None:
    """`d` becomes `c`, or zeros."""
    if c is not None:
        checks.addend(op, c, d)
        checks.addend_memory(op, c, d)
    if not launches(d) or c is d:
        return
    if c is None:
        d.detach().zero_()
    else:
        d.detach().copy_(c.detach())


def _demand(
    a: Pair, b: Pair, recipe: Recipe, recipe_a: Recipe, recipe_b: Recipe, alpha: Any, epilogue: Any
) -> None:
    """Raise NotServed unless the operands are FP8 with scales of 1 x 128 and 128 x 128."""
    if alpha is not None or epilogue is not None:
        raise NotServed("no kernel of ours has `alpha` or an epilogue")
    if not (a[0].dtype is b[0].dtype is torch.float8_e4m3fn):
        raise NotServed(f"the operands are float8_e4m3fn, got {a[0].dtype} and {b[0].dtype}")
    if recipe is not None or recipe_a is not None or recipe_b is not None:
        given = tuple(recipe or (1, 128, 128)), tuple(recipe_a or (1, 128)), tuple(recipe_b or (128, 128))
        if given != ((1, 128, 128), (1, 128), (128, 128)):
            raise NotServed(
                f"scales of a are of 1 x 128, those of b of 128 x 128 (dense: or 1 x 128), got {given}"
            )
    if a[0].shape[-1] % 128:
        raise NotServed(f"K is a multiple of 128, got {a[0].shape[-1]}")
    if b[0].shape[-2] % N_MULTIPLE:
        raise NotServed(f"N is a multiple of {N_MULTIPLE}, got {b[0].shape[-2]}")
