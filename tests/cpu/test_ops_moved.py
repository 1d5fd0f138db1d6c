"""A call that differs from an earlier call only in addresses launches what a fresh preparation would."""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8.errors import ArgumentError
from moe_fp8.ops import registry
from tests.cpu.op_arguments import OPS
from tests.cpu.test_ops_remembered import PARAMETERS_ENCODE, _Cuda
from tests.remembered import forget_launches


def _encode(address: int, *described: object) -> bytes:
    """A tensor map as the driver makes it: the address, then the rest."""
    return address.to_bytes(8, "little") + hashlib.sha256(repr(described).encode()).digest() * 3 + bytes(24)


class _Kernel:
    """A kernel that records its launches in `made`: itself, the grid and the parameters."""

    def __init__(self, spec: str, made: list[tuple[str, int, bytes]]) -> None:
        self.spec, self.made = spec, made

    def prepare(self, device: int) -> None: ...

    def launch(self, grid: int, stream: int, block: Any, device: int) -> None:
        self.made.append((self.spec, grid, ctypes.string_at(block.address, block.size)))


class _Launches(_Cuda):
    """The CUDA side with tensors that claim to be on a GPU, so that whole calls go through it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.made: list[tuple[str, int, bytes]] = []
        self.patch = patch
        patch.setattr(self.launch, "ensure_context", lambda device: None)
        patch.setattr(self.launch, "get_kernel", lambda spec: _Kernel(str(spec), self.made))
        patch.setattr(self.launch, "starts_with_address", lambda: True)
        patch.setattr(PARAMETERS_ENCODE, _encode)
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)

    def forget(self) -> None:
        forget_launches(self.launch, self.patch)

    def prepares_nothing(self) -> None:
        def refuse(cuda: str) -> NoReturn:
            raise AssertionError(f"{cuda} prepares a launch")

        self.patch.setattr(registry, "resolve", refuse)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Launches]:
    with torch.no_grad():
        side = _Launches(monkeypatch)
        yield side
    side.gemm._gemm_plan.cache_clear()


def _elsewhere(value: Any, shift: int = 0) -> Any:
    """The same tensor in other memory, with the alignment of its address but for `shift` elements."""
    if not isinstance(value, Tensor):
        return value
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    room = torch.zeros(last + 65, dtype=value.dtype)
    size = value.element_size()
    first = (value.data_ptr() - room.data_ptr()) % 16 // size + shift
    return room.as_strided(value.shape, value.stride(), first)


def _call(op: str, arguments: dict[str, Any]) -> None:
    registered = registry.OPS[op]
    registered.call(*(arguments[name] for name in registered.arguments))


@pytest.mark.usefixtures("either_comparison")
@pytest.mark.parametrize("op", sorted(OPS))
def test_a_moved_call_has_the_parameters_of_a_fresh_call(op: str, launches: _Launches) -> None:
    given = OPS[op]()
    _call(op, given)
    resolve = registry.resolve
    moved = {name: _elsewhere(value) for name, value in given.items()}
    launches.prepares_nothing()
    _call(op, moved)
    _call(op, moved)
    launches.patch.setattr(registry, "resolve", resolve)
    launches.forget()
    _call(op, moved)
    first, other, again, fresh = launches.made
    assert other == again == fresh and other[2] != first[2]
    assert first[:2] == other[:2]


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_tensor_of_a_call_can_move_alone(op: str, launches: _Launches) -> None:
    given = OPS[op]()
    _call(op, given)
    resolve = registry.resolve
    for name in registry.OPS[op].arguments:
        if isinstance(given[name], Tensor):
            moved = {**given, name: _elsewhere(given[name])}
            launches.prepares_nothing()
            _call(op, moved)
            launches.patch.setattr(registry, "resolve", resolve)
            launches.forget()
            _call(op, moved)
            assert launches.made[-2] == launches.made[-1] != launches.made[0], name


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("quantize_fp8", "scale"),
        ("silu_mul_quantize", "scale"),
        ("moe_permute", "a_scale"),
        ("grouped_gemm_silu_mul_fp8", "scale"),
    ],
)
def test_scales_of_other_strides_are_written_through_a_copy(
    op: str, name: str, launches: _Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator may give the copy the same memory again, so its launch is remembered, too."""
    given = OPS[op]()
    copy = given[name].fill_(7)
    monkeypatch.setattr(registry, "to_mn_major", lambda scales: copy)
    other = {**given, name: torch.zeros(*copy.shape, 2)[..., 0]}
    _call(op, other)
    assert (other[name] == 7).all()
    launches.prepares_nothing()
    _call(op, other)
    _call(op, given)
    first, again, direct = launches.made
    assert first == again == direct


