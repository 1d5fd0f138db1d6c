"""What a launch takes of strides and sizes, and which of them do not matter to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
