"""Calls that differ in any checked attribute have different keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fp8.ops import keys, registry
from moe_fp8.ops.keys import Call
from tests.cpu.op_arguments import I32, OPS, run


class _OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class _Recorder:
    """A stand-in for `moe_fp8.ops.launch` that says it has repeated every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def repeat(self, call: Call) -> bool:
        self.calls.append(call)
        return True


def _variants(value: Any) -> dict[str, Any]:
    """Variants of `value`, each with one changed attribute."""
    if not isinstance(value, torch.Tensor):
        return {"value": {False: True, True: False, None: 3, "psum": "offsets"}.get(value, 32)}
    other = {1: torch.int8, 2: torch.float16, 4: torch.uint32}
    return {
        "shape": value[:-1],
        "rank": value[None],
        "stride": value.as_strided(value.shape, (*value.stride()[:-1], 0)),
        "dtype": value.view(other[value.element_size()]),
        "type": value.as_subclass(torch.nn.Buffer),
        "address": torch.empty_strided(value.shape, value.stride(), dtype=value.dtype),
    }


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("either_comparison")
def test_every_attribute_of_every_argument_is_told_apart(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(registry, "launcher", lambda: recorder)

    def called(arguments: dict[str, Any]) -> Call:
        run(op, arguments)
        return recorder.calls.pop()

    arguments = {name: OPS[op]()[name] for name in registry.OPS[op].arguments}
    first = next(iter(arguments))
    arguments[first] = arguments[first].as_subclass(_OnGpu)
    known, again = called(arguments), called(arguments)
    same = keys.attributes_like(known[1])
    assert again[0] == known[0] and same(*again[1]), "calls go by value"
    for name, value in arguments.items():
        for attribute, variant in _variants(value).items():
            if name == first:
                if attribute == "type":
                    continue
                variant = variant.as_subclass(_OnGpu)
            changed = called({**arguments, name: variant})
            assert changed[0] != known[0] or not same(*changed[1]), f"{name}: {attribute}"


@pytest.mark.parametrize("name", ["ks", "ke", "values", "carried"])
def test_which_tensors_are_given_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(registry, "launcher", lambda: recorder)
    tensor = torch.zeros(3, dtype=I32)
    none = dict.fromkeys(("ks", "ke", "values", "carried"))
    arguments = {**OPS["_indexer_topk_chunk"](), **none, "logits": torch.zeros(3, 9).as_subclass(_OnGpu)}
    for given in none:
        run("_indexer_topk_chunk", {**arguments, given: tensor})
    assert len({call[0] for call in recorder.calls}) == len(none)


@pytest.mark.usefixtures("either_comparison")
def test_devices_are_told_apart_and_twins_are_not() -> None:
    tensor = torch.zeros(3)
    assert not keys.attributes_like((tensor,))(torch.zeros(3, device="meta"))
    assert keys.attributes_like((tensor, tensor))(tensor, tensor)
    assert not keys.attributes_like((tensor, tensor))(tensor, tensor[:2])