def _prepared(op: str, launches: _Launches, given: dict[str, Any]) -> None:
    """The call is prepared, not moved."""
    launches.prepares_nothing()
    with pytest.raises(AssertionError, match="prepares a launch"):
        _call(op, given)


def test_other_attributes_are_prepared_anew(launches: _Launches) -> None:
    given = OPS["quantize_fp8"]()
    _call("quantize_fp8", given)
    _prepared("quantize_fp8", launches, {**given, "x": torch.zeros(5, 256, dtype=torch.bfloat16)})
    _prepared("quantize_fp8", launches, {**given, "x": torch.zeros(5, 264)[:, :256]})
    _prepared("quantize_fp8", launches, {**given, "power_of_two": True})
    _prepared("quantize_fp8", launches, {**given, "x": torch.zeros(4, 256), "q": given["q"][:4]} | {
        "scale": given["scale"][:4]
    })  # fmt: skip


def test_calls_of_one_form_that_differ_in_attributes_all_move(launches: _Launches) -> None:
    given = OPS["grouped_gemm_fp8_masked"]()
    # No dtype of out, no stride of it and no alignment of the index is part of the form.
    wide = torch.zeros(*given["out"].shape[:2], given["out"].shape[2] + 8, dtype=given["out"].dtype)
    kinds = [
        given,
        {**given, "out": given["out"].float()},
        {**given, "out": wide[..., : given["out"].shape[2]]},
        {**given, "masked_m": _elsewhere(given["masked_m"], 1)},
    ]

    def moved(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: _elsewhere(value) for name, value in arguments.items()}

    kept = [moved(arguments) for _ in range(2) for arguments in kinds]
    for arguments in kept:
        _call("grouped_gemm_fp8_masked", arguments)
    kept += [moved(arguments) for arguments in kinds]
    launches.prepares_nothing()
    for arguments in kept[-4:]:
        _call("grouped_gemm_fp8_masked", arguments)


@pytest.mark.parametrize("before", [True, False])
def test_a_number_of_sms_that_changes_during_a_call_is_not_remembered(
    before: bool, launches: _Launches
) -> None:
    """Before the launch is prepared, or meanwhile."""
    given = [OPS["quantize_fp8"]() for _ in range(3)]
    registered = registry.resolve(registry.OPS["quantize_fp8"].cuda)

    def meanwhile(*arguments: Any) -> Any:
        moe_fp8.set_num_sms(100)
        return registered(*arguments)

    def resolve(cuda: str) -> Any:
        if before:
            moe_fp8.set_num_sms(100)
        return registered if before else meanwhile

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "resolve", resolve)
            _call("quantize_fp8", given[0])
    finally:
        moe_fp8.set_num_sms(None)
    assert not launches.launch._templates and not launches.launch._launches
    _call("quantize_fp8", given[1])
    launches.prepares_nothing()
    _call("quantize_fp8", given[2])


