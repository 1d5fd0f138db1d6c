"""A layer at other addresses launches what its ops would launch one by one, from what is remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8.errors import ArgumentError
from moe_fp8.ops import registry, sequence
from tests.cpu.op_arguments import OPS
from tests.cpu.test_ops_moved import _elsewhere, _Launches, launches

__all__ = ["launches"]

TOKENS, TOPK, EXPERTS, HIDDEN, WIDTH = 6, 2, 3, 256, 128

Arguments = dict[str, Any]


def _layer(interleaved: bool = False, **given: Any) -> Arguments:
    fp8 = torch.float8_e4m3fn
    num_bytes = moe_fp8.moe_workspace_bytes(
        num_tokens=TOKENS, topk=TOPK, num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size=WIDTH,
        interleaved=interleaved,
    )  # fmt: skip
    arguments: Arguments = {
        "x": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "topk_ids": torch.zeros(TOKENS, TOPK, dtype=torch.int32),
        "topk_weights": torch.zeros(TOKENS, TOPK),
        "w13": torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.uint8).view(fp8),
        "w13_scale": torch.zeros(EXPERTS, 2 * WIDTH // 128, HIDDEN // 128),
        "w2": torch.zeros(EXPERTS, HIDDEN, WIDTH, dtype=torch.uint8).view(fp8),
        "w2_scale": torch.zeros(EXPERTS, HIDDEN // 128, WIDTH // 128),
        "workspace": torch.zeros(num_bytes + 64, dtype=torch.uint8)[16:],
        "out": torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16),
        "interleaved": interleaved,
    }
    return arguments | given


KINDS: dict[str, Arguments] = {
    "bf16": {},
    "interleaved": {"interleaved": True},
    "FP8": {
        "x": torch.zeros(TOKENS, HIDDEN, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "x_scale": torch.zeros(TOKENS, HIDDEN // 128),
    },
    "a rank": {"expert_map": torch.zeros(9, dtype=torch.int32)},
    "weights of 1": {"topk_weights": None, "limit": 2.0, "power_of_two": True},
    "rows far apart": {"x": torch.zeros(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN]},
}


def _moved(given: Arguments) -> Arguments:
    return {name: _elsewhere(value) for name, value in given.items()}


def _by_ops(given: Arguments, patch: pytest.MonkeyPatch) -> None:
    """The layer, whose ops make a call each."""
    with patch.context() as context:
        context.setattr(sequence, "past_dispatcher", lambda tensors: False)
        moe_fp8.fused_moe(**given)


@pytest.mark.usefixtures("either_comparison")
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_layer_launches_what_its_ops_launch(
    kind: str, launches: _Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _layer(**KINDS[kind])
    moe_fp8.fused_moe(**given)
    launched = 4 if given["interleaved"] else 5
    resolve = registry.resolve
    launches.prepares_nothing()
    moved = _moved(given)
    moe_fp8.fused_moe(**moved)
    moe_fp8.fused_moe(**moved)
    launches.patch.setattr(registry, "resolve", resolve)
    launches.forget()
    _by_ops(moved, monkeypatch)
    _by_ops(given, monkeypatch)
    parts = [launches.made[at : at + launched] for at in range(0, len(launches.made), launched)]
    first, other, again, ops, first_by_ops = parts
    assert other == again == ops != first == first_by_ops


def test_every_tensor_of_a_layer_can_move_alone(launches: _Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    given = _layer()
    moe_fp8.fused_moe(**given)
    resolve = registry.resolve
    for name, value in given.items():
        if isinstance(value, Tensor):
            moved = {**given, name: _elsewhere(value)}
            launches.prepares_nothing()
            moe_fp8.fused_moe(**moved)
            launches.patch.setattr(registry, "resolve", resolve)
            _by_ops(moved, monkeypatch)
            assert launches.made[-5:] == launches.made[-10:-5] != launches.made[:5], name


def test_memory_that_a_layer_shares_is_refused_after_a_move(launches: _Launches) -> None:
    given = _layer()
    moe_fp8.fused_moe(**given)
    before = len(launches.made)
    workspace = given["workspace"]
    for name in ("x", "topk_ids", "w2_scale"):
        value = given[name]
        inside = workspace[: value.nbytes].view(value.dtype).view(value.shape)
        with pytest.raises(ArgumentError, match=f"no memory of {name}"):
            moe_fp8.fused_moe(**{**given, name: inside})
    weights = given["out"].view(torch.float32)[:, :TOPK]
    with pytest.raises(ArgumentError, match="both share"):
        moe_fp8.fused_moe(**{**given, "topk_weights": weights})
    assert len(launches.made) == before


def test_other_attributes_and_alignments_are_prepared_anew(launches: _Launches) -> None:
    given = _layer(workspace=torch.zeros(1 << 16, dtype=torch.uint8))
    moe_fp8.fused_moe(**given)
    launches.prepares_nothing()
    for other in (
        {"topk_ids": given["topk_ids"].long()},
        {"x": KINDS["rows far apart"]["x"]},
        {"topk_weights": None},
        {"limit": 2.0},
        {"power_of_two": True},
        {"rounded": True},
        {"interleaved": True},
        {"topk_ids": _elsewhere(given["topk_ids"], 1)},
    ):
        with pytest.raises(AssertionError, match="prepares a launch"):
            moe_fp8.fused_moe(**{**given, **other})


def test_a_layer_that_writes_its_input_is_not_moved(
    launches: _Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _layer()
    given["out"] = given["x"]
    for _ in range(3):  # the blocks do not tell which address is the input's and which is the output's
        moe_fp8.fused_moe(**given)
    _by_ops(given, monkeypatch)
    assert launches.made[:5] == launches.made[5:10] == launches.made[10:15] == launches.made[15:]
    apart = {**given, "out": torch.zeros_like(given["x"])}
    moe_fp8.fused_moe(**apart)
    _by_ops(apart, monkeypatch)
    assert launches.made[-5:] == launches.made[-10:-5]


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """The names of ops that are prepared within the block."""
    resolve, prepared = registry.resolve, []

    def counted(name: str) -> Any:
        prepared.append(name)
        return resolve(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "resolve", counted)
        yield prepared


def _prepared(launches: _Launches, call: Arguments) -> int:
    """The number of ops of a call that are prepared."""
    with _counted() as prepared:
        moe_fp8.fused_moe(**call)
    return len(prepared)


def test_a_layer_that_cannot_be_moved_moves_its_ops(launches: _Launches) -> None:
    kept = [_moved(_layer()) for _ in range(5)]
    moe_fp8.fused_moe(**kept[0])
    for given in kept[1:4]:
        given["out"] = given["x"]
    assert [_prepared(launches, given) for given in kept[1:]] == [5, 0, 0, 0]


def test_a_layer_of_many_alignments_moves_its_ops(launches: _Launches) -> None:
    kept = []
    for number in range(30):
        given = _moved(_layer())
        given["topk_ids"] = _elsewhere(given["topk_ids"], number % 3)
        given["topk_weights"] = _elsewhere(given["topk_weights"], number % 2)
        kept.append(given)
    prepared = [_prepared(launches, given) for given in kept]
    assert sum(prepared[:6]) <= 6 * 5 and not any(prepared[18:])


def test_one_call_within_compile_only_does_not_end_the_moves(launches: _Launches) -> None:
    given, launched = _layer(), []
    launch = launches.launch.launch

    def interrupted(*arguments: Any) -> Any:
        launched.append(arguments)
        with moe_fp8.compile_only() if len(launched) == 5 else contextlib.nullcontext():
            made = launch(*arguments)
        if len(launched) == 5:
            launches.patch.setattr(launches.launch, "launch", launch)
        return made

    moe_fp8.fused_moe(**_moved(given))
    launches.forget()
    launches.patch.setattr(launches.launch, "launch", interrupted)
    moe_fp8.fused_moe(**given)
    moe_fp8.fused_moe(**given)
    assert _prepared(launches, _moved(given)) == 0


def test_a_layer_without_tokens_launches_nothing(launches: _Launches) -> None:
    given = _layer()
    for name in ("x", "topk_ids", "topk_weights", "out"):
        given[name] = given[name][:0]
    for _ in range(3):
        assert moe_fp8.fused_moe(**given).shape == (0, HIDDEN)
    assert not launches.made


def test_a_layer_launches_nothing_within_compile_only(launches: _Launches) -> None:
    given = _layer()
    with moe_fp8.compile_only():
        moe_fp8.fused_moe(**given)
    assert not launches.made
    moe_fp8.fused_moe(**given)
    with moe_fp8.compile_only():
        moe_fp8.fused_moe(**given)
    assert len(launches.made) == 5


def test_a_layer_that_was_compiled_alone_is_remembered_whole(launches: _Launches) -> None:
    with moe_fp8.compile_only():
        moe_fp8.fused_moe(**_moved(_layer()))
    moe_fp8.fused_moe(**_layer())
    assert len(launches.made) == 5 and len(launches.launch._launches) == 1


def test_a_layers_launches_are_kept_apart_by_the_number_of_sms(launches: _Launches) -> None:
    given = _layer()
    moe_fp8.fused_moe(**given)
    launches.prepares_nothing()
    try:
        moe_fp8.set_num_sms(100)
        with pytest.raises(AssertionError, match="prepares a launch"):
            moe_fp8.fused_moe(**given)
    finally:
        moe_fp8.set_num_sms(None)
    moe_fp8.fused_moe(**given)
    assert launches.made[:5] == launches.made[5:]


@pytest.mark.parametrize("name", ["fused_moe", "quantize_fp8"])
def test_a_number_of_sms_that_changes_during_a_call_is_not_remembered(name: str, launches: _Launches) -> None:
    """It is the same again at the end."""
    layer, op = _layer(), OPS["quantize_fp8"]()

    def call() -> None:
        if name == "fused_moe":
            moe_fp8.fused_moe(**layer)
        else:
            registry.OPS[name].call(*(op[argument] for argument in registry.OPS[name].arguments))

    found = launches.launch.get_kernel

    def changing(spec: Any) -> Any:
        moe_fp8.set_num_sms(None)
        moe_fp8.set_num_sms(20)
        return found(spec)

    moe_fp8.set_num_sms(20)
    try:
        with launches.patch.context() as patch:
            patch.setattr(launches.launch, "get_kernel", changing)
            call()
        assert not launches.launch._launches and not launches.launch._templates
        call()
        assert launches.launch._launches and launches.launch._templates
    finally:
        moe_fp8.set_num_sms(None)


def test_a_small_workspace_is_refused_after_a_larger(launches: _Launches) -> None:
    given = _layer()
    moe_fp8.fused_moe(**given)
    with pytest.raises(ArgumentError, match="at least"):
        moe_fp8.fused_moe(**{**given, "workspace": given["workspace"][:-256]})
    assert len(launches.made) == 5


def test_a_moved_linear_layer_launches_what_its_ops_launch(
    launches: _Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.zeros(192, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    new = {"empty": torch.empty, "empty_like": torch.empty_like, "empty_strided": torch.empty_strided}
    made: list[Tensor] = []  # what a call allocates, which the next call must not get again

    def kept(name: str) -> Any:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            made.append(new[name](*arguments, **options))
            return made[-1]

        return allocate

    for name in new:
        monkeypatch.setattr(torch, name, kept(name))
    given = torch.zeros(3, 256, dtype=torch.bfloat16), weight, torch.zeros(2, 2)
    moe_fp8.linear_fp8(*given)
    launches.prepares_nothing()
    moved = [_elsewhere(value) for value in given]
    first_made = len(made)
    moe_fp8.linear_fp8(*moved)
    monkeypatch.undo()
    again = iter(made[first_made:])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        fresh = _Launches(patch)
        for name in new:
            patch.setattr(torch, name, lambda *arguments, **options: next(again))
        moe_fp8.linear_fp8(*moved)
    assert len(launches.made) == 4 and launches.made[2:] == fresh.made
    assert launches.made[2:] != launches.made[:2]


def test_a_layer_on_converted_scales_is_not_remembered(launches: _Launches) -> None:
    weight = torch.zeros(192, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    moe_fp8.linear_fp8(torch.zeros(3, 256, dtype=torch.bfloat16), weight, torch.zeros(192, 2))
    assert len(launches.made) == 2 and not launches.launch._launches


def test_a_layer_that_was_given_up_moves_its_ops(launches: _Launches) -> None:
    """Each call of it has scales converted."""
    weight = torch.zeros(192, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(192, 2)
    kept, numbers = [], []
    for _ in range(4):
        x = _elsewhere(torch.zeros(3, 256, dtype=torch.bfloat16))
        with _counted() as prepared:
            kept.append((x, moe_fp8.linear_fp8(x, weight, scale)))
        numbers.append(len(prepared))
    assert numbers == [2, 2, 1, 1]


def test_what_is_remembered_is_bounded_by_its_kernels(launches: _Launches) -> None:
    launches.patch.setattr(launches.launch, "_MAX_KERNELS", 12)
    kept = []
    for _ in range(3):
        for rows in (2, 3, 4):
            given = _moved(_layer())
            for name in ("x", "topk_ids", "topk_weights", "out"):
                given[name] = given[name][:rows]
            kept.append(given)
            moe_fp8.fused_moe(**given)
            assert len(launches.launch._launches) <= 2 and len(launches.launch._templates) <= 2
    launches.prepares_nothing()
    moe_fp8.fused_moe(**kept[-1])
    moe_fp8.fused_moe(**_moved(kept[-2]))
    assert len(launches.made) == 5 * (len(kept) + 2)
