"""Calls that look like an earlier call, or that nothing may remember, are made anew."""

from __future__ import annotations

import pytest
import torch

from moe_fp8.errors import ContractError
from moe_fp8.ops import registry
from tests.cpu.op_arguments import OPS, SCALED_GEMMS
from tests.cpu.test_ops_moved import _call, _Launches, launches

__all__ = ["launches"]


@pytest.mark.parametrize("op", SCALED_GEMMS)
def test_a_launch_on_converted_scales_is_not_remembered(op: str, launches: _Launches) -> None:
    """Their memory is given up when the call returns."""
    given = OPS[op]()
    given["a_scale"] = given["a_scale"].contiguous()
    _call(op, given)
    assert len(launches.made) == 1
    assert not launches.launch._launches and not launches.launch._templates


def test_checked_mode_checks_a_call_that_equals_an_earlier_one(
    launches: _Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = OPS["moe_combine"]()
    _call("moe_combine", given)
    monkeypatch.setattr(registry, "past_dispatcher", lambda tensors: False)
    monkeypatch.setattr(registry, "checked", lambda tensor: True)
    given["rows"][0, 0] = 6
    with pytest.raises(ContractError, match="rows below 6"):
        _call("moe_combine", given)
    assert len(launches.made) == 1


def test_optional_tensors_of_equal_attributes_are_told_apart(launches: _Launches) -> None:
    given = OPS["indexer_topk"]()
    bound = given["ks"]
    _call("indexer_topk", {**given, "ks": bound, "ke": None})
    _call("indexer_topk", {**given, "ks": None, "ke": bound})
    first, second = launches.made
    assert first != second


def test_an_address_in_two_tensors_or_behind_one_has_no_holder(launches: _Launches) -> None:
    room = torch.zeros(64, dtype=torch.uint8)
    begin = room.data_ptr()
    spans = launches.launch._Spans((begin, begin + 32), (room[:16], room[32:48]))
    holders = [spans.holder(begin + offset) for offset in (-1, 0, 15, 16, 31, 32, 47, 48)]
    assert holders == [None, 0, 0, None, None, 1, 1, None]
    shared = launches.launch._Spans((begin, begin + 8), (room[:16], room[8:24]))
    assert shared.holder(begin + 12) is None


def test_a_zero_tensor_has_memory_when_it_is_launched(launches: _Launches) -> None:
    given = OPS["moe_permute"]()
    _call("moe_permute", given)
    _call("moe_permute", {**given, "x_scale": torch._efficientzerotensor(given["x_scale"].shape)})
    assert len(launches.made) == 2


@pytest.mark.usefixtures("either_comparison")
def test_a_functional_tensor_is_never_launched(launches: _Launches) -> None:
    given = OPS["quantize_fp8"]()
    functional = {
        name: torch._to_functional_tensor(value) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    for launched in range(2):  # as the first call, and after a call that it looks like
        with pytest.raises(RuntimeError, match="functionaliz"):  # by the dispatcher, outside of a transform
            _call("quantize_fp8", functional)
        assert len(launches.made) == launched
        _call("quantize_fp8", given)


@pytest.mark.usefixtures("either_comparison")
def test_a_negative_view_is_not_repeated(launches: _Launches) -> None:
    """Its address and its other attributes are those of the tensor whose numbers it negates."""
    given = OPS["quantize_fp8"]()
    _call("quantize_fp8", given)
    _call("quantize_fp8", {**given, "x": torch._neg_view(given["x"])})
    first, second = launches.made
    assert first != second
