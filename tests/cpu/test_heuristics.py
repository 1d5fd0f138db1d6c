"""The selector: legal for every problem, and a function of what results may depend on."""

from __future__ import annotations

import pytest

from moe_fp8 import heuristics
from moe_fp8.problems import GemmLayout, GemmProblem

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
            assert config.cluster <= num_sms
            assert config.block_m in heuristics.TOKEN_TILES
            assert heuristics.gemm_smem_bytes(config) <= heuristics.SMEM_CAPACITY
            assert config.num_stages >= 3
            if config.shares == "k":
                assert k // config.cluster >= 1024


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_no_hint_decides_how_a_grouped_sum_is_split(layout: GemmLayout) -> None:
    # Parts of K are rounded on their own: a split that a hint could choose would show in the results.
    for rows in ROWS:
        problem = GemmProblem(layout, 16384, 576, 7168, 2, expected_m=rows)
        assert heuristics.gemm_config(problem).shares != "k"


def test_m_indices_tiles_in_a_cluster_share_their_expert() -> None:
    for rows in ROWS:
        config = heuristics.gemm_config(GemmProblem("m_indices", rows * 4, 4096, 7168, 4))
        assert config.cluster == 1 or config.shares == "tokens"


def test_few_tiles_split_k_and_many_rows_take_the_widest_tile() -> None:
    assert heuristics.gemm_config(GemmProblem("dense", 1, 4096, 7168)).shares == "k"
    widest = heuristics.gemm_config(GemmProblem("dense", 4096, 4096, 7168))
    assert (widest.block_m, widest.block_n, widest.cluster) == (128, 256, 2)