def test_other_alignment_is_checked(launches: _Launches) -> None:
    given = OPS["gemm_fp8"]()
    _call("gemm_fp8", given)
    with pytest.raises(ArgumentError, match="16-byte aligned"):
        _call("gemm_fp8", {**given, "a": _elsewhere(given["a"], 8)})
    # Nothing asks this of an index, but a launch may depend on it.
    given = OPS["grouped_gemm_fp8_masked"]()
    _call("grouped_gemm_fp8_masked", given)
    moved = {**given, "masked_m": _elsewhere(given["masked_m"], 1)}
    _prepared("grouped_gemm_fp8_masked", launches, moved)


def test_memory_that_an_output_shares_is_refused_after_a_move(launches: _Launches) -> None:
    given = OPS["moe_combine"]()
    _call("moe_combine", given)
    room = torch.zeros(6, 64, dtype=torch.bfloat16)
    before = len(launches.made)
    with pytest.raises(ArgumentError, match="both share"):
        _call("moe_combine", {**given, "y": room, "out": room[:3]})
    assert len(launches.made) == before


def test_a_tensor_given_twice_is_not_moved(launches: _Launches) -> None:
    def given() -> dict[str, Any]:
        arguments = OPS["mqa_logits_fp8"]()
        return {**arguments, "ke": arguments["ks"]}

    kept = [given(), given()]
    for arguments in kept:
        _call("mqa_logits_fp8", arguments)
    # The block does not tell the two addresses apart.
    _prepared("mqa_logits_fp8", launches, given())


def test_maps_of_another_form_are_encoded_anew(launches: _Launches) -> None:
    launches.patch.setattr(launches.launch, "starts_with_address", lambda: False)
    kept = [OPS[op]() for op in ("gemm_fp8", "quantize_fp8")]
    _call("gemm_fp8", kept[0])
    _call("quantize_fp8", kept[1])
    kept[1] = OPS["quantize_fp8"]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "resolve", None)
        _call("quantize_fp8", kept[1])  # a kernel without maps
    _prepared("gemm_fp8", launches, OPS["gemm_fp8"]())


def test_modes_hold_for_moved_calls(launches: _Launches) -> None:
    given = OPS["quantize_fp8"]()
    _call("quantize_fp8", given)
    moved = {name: _elsewhere(value) for name, value in given.items()}
    with moe_fp8.compile_only():
        _call("quantize_fp8", moved)
    assert len(launches.made) == 1
    moe_fp8.set_num_sms(100)
    try:
        _prepared("quantize_fp8", launches, moved)
    finally:
        moe_fp8.set_num_sms(None)


def test_a_call_within_the_memory_of_calls_waits_for_nothing(launches: _Launches) -> None:
    """As that of a finalizer or a signal handler does. It is not remembered."""
    given = OPS["quantize_fp8"]()
    memories = launches.launch._launches, launches.launch._templates
    with launches.launch._remembering:
        for memory in memories:
            memory._busy = True
        _call("quantize_fp8", given)
        for memory in memories:
            memory._busy = False
    assert len(launches.made) == 1 and not launches.launch._launches
    _call("quantize_fp8", given)
    assert len(launches.made) == 2 and len(launches.launch._launches) == 1


def test_a_thread_that_moves_a_call_has_a_context_first(launches: _Launches) -> None:
    """The comparison of tensor maps is for the whole process, and needs a context."""
    order: list[str] = []
    given = OPS["gemm_fp8"]()
    _call("gemm_fp8", given)
    launches.patch.setattr(launches.launch, "ensure_context", lambda device: order.append("context"))
    launches.patch.setattr(launches.launch, "starts_with_address", lambda: order.append("maps") or True)
    _call("gemm_fp8", {name: _elsewhere(value) for name, value in given.items()})
    assert order[0] == "context" and "maps" in order


def test_what_is_remembered_is_bounded(launches: _Launches) -> None:
    launches.patch.setattr(launches.launch, "_MAX_KERNELS", 3)
    given = OPS["quantize_fp8"]()
    kept = []
    for rows in (1, 2, 3, 4, 5):
        for _ in range(3):
            cut = {name: _elsewhere(given[name][:rows]) for name in ("x", "q", "scale")}
            kept.append({**given, **cut})
            _call("quantize_fp8", kept[-1])
            assert len(launches.launch._launches) <= 3 and len(launches.launch._templates) <= 3
    assert len(launches.made) == 15


