"""What a launch takes of strides and sizes, and which of them do not matter to it."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
import torch

from moe_fp8.problems import KGroupedGemmProblem
from moe_fp8.settings import settings
from moe_fp8.specs import kernel_spec
from tests import cases
from tests.cpu.op_arguments import OPS
from tests.cpu.test_ops_moved import _call, _encode, _Launches, launches
from tests.cpu.test_ops_remembered import PARAMETERS_ENCODE
from tests.k_grouped_cases import k_grouped_case

__all__ = ["launches"]


@pytest.mark.parametrize(
    ("op", "name"),
    [("moe_combine", "weights"), ("moe_permute", "topk_ids"), ("paged_mqa_logits_fp8", "block_table")],
)
def test_a_launch_takes_the_distance_of_rows(op: str, name: str, launches: _Launches) -> None:
    given = OPS[op]()
    room = torch.zeros(16, dtype=given[name].dtype)
    for distance in (2, 5):
        _call(op, {**given, name: room.as_strided(given[name].shape, (distance, 1))})
    first, second = launches.made
    assert first != second


def test_a_launch_of_permute_takes_both_strides_of_scales(launches: _Launches) -> None:
    given, room = OPS["moe_permute"](), torch.rand(16)
    for strides in ((4, 1), (4, 2), (5, 1)):
        _call("moe_permute", {**given, "x_scale": room.as_strided((3, 2), strides)})
    assert len({params for *_, params in launches.made}) == 3


def test_the_distance_of_the_only_group_of_scales_does_not_matter(launches: _Launches) -> None:
    case, room = cases.dense_case(3, 64, 128), torch.rand(16)
    operands = {"a": case.a, "b": case.b, "b_scale": case.b_scale, "out": case.poisoned()}
    given = {**OPS["gemm_fp8"](), **operands}
    for distance in (4, 1, 7):
        _call("gemm_fp8", {**given, "a_scale": room.as_strided((3, 1), (1, distance))})
    ragged = k_grouped_case((128,), 5, 64)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    given = dict(zip(names, ragged.operands(), strict=True))
    given |= {"out": ragged.poisoned(), "accumulate": False}
    for distance in (8, 1, 7):
        _call("k_grouped_gemm_fp8", {**given, "a_scale": room.as_strided((5, 1), (1, distance))})
    dense, of_k = launches.made[:3], launches.made[3:]
    assert dense == [dense[0]] * 3 and of_k == [of_k[0]] * 3


def test_the_maps_of_a_masked_gemm_have_all_experts(launches: _Launches) -> None:
    sizes: list[Any] = []

    def encode(address: int, dtype: str, dims: Any, *others: Any) -> bytes:
        sizes.append(dims)
        return _encode(address, dims)

    launches.patch.setattr(PARAMETERS_ENCODE, encode)
    given = OPS["grouped_gemm_fp8_masked"]()
    _call("grouped_gemm_fp8_masked", given)
    experts, rows, k = given["a"].shape
    n = given["b"].shape[1]
    assert sizes[:3] == [(k, experts * rows), (rows, experts * k // 128), (k, experts * n)]


def test_the_distance_of_the_only_page_does_not_matter(launches: _Launches) -> None:
    given = OPS["paged_mqa_logits_fp8"]()
    page = given["kv_cache"][:1]
    near = page.as_strided(page.shape, (3, *page.stride()[1:]))
    for cache in (page, near):
        _call("paged_mqa_logits_fp8", {**given, "kv_cache": cache})
    first, second = launches.made
    assert first == second


def test_paged_logits_end_with_the_block_table(launches: _Launches) -> None:
    given = OPS["paged_mqa_logits_fp8"]()
    _call("paged_mqa_logits_fp8", given)
    _call("paged_mqa_logits_fp8", {**given, "block_table": given["block_table"][:, :1]})
    first, second = launches.made
    assert first != second, "the kernel would read pages behind the table"


def test_a_chunk_of_a_selection_takes_the_kernel_of_the_whole(launches: _Launches) -> None:
    given = OPS["_mqa_logits_fp8_chunk"]()
    _call("_mqa_logits_fp8_chunk", given)
    _call("_mqa_logits_fp8_chunk", {**given, "whole_queries": 1 << 14, "whole_keys": 1 << 16})
    (small, *_), (large, *_) = launches.made
    assert small != large


def test_batch_invariant_logits_of_a_large_call_take_the_kernel_of_a_small_call(launches: _Launches) -> None:
    on = dataclasses.replace(settings(), batch_invariant=True)
    launches.patch.setattr("moe_fp8.ops.indexer.cuda.settings", lambda: on)
    given = {**OPS["_mqa_logits_fp8_chunk"](), "fill": True}
    for queries, keys in ((1, 64), (1 << 14, 1 << 16)):
        _call("_mqa_logits_fp8_chunk", {**given, "whole_queries": queries, "whole_keys": keys})
    (small, *_), (large, *_) = launches.made
    assert small == large


def test_ragged_sums_that_are_added_to_take_a_tile_of_their_own(launches: _Launches) -> None:
    """As the planner says. (2048 columns of an expert are many if they are added, and few if not.)"""
    ragged = k_grouped_case((2048,), 5, 64)
    names = ("a", "a_scale", "b", "b_scale", "offsets")
    given = dict(zip(names, ragged.operands(), strict=True)) | {"out": ragged.poisoned()}
    for accumulate in (False, True):
        _call("k_grouped_gemm_fp8", {**given, "accumulate": accumulate})
        problem = KGroupedGemmProblem(5, 64, 2048, 1, accumulate, 132)
        assert launches.made[-1][0] == str(kernel_spec(problem))
    assert launches.made[0][0] != launches.made[1][0]


def test_the_grid_of_a_dense_gemm_follows_its_own_rows(launches: _Launches) -> None:
    """It has no blocks for other rows, although calls of several numbers of rows share a kernel."""
    for rows in (592, 600, 608):
        case = cases.dense_case(rows, 64, 128)
        operands = {"a": case.a, "a_scale": case.a_scale, "b": case.b, "b_scale": case.b_scale}
        _call("gemm_fp8", {**OPS["gemm_fp8"](), **operands, "out": case.poisoned(), "config": "8x128"})
    assert [grid for _, grid, _ in launches.made] == [74, 75, 76], "a block for eight rows"


@pytest.mark.parametrize("name", ["a_scale", "scale"])
def test_a_launch_of_the_fused_gemm_takes_the_distance_of_groups(name: str, launches: _Launches) -> None:
    case, room = cases.contiguous_case("offsets", (3, 2), 512, 256), torch.rand(64)
    given = {**OPS["grouped_gemm_silu_mul_fp8"](), "w13": case.b, "w13_scale": case.b_scale}
    given |= {"q": torch.zeros(5, 256, dtype=torch.float8_e4m3fn), "scale": torch.zeros(2, 8).T[:5]}
    for distance in (8, 12):
        _call("grouped_gemm_silu_mul_fp8", {**given, name: room.as_strided((5, 2), (1, distance))})
    first, second = launches.made
    assert first != second


@pytest.mark.parametrize("per_token", [False, True])
def test_paged_launches_take_workers_and_lengths_as_given(per_token: bool, launches: _Launches) -> None:
    read: list[int] = []
    launches.patch.setattr(PARAMETERS_ENCODE, lambda address, *_: read.append(address) or bytes(128))
    given, schedule = OPS["paged_mqa_logits_fp8"](), OPS["paged_mqa_logits_metadata"]()
    if per_token:
        given["context_lens"], schedule["context_lens"] = (
            one["context_lens"][:, None].contiguous() for one in (given, schedule)
        )
    _call("paged_mqa_logits_fp8", given)
    _call("paged_mqa_logits_metadata", schedule)
    (_, grid, logits), (_, _, metadata) = launches.made
    assert grid == given["metadata"].shape[0] - 1, "a block for each worker of the schedule"
    assert struct.unpack_from("<2i", logits, 4 * 128 + 4 * 8) == (1, per_token)
    assert struct.unpack_from("<2i", metadata, 8) == (1, per_token)
    _, block_size, _, width = given["kv_cache"].shape
    assert read[2] - read[1] == block_size * (width - 4), "a page's scales stand behind its keys"
