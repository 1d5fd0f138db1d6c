"""Every GEMM config on the GPU is right and repeatable; configs that do not divide K give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moe_fp8 import ConfigError, gemm_fp8, grouped_gemm_fp8_contiguous, grouped_gemm_fp8_masked
from moe_fp8.heuristics import gemm_configs
from moe_fp8.problems import DEFAULT_NUM_SMS
from tests import cases

#: Segments end on either side of a tile of 64, 128 and 192 rows, alone and in pairs; some segments are empty.
ROWS = (3, 0, 130, 64, 200, 128, 0, 65, 257, 1, 192, 330)

LAYOUTS = ("m_indices", "psum", "offsets", "masked")


def _dense(case: cases.GemmCase, config: str | None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = case.poisoned(dtype)
    gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out=out, config=config)
    return out


def _grouped(case: cases.GemmCase, config: str | None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    out = case.poisoned(dtype)
    operands = (case.a, case.a_scale, case.b, case.b_scale)
    if case.layout == "masked":
        assert case.index is not None
        grouped_gemm_fp8_masked(*operands, case.index, out=out, config=config)
    else:
        grouped_gemm_fp8_contiguous(*operands, **{case.layout: case.index}, out=out, config=config)
    return out


def _case(layout: str, rows: Sequence[int], n: int, k: int) -> cases.GemmCase:
    if layout == "masked":
        return cases.masked_case(rows, max(rows) + 100, n, k, "cuda")
    return cases.contiguous_case(layout, rows, n, k, "cuda")


def each_layout(*configs: str) -> pytest.MarkDecorator:
    """Parametrize `layout` and `config`."""
    return pytest.mark.parametrize(
        "layout, config", [(layout, config) for layout in LAYOUTS for config in configs]
    )


def _valid(case: cases.GemmCase, out: torch.Tensor) -> torch.Tensor:
    """All valid rows, expert by expert."""
    picks = [(e, slice(a, b)) if case.layout == "masked" else slice(a, b) for e, a, b in case.runs]
    return torch.cat([out[pick] for pick in picks])


# N has an odd number of columns of tiles, and the last column is half full. K has more blocks than some
# configs have stages.
@pytest.mark.parametrize("m", [1, 8, 50, 64, 100, 128, 192, 330])
@pytest.mark.parametrize("n, k", [(576, 512), (2112, 3200)])
def test_dense(m: int, n: int, k: int) -> None:
    case = cases.dense_case(m, n, k, "cuda")
    undivided = None
    for config in gemm_configs("dense", k):
        first = _dense(case, str(config))
        cases.check_gemm(case, first)
        if config.parts == 1:
            undivided = first if undivided is None else undivided
            assert torch.equal(first, undivided), f"{config} rounds differently"
        assert all(torch.equal(_dense(case, str(config)), first) for _ in range(3)), (
            f"{config} does not repeat"
        )


@pytest.mark.parametrize("m", [5, 128, 200])
def test_dense_fp32(m: int) -> None:
    case = cases.dense_case(m, 576, 2048, "cuda")
    for config in gemm_configs("dense", 2048):
        cases.check_gemm(case, _dense(case, str(config), torch.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, k", [(576, 512), (2112, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped(layout: str, n: int, k: int, dtype: torch.dtype) -> None:
    case = _case(layout, ROWS, n, k)
    undivided = None
    for config in gemm_configs(layout, k):
        out = _grouped(case, str(config), dtype)
        cases.check_gemm(case, out)
        rows = _valid(case, out)
        undivided = rows if undivided is None else undivided
        assert torch.equal(rows, undivided), f"{config} rounds differently"


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_a_row_does_not_depend_on_rows_neighbours_or_layout(layout: str) -> None:
    # The batch-invariant mode relies on this: dense and grouped results of a row are equal.
    case = cases.contiguous_case(layout, ROWS, 576, 512, "cuda")
    out = _grouped(case, None)
    for expert, start, end in case.runs:
        rows = slice(start, end)
        alone = torch.empty_like(out[rows])
        scale = case.a_scale[rows].contiguous()
        gemm_fp8(case.a[rows], scale, case.b[expert], case.b_scale[expert], out=alone, config="64x96")
        assert torch.equal(alone, out[rows])


@each_layout("32x128", "128x192/2p", "128x256/2p", "192x128")
def test_repeats_twenty_times(layout: str, config: str) -> None:
    case = _case(layout, ROWS, 2112, 1024)
    first = _valid(case, _grouped(case, config))
    for _ in range(20):
        assert torch.equal(_valid(case, _grouped(case, config)), first)


@pytest.mark.parametrize("config", ["8x64/2k", "32x64", "64x64/3k", "128x64/3k", "128x128/3k", "64x128/2k"])
def test_divided_sums_repeat_twenty_times(config: str) -> None:
    case = cases.dense_case(int(config.split("x")[0]) - 3, 2112, 7168, "cuda")
    first = _dense(case, config)
    cases.check_gemm(case, first)
    for _ in range(20):
        assert torch.equal(_dense(case, config), first)


# With pairs of 128x256 on 66 clusters, the last round has few pairs, taken in quarters; or more, taken in
# halves; or many.
@pytest.mark.parametrize("m", [1100, 1500, 1900, 2112, 2160])
def test_last_rounds(m: int) -> None:
    case = cases.dense_case(m, 4096, 256, "cuda")
    expected = _dense(case, "128x128")
    cases.check_gemm(case, expected)
    for config in ("128x192", "128x256/2p", "192x96", "192x128"):
        assert torch.equal(_dense(case, config), expected), config


@pytest.mark.parametrize("num_experts", [45, 54])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_last_rounds_of_many_experts(layout: str, num_experts: int) -> None:
    # There are more experts than a warp has lanes, and sizes that end in tiles with few tokens. The last
    # rounds are taken in halves and quarters.
    rows = [(37 * e) % 300 for e in range(num_experts)]
    case = _case(layout, rows, 1536, 256)
    expected = _valid(case, _grouped(case, "128x128"))
    for config in gemm_configs(layout, 256):
        out = _grouped(case, str(config))
        cases.check_gemm(case, out)
        assert torch.equal(_valid(case, out), expected), config


@pytest.mark.parametrize("m", [50, 180])
@pytest.mark.parametrize("config", ["128x128/2k", "128x128/3k", "128x128/4k", "128x64/2k"])
def test_divided_tiles_of_which_a_warpgroup_owns_nothing(m: int, config: str) -> None:
    # The last tile of each column has at most 64 rows; every cluster takes several tiles.
    case = cases.dense_case(m, 8192, 2048, "cuda")
    cases.check_gemm(case, _dense(case, config))


@pytest.mark.parametrize(
    "config", ["128x64/3k", "128x128", "128x256/2p", "192x128", "8x64", "8x64/2k", "64x64/4k"]
)
@pytest.mark.parametrize("k", [6912, 7168, 16512])
def test_many_blocks_of_which_a_warpgroup_has_fewer(k: int, config: str) -> None:
    # K has 54, 56 and 129 blocks. The last number goes round all stages, and a warpgroup may own nothing of a
    # tile.
    case = cases.dense_case(180 if config.startswith("1") else 20, 1088, k, "cuda")
    cases.check_gemm(case, _dense(case, config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_divided_tiles_with_nothing_to_share(dtype: torch.dtype) -> None:
    # There is one group of columns and up to eight parts, so most parts have nothing to add. Each CTA has
    # many tiles.
    case = cases.dense_case(5, 24576, 4096, "cuda")
    for config in ("8x64", "8x64/2k", "8x64/4k", "8x128/4k"):
        cases.check_gemm(case, _dense(case, config, dtype))


@pytest.mark.sanitizer
@each_layout("64x96", "128x64", "128x96", "128x128", "128x192/2p", "128x256/2p", "192x128")
def test_small(layout: str, config: str) -> None:
    case = _case(layout, (3, 0, 200, 130), 576, 256)
    cases.check_gemm(case, _grouped(case, config))


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "config, n, k",
    [
        ("8x64", 64, 3200),
        ("32x64", 8960, 1920),
        ("64x64", 64, 1792),
        ("64x64/2k", 64, 3328),
        ("128x64/2k", 64, 2944),
        ("8x128", 320, 2560),
        ("64x96", 320, 2560),
        ("128x96", 320, 1280),
        ("128x192", 320, 1024),
        ("128x256/2p", 320, 2560),
        ("192x96", 320, 1280),
    ],
)
def test_small_of_more_blocks_than_stages(config: str, n: int, k: int) -> None:
    found = next(one for one in gemm_configs("dense", k) if str(one) == config)
    # 32x64 has more tiles than SMs, so some SMs take two.
    tiles = -(-20 // found.block_m) * -(-n // found.block_n)
    assert k // 128 // found.split * -(-tiles // DEFAULT_NUM_SMS) > found.num_stages
    case = cases.dense_case(20, n, k, "cuda")
    cases.check_gemm(case, _dense(case, config))


@pytest.mark.sanitizer
@each_layout("64x96", "128x192/2p")
def test_small_groups_of_more_blocks_than_stages(layout: str, config: str) -> None:
    found = next(one for one in gemm_configs(layout, 1536) if str(one) == config)
    assert found.num_stages < 1536 // 128
    case = _case(layout, (3, 0, 200, 130), 576, 1536)
    cases.check_gemm(case, _grouped(case, config))


@pytest.mark.sanitizer
@pytest.mark.parametrize("m", [4096, 4200])
def test_whole_tiles_one_after_the_other(m: int) -> None:
    # There are two rounds of whole tiles, and each tile begins before the previous tile is stored. Then one
    # round of quarters or of halves follows.
    case = cases.dense_case(m, 2112, 384, "cuda")
    cases.check_gemm(case, _dense(case, "128x256/2p"))


def test_a_graph_keeps_its_config() -> None:
    case = cases.dense_case(40, 576, 2048, "cuda")
    expected = _dense(case, "64x64/2k")
    out = case.poisoned()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm_fp8(case.a, case.a_scale, case.b, case.b_scale, out=out, config="64x64/2k")
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_unknown_configs_are_refused() -> None:
    case = cases.dense_case(4, 192, 256, "cuda")
    for config in ("", "7x128", "64x64/2k", "128x256/3p", "large"):
        with pytest.raises(ConfigError):
            _dense(case, config)
