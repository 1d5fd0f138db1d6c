"""The selector's choice is legal for every problem, and depends only on facts that may affect results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_fp8 import heuristics, specs
from moe_fp8.errors import ConfigError
from moe_fp8.heuristics.gemm import costs as gemm_costs
from moe_fp8.heuristics.gemm import table as gemm_table
from moe_fp8.problems import (
    GemmLayout,
    GemmProblem,
    GemmSiluMulProblem,
    IndexerCacheProblem,
    IndexerTopkProblem,
    KGroupedGemmProblem,
    MoeCombineProblem,
    MoePermuteProblem,
    MqaLogitsProblem,
    PagedMqaLogitsProblem,
    Problem,
    RouteTopkProblem,
    SiluMulQuantizeProblem,
    selection_rows,
)
from moe_fp8.specs import select_k_grouped_gemm

LAYOUTS: tuple[GemmLayout, ...] = ("dense", "m_indices", "psum", "offsets", "masked")
ROWS = (1, 7, 8, 9, 20, 64, 65, 100, 128, 129, 300, 1000, 1024, 5000, 16384)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_sms", [1, 2, 3, 4, 16, 78, 114, 132])
def test_every_config_fits_the_device(layout: GemmLayout, num_sms: int) -> None:
    for n, k in ((64, 128), (2112, 7168), (7168, 2048), (24576, 1536)):
        for rows in ROWS:
            experts = 1 if layout == "dense" else 8
            problem = GemmProblem(layout, rows * experts, n, k, experts, num_sms=num_sms)
            config = heuristics.gemm_config(problem)
            assert config.launch_cluster <= num_sms
            assert config.block_m in heuristics.TOKEN_TILES
            assert heuristics.gemm_smem_bytes(config) <= heuristics.SMEM_CAPACITY
            assert config.num_stages >= 3
            if config.shares == "k":
                assert k // config.cluster >= 512


@pytest.mark.parametrize("num_sms", [4, 78, 131, 132])
def test_a_launch_has_whole_clusters_for_every_tile(num_sms: int) -> None:
    for m, n in ((1, 64), (64, 64), (129, 2112), (300, 1536), (16384, 7168)):
        for config in heuristics.gemm_configs("dense", 7168):
            grid = heuristics.gemm_grid(config, "dense", m, n, num_sms)
            assert 0 < grid <= num_sms and grid % config.launch_cluster == 0
            # A tile has a CTA, unless all SMs have one, and no CTA but the last neighbour has none.
            tiles = -(-m // config.block_m) * -(-n // config.block_n) * config.split
            assert grid >= min(tiles, num_sms // config.launch_cluster * config.launch_cluster)
            assert config.divided or grid < tiles + config.launch_cluster
    for layout in LAYOUTS[1:]:
        for config in heuristics.gemm_configs(layout, 7168):
            grid = heuristics.gemm_grid(config, layout, 1024, 2112, num_sms)
            assert num_sms - config.launch_cluster < grid <= num_sms and grid % config.launch_cluster == 0
    neighbours = {
        str(config)
        for config in heuristics.gemm_configs("dense", 7168)
        if config.launch_cluster > config.cluster
    }
    assert neighbours == {"64x64", "64x96", "128x64", "128x96", "128x128", "128x192", "192x96", "192x128"}


@pytest.mark.parametrize("num_sms", [1, 2, 3, 78, 131, 132])
@pytest.mark.parametrize("num_experts", [1, 64])
@pytest.mark.parametrize("accumulate", [False, True])
def test_ragged_k_has_whole_clusters_on_any_number_of_sms(
    num_sms: int, num_experts: int, accumulate: bool
) -> None:
    for m, n in ((1, 64), (128, 192), (300, 128), (4096, 7168)):
        problem = KGroupedGemmProblem(m, n, 512 * num_experts, num_experts, accumulate, num_sms)
        chosen = select_k_grouped_gemm(problem)
        assert heuristics.k_grouped_smem_bytes(chosen.config, problem.out_dtype) <= heuristics.SMEM_CAPACITY
        assert 0 < chosen.grid <= num_sms and chosen.grid % chosen.config.cluster == 0
        tiles = -(-m // 128) * -(-n // 128) * num_experts
        # A wide tile may come in quarters.
        assert chosen.grid <= max(8 * tiles, 2)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_no_hint_decides_how_a_grouped_sum_is_split(layout: GemmLayout) -> None:
    # Each part of K is rounded on its own, so results would show a split that depends on a hint.
    for rows in ROWS:
        problem = GemmProblem(layout, 16384, 576, 7168, 2, expected_m=rows)
        assert heuristics.gemm_config(problem).parts == 1


@pytest.mark.parametrize(
    "rows, n, k, experts", [(3, 4096, 7168, 32), (100, 1536, 2048, 16), (2000, 7168, 2048, 4)]
)
def test_all_grouped_layouts_have_the_same_costs(rows: int, n: int, k: int, experts: int) -> None:
    ranked = gemm_costs.ranked(GemmProblem("masked", rows, n, k, experts))
    costs = [cost for _, cost in ranked]
    assert costs == sorted(costs) and len(costs) > 3
    for layout in LAYOUTS[1:]:
        problem = GemmProblem(layout, 2 * rows * experts, n, k, experts, rows)  # with room to spare
        assert gemm_costs.ranked(problem) == ranked
        for config, cost in ranked:
            assert config in heuristics.gemm_configs(layout, k)
            assert (
                gemm_costs.predict(config, problem).microseconds == gemm_costs.cost(config, problem) == cost
            )


@pytest.mark.parametrize("experts", [2, 3, 8, 32, 256])
def test_known_blocks_are_what_experts_are_taken_to_fill(experts: int) -> None:
    narrow = next(config for config in heuristics.gemm_configs("psum", 7168) if str(config) == "128x64")
    for blocks in (1, 2, 3, 4, 9, 17, 31, 64):
        problem = GemmProblem("psum", 128 * blocks, 64, 7168, experts)
        assert problem.blocks == blocks
        # Larger numbers are rounded, and many blocks an expert tell only the mean.
        if blocks <= min(32, 8 * experts):
            tiles = gemm_costs.predict(narrow, problem).tiles
            assert 0.9 * blocks <= tiles <= blocks
        assert problem.rows >= 64
        many = blocks > 8 * experts
        assert problem.blocks_decide == gemm_costs.modelled(problem).blocks_decide == (not many)
        # A mean of few rows decides, as does a mean that the buffer is too small for, or with room to spare.
        for mean, decides in (
            (8, True),
            (64, True),
            (128 * blocks // experts + 1, True),
            (128 * blocks // experts, many or 128 * blocks <= 64 * experts),
            (128 * blocks // experts - 97, True),
        ):
            assert (replace(problem, expected_m=mean).blocks is None) == decides, (blocks, mean)


def test_a_mean_decides_unless_blocks_do() -> None:
    # 65 experts have at most 520 blocks that decide, and 519 are rounded to 528.
    problem = GemmProblem("psum", 128 * 519, 4096, 7168, 65)
    assert problem.blocks == 528 and not problem.blocks_decide
    assert replace(problem, expected_m=960).rows == selection_rows(960)


@pytest.mark.parametrize("device", gemm_table.DEVICES)
def test_a_table_does_not_correct_what_blocks_tell(device: str) -> None:
    problem = GemmProblem("psum", 96, 4096, 1536, 4, 96, device=device)
    full = replace(problem, m=512)
    assert gemm_table.lookup(problem) is not None and gemm_table.lookup(full) is None
    assert heuristics.gemm_config(full) == gemm_costs.cheapest(full)


@pytest.mark.parametrize("experts, blocks, n", [(2, 2, 3072), (3, 3, 2048), (4, 4, 1536), (4, 4, 2048)])
def test_few_blocks_make_one_round_of_tiles(experts: int, blocks: int, n: int) -> None:
    # A mean of 64 rows would choose 64 tokens a tile. But the padding of a block is dealt out, too, so each
    # block would be two rows of tiles.
    mean = GemmProblem("psum", 128 * blocks, n, 3072, experts, expected_m=64)
    assert heuristics.gemm_config(mean).block_m == 64
    for layout in ("m_indices", "psum"):
        config = heuristics.gemm_config(GemmProblem(layout, 128 * blocks, n, 3072, experts))
        assert config.block_m == 128 and blocks * -(-n // config.block_n) <= 132


def test_batch_invariant_sums_are_never_divided() -> None:
    for rows in ROWS:
        problem = GemmProblem("dense", rows, 2112, 7168, batch_invariant=True)
        assert heuristics.gemm_config(problem).parts == 1
    assert heuristics.gemm_config(GemmProblem("dense", 1, 2112, 7168)).parts > 1


def test_configs_have_a_text() -> None:
    for layout in LAYOUTS:
        problem = GemmProblem(layout, 64, 4096, 7168)
        for config in heuristics.gemm_configs(layout, 7168):
            assert heuristics.parse_gemm_config(str(config), problem) == config
    texts = [str(config) for config in heuristics.gemm_configs("dense", 7168)]
    assert len(set(texts)) == len(texts) and {"8x128", "64x64/2k", "128x256/2p"} <= set(texts)


@pytest.mark.parametrize(
    "text",
    [
        *("", "64", "64x96 ", "65x128", "64x128/2", "128x128/2p", "64x64/5k", "9x9"),
        *("64x128", "128x192/2p", "128x256"),  # tiles of other layouts, of a divided K, or of pairs
    ],
)
def test_texts_of_no_config_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        heuristics.gemm_config(GemmProblem("dense", 64, 4096, 7168, config=text))
    assert caught.value.got == text and "64x96" in caught.value.expected


def test_configs_of_another_layout_or_mode_are_refused() -> None:
    for problem in (
        GemmProblem("psum", 64, 4096, 7168, 1, config="64x128/2k"),
        GemmProblem("psum", 64, 4096, 7168, 1, config="128x192"),
        GemmProblem("dense", 64, 4096, 7168, batch_invariant=True, config="32x64"),
        GemmProblem("dense", 64, 4096, 512, config="64x128/2k"),
    ):
        with pytest.raises(ConfigError):
            heuristics.gemm_config(problem)


def test_what_is_asked_for_is_taken() -> None:
    problem = GemmProblem("dense", 1, 4096, 7168, config="128x256/2p")
    assert str(heuristics.gemm_config(problem)) == "128x256/2p"


def test_few_tiles_split_k_and_many_rows_take_the_widest_tile() -> None:
    assert heuristics.gemm_config(GemmProblem("dense", 1, 4096, 7168)).parts > 1
    widest = heuristics.gemm_config(GemmProblem("dense", 4096, 4096, 7168))
    assert (widest.block_m, widest.block_n, widest.cluster) == (128, 256, 2)


def test_rows_of_top_k_have_as_many_blocks_as_sms_and_columns_allow() -> None:
    chosen = {
        (rows, columns, sms): heuristics.topk_config(IndexerTopkProblem(rows, columns, num_sms=sms))
        for rows, columns, sms in (
            *((rows, 1 << 20, 132) for rows in (16, 17, 64, 128, 129)),
            *((1, columns, 132) for columns in (8192, 8193)),
            (128, 4096, 128),
        )
    }
    assert [config.cluster for config in chosen.values()] == [8, 4, 2, 1, 1, 1, 2, 1]
    assert [key for key, config in chosen.items() if config.num_threads == 512] == [(129, 1 << 20, 132)]


def test_ragged_k_has_wide_tiles_where_experts_have_many_columns() -> None:
    for mean, accumulate, sms, tile in (
        (1024, True, 132, "128x128/2p"),
        (2048, True, 132, "128x256/2p"),
        (2048, False, 132, "128x128/2p"),
        (4096, False, 132, "128x256/2p"),
        (4096, False, 1, "128x256"),
    ):
        problem = KGroupedGemmProblem(4096, 7168, 8 * mean, 8, accumulate, sms)
        assert str(heuristics.k_grouped_config(problem)) == tile
        assert specs.kernel_spec(problem) == specs.kernel_spec(problem.for_selection())


@pytest.mark.parametrize("rows, tile", [(1, 8), (4, 8), (5, 16), (8, 16), (20, 32), (23, 128), (500, 128)])
def test_the_fused_gemm_has_a_tile_for_the_rows_of_an_expert(rows: int, tile: int) -> None:
    mean = GemmSiluMulProblem(8 * rows, 4096, 7168, 8)
    expected = replace(mean, m=8192, expected_m=rows)
    beyond = replace(mean, m=rows, expected_m=8192)  # no expert has more rows than there are
    for problem in (mean, expected, beyond):
        assert specs.select_gemm_silu_mul(problem).config.block_m == tile
        assert specs.kernel_spec(problem) == specs.kernel_spec(problem.for_selection())


def test_terms_where_calls_are_large_unless_bits_may_not_depend_on_that() -> None:
    small, large = MqaLogitsProblem(178, 715, 64, 128), MqaLogitsProblem(4096, 16384, 64, 128)
    assert not heuristics.mqa_config(small).terms
    assert heuristics.mqa_config(large).terms
    assert not heuristics.mqa_config(replace(large, batch_invariant=True)).terms
    chunk = replace(small, whole_queries=large.num_queries, whole_keys=large.num_keys)
    assert heuristics.mqa_config(chunk) == heuristics.mqa_config(large), "the whole call decides"


def test_a_tile_of_logits_has_eight_tokens_at_most() -> None:
    for heads, most in ((8, 8), (16, 8), (32, 8), (64, 4)):
        assert heuristics.mqa_config(MqaLogitsProblem(64, 64, heads, 128)).block_q == most
        for next_n, covering in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 8), (40, 8)):
            problem = PagedMqaLogitsProblem(4, next_n, heads, 128, 64)
            assert heuristics.paged_mqa_config(problem).block_q == min(covering, most)


def test_prefill_items_are_whole_where_blocks_are_few() -> None:
    for queries in (1, 20, 44, 45, 66, 132, 133, 500, 5000):
        for keys in (1, 64, 700, 1251, 8192, 65_536, 1 << 20):
            division = heuristics.mqa_division(queries, keys, 132)
            assert division.chunk_kv % heuristics.MQA_BLOCK_KV == 0 and division.chunk_kv > 0
            items = queries * -(-keys // division.chunk_kv)
            if not division.even:
                assert items <= 132, (queries, keys)
                # Turns of the three warpgroups, compared with an even share.
                stages, even = division.chunk_kv / 64, queries * -(-keys // 64) / 132
                assert -(-stages // 3) <= -(-even // 3) + 2
    assert not heuristics.mqa_division(45, 715, 132).even
    assert heuristics.mqa_division(829, 4149, 132).even


@pytest.mark.parametrize(
    ("problem", "macros"),
    [
        (GemmProblem("dense", 64, 4096, 7168), {"SPLIT_K": 1, "LAYOUT": 0, "OUT_FP32": 0}),
        (GemmProblem("psum", 4096, 4096, 7168, 8, None, "float32"), {"SPLIT_K": 0, "LAYOUT": 2}),
        (GemmProblem("dense", 64, 4096, 7168, out_dtype="float32"), {"OUT_FP32": 1}),
        (MqaLogitsProblem(4096, 8192, 64, 128, True, True, 132, "bfloat16"),
         {"TERMS": 1, "COMPRESSED": 1, "FILL": 1, "OUT_BF16": 1, "HEAD_DIM": 128, "NUM_HEADS": 64}),
        (MqaLogitsProblem(64, 8192, 32, 64), {"TERMS": 0, "COMPRESSED": 0, "FILL": 0, "HEAD_DIM": 64}),
        (PagedMqaLogitsProblem(1, 1, 64, 64, 32), {"PAGE_SIZE": 32, "HEAD_DIM": 64, "NUM_HEADS": 64}),
        (PagedMqaLogitsProblem(1, 1, 32, 128, 128, 132, "bfloat16"), {"PAGE_SIZE": 128, "OUT_BF16": 1}),
        (SiluMulQuantizeProblem(16, 256, 1, True), {"MASKED": 1, "POWER_OF_TWO": 1, "ROUNDED": 0}),
        (SiluMulQuantizeProblem(16, 256, None, False, True), {"MASKED": 0, "POWER_OF_TWO": 0, "ROUNDED": 1}),
        (MoePermuteProblem(8, 8, 7168, None, True, True), {"IN_FP8": 1, "POWER_OF_TWO": 0, "WIDE_IDS": 1}),
        (MoePermuteProblem(8, 8, 7168, "bfloat16", True), {"IN_FP8": 0, "POWER_OF_TWO": 1, "WIDE_IDS": 0}),
        (RouteTopkProblem(4, 128, 8), {"VALUES": 4, "IN_DTYPE": 0}),
        (RouteTopkProblem(4, 129, 8, "float32"), {"VALUES": 8, "IN_DTYPE": 2}),
        (IndexerCacheProblem(1, 64, "float16", True), {"HEAD_DIM": 64, "IN_DTYPE": 1, "POWER_OF_TWO": 1}),
        (GemmSiluMulProblem(8, 256, 128, 2, None, True), {"LAYOUT": 3, "POWER_OF_TWO": 1, "ROUNDED": 0}),
        (GemmSiluMulProblem(8, 256, 128, 2, 4, False, True), {"POWER_OF_TWO": 0, "ROUNDED": 1}),
    ],
)  # fmt: skip
def test_a_kernel_has_the_macros_of_its_problem(problem: Problem, macros: dict[str, int]) -> None:
    defines = specs.kernel_spec(problem).defines
    assert macros.items() <= dict(defines).items() and list(defines) == sorted(defines)


def test_shared_memory_grows_with_the_keys() -> None:
    """The kernel's own assertion compares with the size for its macros."""
    small, large = (specs.kernel_spec(PagedMqaLogitsProblem(1, 1, 64, dim, 64)) for dim in (64, 128))
    assert small.smem_bytes < large.smem_bytes


