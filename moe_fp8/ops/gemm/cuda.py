"""CUDA launches of the GEMMs: problem -> spec, grid and the parameter struct of the kernel.

The arguments are already checked, the outputs allocated and the activation scales MN-major. The struct is
`GemmParams` in `moe_fp8/kernels`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_fp8 import heuristics
from moe_fp8.ops import launch, scales
from moe_fp8.ops.arguments import row_stride
from moe_fp8.ops.parameters import Prepared, Tiled, prepared
from moe_fp8.params import GEMM, K_GROUPED_GEMM
from moe_fp8.problems import GemmLayout, GemmProblem, KGroupedGemmProblem, OutDtype, gemm_selection
from moe_fp8.settings import settings
from moe_fp8.specs import Selection, select_gemm, select_k_grouped_gemm


@lru_cache(maxsize=65536)
def _gemm_plan(
    layout: GemmLayout,
    m: int,
    n: int,
    k: int,
    num_experts: int,
    expected_m: int | None,
    fp32: bool,
    config_text: str | None,
    device: int,
    num_sms: int,
) -> Selection[heuristics.GemmConfig]:
    """The kernel and tile of calls whose `m` and `expected_m` are those of `gemm_selection`.

    The grid is not theirs, since it follows a call's own `m`. Raises TileError if `config_text` names no
    config that such a call may use.
    """
    problem = GemmProblem(
        layout,
        m,
        n,
        k,
        num_experts,
        expected_m,
        "float32" if fp32 else "bfloat16",
        num_sms,
        launch.table(device),
        settings().batch_invariant,
        config_text,
    )
    return select_gemm(problem)


def dense(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    config: str | None,
    constant_weights: bool,
    accumulate: bool,
) -> Prepared:
    """Prepare a dense GEMM: a [M,K], b [N,K], out [M,N]."""
    if scales.row_scaled(b, b_scale):
        return _row_scaled(a, a_scale, b, b_scale, None, out, constant_weights, accumulate)
    return _gemm("dense", a, a_scale, b, b_scale, out, None, None, config, constant_weights, accumulate)


def contiguous(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    index: Tensor,
    layout: GemmLayout,
    expected_m: int | None,
    out: Tensor,
    config: str | None,
    constant_weights: bool,
    accumulate: bool,
) -> Prepared:
    """Prepare a contiguous GEMM: a [M,K], b [E,N,K], out [M,N]; `layout` gives the meaning of `index`."""
    return _gemm(layout, a, a_scale, b, b_scale, out, index, expected_m, config, constant_weights, accumulate)


def masked(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    masked_m: Tensor,
    expected_m: int | None,
    out: Tensor,
    config: str | None,
    accumulate: bool,
) -> Prepared:
    """Prepare a masked GEMM: a [E,Mmax,K], b [E,N,K], out [E,Mmax,N], masked_m [E]."""
    return _gemm("masked", a, a_scale, b, b_scale, out, masked_m, expected_m, config, False, accumulate)


def _gemm(
    layout: GemmLayout,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out: Tensor,
    index: Tensor | None,
    expected_m: int | None,
    config: str | None,
    constant_weights: bool,
    accumulate: bool,
) -> Prepared:
    device = a.get_device()
    k = a.shape[-1]
    m = a.shape[-2]
    n = b.shape[-2]
    num_experts = b.shape[0] if layout != "dense" else 1
    fp32 = out.dtype is torch.float32
    sms = launch.num_sms(device)
    selected_m, expected_m = gemm_selection(layout, m, num_experts, expected_m)
    plan = _gemm_plan(layout, selected_m, n, k, num_experts, expected_m, fp32, config, device, sms)
    tile = plan.config
    batch = num_experts if layout == "masked" else 1
    out_stride = row_stride(out)
    scale_pitch = a_scale.stride(-1) if k > 128 else scales.pitch(a_scale)
    # A box is 128 bytes of each row. With a promotion of 256 bytes, L2 would also fetch the bytes of the next
    # box, which gives 4.04 instead of 4.39 TB/s.
    return prepared(
        GEMM,
        plan.spec,
        heuristics.gemm_grid(tile, layout, m, n, sms),
        Tiled(a, "uint8", (k, m * batch), (row_stride(a),), (128, tile.token_box), l2_promotion=128),
        Tiled(a_scale, "float32", (m, batch * (k >> 7)), (scale_pitch * 4,), (tile.block_m, 1), 0),
        Tiled(b, "uint8", (k, n * num_experts), (row_stride(b),), (128, tile.weight_box), l2_promotion=128),
        Tiled(out, "bfloat16", (n, m * batch), (out_stride * 2,), tile.out_box, tile.out_box[0] * 2)
        if tile.out_box and not fp32
        else None,
        out,
        b_scale,
        index,
        out_stride,
        m,
        n,
        k,
        num_experts,
        constant_weights,
        accumulate,
    )


def k_grouped(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    accumulate: bool,
) -> Prepared:
    """Prepare a GEMM of ragged K: a [M,K], b [N,K], offsets [E+1], out fp32 [E,M,N]."""
    return _row_scaled(a, a_scale, b, b_scale, offsets, out, False, accumulate)


def _row_scaled(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor | None,
    out: Tensor,
    constant_weights: bool,
    accumulate: bool,
) -> Prepared:
    """Prepare a GEMM of operands that both have scales of rows; without `offsets`, out is [M,N]."""
    (m, k), n, num_experts = a.shape, b.shape[0], 1 if offsets is None else out.shape[0]
    out_dtype: OutDtype = "float32" if out.dtype is torch.float32 else "bfloat16"
    sms = launch.num_sms(a.get_device())
    problem = KGroupedGemmProblem(m, n, k, num_experts, accumulate, sms, out_dtype)
    chosen = select_k_grouped_gemm(problem)
    config = chosen.config

    def row_scales(scale: Tensor, box: int) -> Tiled:
        pitch = scale.stride(-1) if k > 128 else scales.pitch(scale)
        return Tiled(scale, "float32", (scale.shape[0], k >> 7), (pitch * 4,), (box, 1), 0)

    out_stride = row_stride(out)
    sums = None
    if heuristics.k_grouped_sums_staged(config, out_dtype):
        strides = out_stride * 4, m * out_stride * 4
        sums = Tiled(out, "float32", (n, m, num_experts), strides, (*heuristics.K_GROUPED_SUM_BOX, 1))
    # A box of weights has even rows alone or odd rows alone.
    weights = (k, 2, n // 2), (row_stride(b), 2 * row_stride(b)), (128, 1, config.weight_box // 2)
    return prepared(
        K_GROUPED_GEMM,
        chosen.spec,
        chosen.grid,
        Tiled(a, "uint8", (k, m), (row_stride(a),), (128, config.token_box), l2_promotion=128),
        row_scales(a_scale, config.block_m),
        Tiled(b, "uint8", *weights, l2_promotion=128),
        sums,
        out,
        None,
        offsets,
        out_stride,
        m,
        n,
        k,
        num_experts,
        constant_weights,
        accumulate,
        row_scales(b_scale, config.block_n),
    )