def test_a_call_is_remembered_when_it_is_moved_again(launches: _Launches) -> None:
    given = OPS["gemm_fp8"]()
    _call("gemm_fp8", given)
    moved = [{name: _elsewhere(value) for name, value in given.items()} for _ in range(3)]
    known = launches.launch._launches
    for each in moved:
        _call("gemm_fp8", each)
    assert len(known) == 1
    for each in moved:
        _call("gemm_fp8", each)
    assert len(known) == 4
    launches.patch.setattr(launches.launch, "move", None)
    for each in moved:
        _call("gemm_fp8", each)
    blocks = [params for *_, params in launches.made[1:]]
    assert blocks[:3] == blocks[3:6] == blocks[6:] and len(set(blocks)) == 3


def test_calls_that_were_moved_are_known_in_bounds(launches: _Launches) -> None:
    launches.patch.setattr(launches.launch, "_MAX_KERNELS", 50)
    given = OPS["quantize_fp8"]()
    _call("quantize_fp8", given)
    many = [{name: _elsewhere(value) for name, value in given.items()} for _ in range(225)]
    for each in many:
        _call("quantize_fp8", each)
    seen = launches.launch._seen
    assert len(seen._young) <= 50 and len(seen._old) <= 50
    for each in many[-50:]:  # the last calls are still known
        _call("quantize_fp8", each)
    launches.patch.setattr(launches.launch, "move", None)
    for each in many[-49:]:
        _call("quantize_fp8", each)


def test_threads_that_move_calls_at_once_write_no_block_of_each_other(launches: _Launches) -> None:
    given = OPS["gemm_fp8"]()
    _call("gemm_fp8", given)
    meeting = threading.Barrier(4)
    repeat = launches.launch._start

    def start(device: int, kernels: Any) -> None:
        meeting.wait(10)  # all threads have written their blocks
        repeat(device, kernels)

    launches.patch.setattr(launches.launch, "_start", start)
    moved = [{name: _elsewhere(value) for name, value in given.items()} for _ in range(4)]

    def call(arguments: dict[str, Any]) -> None:
        with torch.no_grad():
            _call("gemm_fp8", arguments)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(call, moved))
    expected = {each["out"].data_ptr() for each in moved}
    outputs = [
        {word for (word,) in struct.iter_unpack("<q", params)} & expected for *_, params in launches.made[1:]
    ]
    assert sorted(map(len, outputs)) == [1] * 4 and set().union(*outputs) == expected


def test_a_call_within_a_moved_call_writes_another_block(launches: _Launches) -> None:
    """A finalizer or a signal handler may call an op when the outer call has written its block."""
    given = OPS["gemm_fp8"]()
    _call("gemm_fp8", given)
    outer, inner, later = ({name: _elsewhere(value) for name, value in given.items()} for _ in range(3))
    start, within = launches.launch._start, [inner]

    def interrupted(device: int, kernels: Any) -> None:
        if within:
            _call("gemm_fp8", within.pop())
        start(device, kernels)

    launches.patch.setattr(launches.launch, "_start", interrupted)
    launches.prepares_nothing()
    _call("gemm_fp8", outer)
    _call("gemm_fp8", later)
    made = [{word for (word,) in struct.iter_unpack("<q", params)} for *_, params in launches.made[1:]]
    for call, words in zip((inner, outer, later), made, strict=True):
        assert call["out"].data_ptr() in words


def test_a_form_that_was_moved_is_not_given_up(launches: _Launches) -> None:
    given = OPS["quantize_fp8"]()
    _call("quantize_fp8", given)
    (form,) = launches.launch._templates
    launches.launch.give_up(form)
    launches.prepares_nothing()
    _call("quantize_fp8", {name: _elsewhere(value) for name, value in given.items()})