def test_a_grid_covers_its_work_and_takes_no_more() -> None:
    assert specs.select_silu_mul_quantize(SiluMulQuantizeProblem(16, 256, 4)).grid == 8
    assert specs.select_indexer_cache(IndexerCacheProblem(1, 128)).grid == 1
    route = [specs.select_route_topk(RouteTopkProblem(tokens, 64, 8)).grid for tokens in (1, 4, 5, 100_000)]
    assert route == [1, 1, 2, 8 * 132]
    topk = specs.select_indexer_topk(IndexerTopkProblem(3, 1 << 20))
    assert topk.grid == 3 * topk.spec.cluster_size > 3
    paged = PagedMqaLogitsProblem(1, 1, 64, 64, 32, num_workers=7)
    assert specs.select_paged_mqa_logits(paged).grid == 7
    assert paged.for_selection() == replace(paged, num_workers=0), "workers choose no kernel"
    assert specs.select_moe_combine(MoeCombineProblem(1, 8, 7168)).grid == 7
    assert specs.select_moe_combine(MoeCombineProblem(100_000, 8, 7168)).grid == 16 * 132
    # Prefill over many queries has one block for each SM.
    assert specs.select_mqa_logits(MqaLogitsProblem(4096, 8192, 64, 128)).grid == 132
    # One row of tiles of 128 columns makes pairs of them.
    assert select_k_grouped_gemm(KGroupedGemmProblem(128, 512, 1024, 3)).grid == 3 * 4
    # A block has places for the rows of all its tokens.
    tokens, _ = specs.select_moe_permute(MoePermuteProblem(100_000, 32, 7168)).config
    assert tokens == max(1, specs.MOE_PLACES // 32)


def test_very_many_rows_are_one_number() -> None:
    """A call beyond the limits of its plan has the kernels of the longest planned call."""
    assert selection_rows(32_769) == selection_rows(1 << 30) == 32_768
