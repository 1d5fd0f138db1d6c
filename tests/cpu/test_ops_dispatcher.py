"""Calls that need torch's dispatcher get it, although their tensors look like those of an engine."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8.ops import registry
from tests.cpu.op_arguments import OPS
from tests.cpu.test_ops_moved import _call, _elsewhere, _Launches, launches
from tests.cpu.test_ops_sequence import _layer

__all__ = ["launches"]


def _last(format_: str, block: bytes) -> Any:
    return struct.unpack_from(format_, block)[-1]


def test_a_number_that_is_a_tensor_is_read_at_each_call(launches: _Launches) -> None:
    given, factor = OPS["route_topk"](), torch.tensor(2.5)
    out = given["weights"], given["ids"]
    for expected in (2.5, 1.0):
        factor.fill_(expected)
        moe_fp8.route_topk(
            given["logits"], out[1].shape[1], scoring=given["scoring"],
            correction_bias=given["correction_bias"], num_expert_group=given["num_expert_group"],
            topk_group=given["topk_group"], scaling_factor=factor, out=out,  # type: ignore[arg-type]
        )  # fmt: skip
        assert _last("<7q8if", launches.made[-1][2]) == expected


def test_a_layers_number_that_is_a_tensor_is_read_at_each_call(launches: _Launches) -> None:
    given, limit = _layer(), torch.tensor(0.0)
    for expected in (7.0, 3.0):
        limit.fill_(expected)
        moe_fp8.fused_moe(**given, limit=limit)
        silu = [block for spec, _, block in launches.made[-5:] if spec.startswith("silu")]
        assert [_last("<7q3if", block) for block in silu] == [expected]


def test_a_flag_of_a_layer_that_is_a_tensor_is_read_at_each_call(launches: _Launches) -> None:
    given, flag = _layer(interleaved=True), torch.tensor(True)
    for interleaved, kernels in ((True, 4), (False, 5)):
        flag.fill_(interleaved)
        launches.made.clear()
        moe_fp8.fused_moe(**{**given, "interleaved": flag})
        assert len(launches.made) == kernels


def test_a_layer_within_a_transform_is_not_remembered(launches: _Launches) -> None:
    """There its buffers are new tensors, which nobody keeps."""
    given = _layer()

    def layer(x: torch.Tensor) -> torch.Tensor:
        moe_fp8.fused_moe(**given)
        return x

    for _ in range(2):
        torch.vmap(layer)(torch.zeros(2))
    assert not [key for key in launches.launch._launches if "fused_moe" in key]


@pytest.mark.parametrize(("op", "name"), [("moe_combine", "weights"), ("gemm_fp8", "b"), ("gemm_fp8", "out")])
@pytest.mark.parametrize("before", [True, False])
def test_a_tensor_whose_memory_was_given_up_is_refused(
    op: str, name: str, before: bool, launches: _Launches
) -> None:
    """As FSDP does with weights. For an optional tensor, address 0 would stand for none."""
    given = OPS[op]()
    if before:
        _call(op, given)
    freed = {**{key: _elsewhere(value) for key, value in given.items()}}
    freed[name].untyped_storage().resize_(0)
    made = len(launches.made)
    with pytest.raises(moe_fp8.ArgumentError, match="memory for all elements"):
        _call(op, freed)
    assert len(launches.made) == made


def test_a_number_in_the_place_of_a_bool_makes_no_other_kernel(launches: _Launches) -> None:
    x, given = torch.zeros(4, 256, dtype=torch.bfloat16), _layer()
    for usual, other in ((True, 2), (False, 0)):
        launches.made.clear()
        moe_fp8.quantize_fp8(x, power_of_two=usual)
        moe_fp8.fused_moe(**given, power_of_two=usual)
        expected = {spec for spec, _, _ in launches.made}
        launches.forget()
        launches.made.clear()
        moe_fp8.quantize_fp8(x, power_of_two=other)  # type: ignore[arg-type]
        moe_fp8.fused_moe(**given, power_of_two=other)
        assert {spec for spec, _, _ in launches.made} == expected


@pytest.mark.parametrize("odd", [1, np.bool_(True)])
def test_a_number_in_the_place_of_a_bool_slows_no_later_call(odd: Any, launches: _Launches) -> None:
    given = _layer()
    for power_of_two in (odd, True, True):
        moe_fp8.fused_moe(**given, power_of_two=power_of_two)
    launches.patch.setattr(registry, "resolve", None)
    launches.patch.setattr(launches.launch, "move", None)
    moe_fp8.fused_moe(**given, power_of_two=True)  # is repeated
    assert len(launches.made) == 20


def test_numpys_floats_are_floats(launches: _Launches) -> None:
    given = _layer()
    moe_fp8.fused_moe(**given, limit=np.float64(7))
    launches.prepares_nothing()
    moe_fp8.fused_moe(**given, limit=7.0)
    assert len(launches.made) == 10


def test_a_negative_bit_is_not_lost(launches: _Launches) -> None:
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    moe_fp8.quantize_fp8(x)
    moe_fp8.quantize_fp8(torch._neg_view(x))
    addresses = [_last("<Q", block) for _, _, block in launches.made]
    assert addresses[0] == x.data_ptr() != addresses[1]


def test_a_traced_call_stands_in_the_graph(launches: _Launches) -> None:
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    for _ in range(2):  # the second time with what an eager call has left
        traced = torch.jit.trace(lambda x: moe_fp8.quantize_fp8(x)[0], (x,), check_trace=False)
        assert "moe_fp8::quantize_fp8" in str(traced.graph)
        moe_fp8.quantize_fp8(x)


def _within_a_transform(name: str) -> None:
    weight, scale = moe_fp8.quantize_fp8_blocks(torch.zeros(128, 256, dtype=torch.bfloat16))
    given: dict[str, Any] = {"x": torch.zeros(4, 256, dtype=torch.bfloat16)}
    if name == "linear_fp8":
        given |= {"weight": weight, "weight_scale": scale}
    if name == "fused_moe":
        given = _layer(out=None)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            getattr(moe_fp8, name)(**{**given, "x": x})
        return x.sum()

    with torch.enable_grad():
        assert torch.equal(torch.func.grad(function)(given["x"]), torch.ones_like(given["x"]))


@pytest.mark.parametrize("name", ["quantize_fp8", "linear_fp8", "fused_moe"])
def test_a_call_within_a_function_transform(name: str, launches: _Launches) -> None:
    _within_a_transform(name)
    assert launches.made


@pytest.mark.parametrize("name", ["quantize_fp8", "linear_fp8", "fused_moe"])
def test_a_call_within_a_function_transform_on_the_cpu(name: str) -> None:
    _within_a_transform(name)


def test_the_dispatcher_passes_on_usual_arguments() -> None:
    for name, arguments in OPS.items():
        given = arguments()
        assert not registry.OPS[name].converts(tuple(given[one] for one in registry.OPS[name].arguments))


def test_a_negative_bit_is_not_lost_in_a_layer(launches: _Launches) -> None:
    given = _layer()
    moe_fp8.fused_moe(**{**given, "x": torch._neg_view(given["x"])})  # nothing is remembered before
    moe_fp8.fused_moe(**given)
    assert len(launches.made) == 10
    read = [given["x"].data_ptr() in struct.unpack_from("<3q", block) for _, _, block in launches.made]
    assert read == [False] * 5 + [True] + [False] * 4
