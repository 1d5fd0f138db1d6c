"""`verify_capture_safe` finds each kind of unsafe function; a tape of torch's calls stands for the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_fp8 import CaptureError, UnsupportedError, quantize_fp8
from moe_fp8.errors import ArgumentError
from moe_fp8.graph import capture, memory, verify, verify_capture_safe
from tests import graph_cases


class Tape(TorchDispatchMode):
    """Records calls like a graph does: with the addresses and host values of the capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        new = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given
        ]
        self.made += new
        if func is torch.ops.aten._local_scalar_dense.default or "empty" in str(func):
            return result  # a graph holds neither a host read nor an allocation

        def again() -> None:
            replayed = func(*args, **(kwargs or {}))
            for to, leaf in zip(new, [leaf for leaf in tree_leaves(replayed) if new], strict=False):
                to.copy_(leaf)

        self.calls.append(again)
        return result


_device = verify._device
_capture = verify._capture


@pytest.fixture(autouse=True)
def tape_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def taped(name: str, fn: Any, static: Any, given: Any, device: Any, runs: int) -> verify._Captured:
        tape, arguments = Tape(), static.load(given)
        with tape:
            result = fn(arguments)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in static.named().values()}
        outputs = {
            key: tensor
            for key, tensor in verify._named("output", result).items()
            if tensor.untyped_storage().data_ptr() not in inputs
        }

        def poison(byte: int) -> None:
            for tensor in tape.made:
                if tensor.untyped_storage().data_ptr() not in inputs:
                    verify._memory_of(tensor).view(torch.uint8).fill_(byte)

        return verify._Captured(outputs, lambda: [call() for call in tape.calls] and None, poison, lambda: 64)

    monkeypatch.setattr(verify, "_capture", taped)
    monkeypatch.setattr(verify, "_device", lambda *_: torch.device("cpu"))


def inputs(seed: int = 0) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=gen), "n": torch.tensor([2 + seed])}


class Both(NamedTuple):
    double: Tensor
    total: Tensor


def test_a_safe_function_passes() -> None:
    def step(given: dict[str, Tensor]) -> dict[str, Any]:
        return {"both": Both(given["x"] * 2, given["x"].sum()), "last": [given["n"] + 1, None]}

    report = verify_capture_safe(step, inputs(), inputs(1))
    names = ("output both.double", "output both.total", "output last[0]")
    assert (report.outputs, report.unchanged, report.pool_bytes) == (names, (), 64)


@pytest.mark.parametrize("name", graph_cases.CASES)
def test_every_op_passes(name: str) -> None:
    case = graph_cases.CASES[name]
    report = verify_capture_safe(case.call, case.inputs(0, "cpu"), case.inputs(1, "cpu"))
    assert report.outputs and not report.unchanged


def test_an_op_that_writes_into_its_inputs_passes() -> None:
    def given(seed: int) -> dict[str, Tensor]:
        gen = torch.Generator().manual_seed(seed)
        # Scales in a larger buffer: the copies keep this stride, or the op would take another way.
        scale = torch.full((2, 8), 7.0).T[:5]
        return {
            "x": torch.randn(5, 256, generator=gen).bfloat16(),
            "q": torch.zeros(5, 256, dtype=torch.float8_e4m3fn),
            "scale": scale,
        }

    strides = []

    def step(given: dict[str, Tensor]) -> None:
        strides.append(given["scale"].stride())
        quantize_fp8(given["x"], out=(given["q"], given["scale"]))

    report = verify_capture_safe(step, given(0), given(1))
    assert report.outputs == ("input q", "input scale")
    assert set(strides) == {(1, 8)}


@contextmanager
def refused(what: str, message: str) -> Iterator[None]:
    with pytest.raises(CaptureError, match=message) as caught:
        yield
    assert caught.value.what == what and caught.value.remedy


def test_a_host_read_is_frozen() -> None:
    with refused("output", "which is the result of the first inputs"):
        verify_capture_safe(lambda given: given["x"][0] * 0 + given["n"].item(), inputs(), inputs(1))


def test_one_wrong_element_is_named() -> None:
    def step(given: list[Tensor]) -> Tensor:
        out = given[0] * 2
        out[2, 1] = given[1].item()
        return out

    first, other = list(inputs().values()), list(inputs(1).values())
    with refused("output", r"2.0 instead of 3.0 at \[2, 1\]"):
        verify_capture_safe(step, first, other)


@pytest.mark.parametrize("wrong", [{"x": 1}, [None], torch.ones(2, 3)], ids=["number", "none", "tensor"])
def test_inputs_are_tensors_in_a_dict_or_a_list(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"inputs.*tensor"):
        _device("fn", wrong, wrong)


def test_a_function_may_bind_other_tensors_to_the_names_of_its_inputs() -> None:
    def rebinds(given: dict[str, Tensor]) -> Tensor:
        given["x"] = given["x"] * 2 + given["n"]
        return given.pop("x")

    report = verify_capture_safe(rebinds, inputs(), inputs(1))
    assert report.outputs == ("output",)


def test_unwritten_elements_are_found() -> None:
    def step(given: dict[str, Tensor]) -> Tensor:
        out = torch.empty(4, 6)
        out[:3] = given["x"][:3]
        return out

    with refused("output", r"nan at \[3, 0\]"):
        verify_capture_safe(step, inputs(), inputs(1))


def test_scratch_that_is_read_before_it_is_written_is_found() -> None:
    def step(given: dict[str, Tensor]) -> Tensor:
        scratch = torch.empty(6)
        return given["x"] + torch.add(scratch, 1)

    with refused("output", "write scratch before reading it"):
        verify_capture_safe(step, inputs(), inputs(1))


def test_state_between_calls_is_found() -> None:
    calls = count()
    with refused("output", "two eager calls with the same inputs"):
        verify_capture_safe(lambda given: given["x"] + next(calls), inputs(), inputs(1))


@pytest.mark.parametrize("kept", [False, True])
def test_random_numbers_and_state_on_the_device_are_found(kept: bool) -> None:
    """A graph goes on with both, so its replays differ as if they did not write every element."""
    state = torch.zeros(())

    def step(given: dict[str, Tensor]) -> Tensor:
        return given["x"] + (state.add_(1) if kept else torch.rand_like(given["x"]))

    with refused("output", "two eager calls with the same inputs.*fix its random numbers"):
        verify_capture_safe(step, inputs(), inputs(1))


def test_what_earlier_replays_leave_behind_is_found() -> None:
    calls, kept = count(), torch.zeros(())

    def step(given: dict[str, Tensor]) -> Tensor:
        if next(calls) < 3:  # the eager calls keep nothing
            return given["x"] * 2
        return given["x"] * 2 + (kept.add_(1) > 3)

    with refused("output", "the first inputs.*left behind"):
        verify_capture_safe(step, inputs(), inputs(1))


def test_inputs_may_be_parts_of_larger_tensors() -> None:
    """The copies have the contents of each part, not those of the start of its memory."""
    seen: list[list[float]] = []

    def step(given: dict[str, Tensor]) -> Tensor:
        seen.append(given["x"].tolist())
        return given["x"] * 2

    parts = [{"x": torch.arange(8.0)[start : start + 2]} for start in (2, 5)]
    verify_capture_safe(step, parts[0], parts[1])
    assert seen == [[2, 3], [5, 6], [2, 3], [2, 3]]


@pytest.mark.parametrize("wrong", ["", "stray", "outside"])
def test_outputs_and_scratch_lie_in_the_pool(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """An output without elements has no memory, and outputs that are inputs need none."""
    elsewhere: list[memory.Block] = [memory.Block(16, 8, used=True)]
    events: list[object] = []
    kept = torch.zeros(3)

    def step(given: dict[str, Tensor]) -> list[Tensor]:
        events.append("call")
        if wrong == "outside" and len(events) == 4:
            elsewhere.append(memory.Block(64, 8, used=True))
        return [kept, torch.zeros(0), given["x"][1:]]

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    def blocks(device: torch.device, pool: object = (0, 0)) -> list[memory.Block]:
        assert pool in ((0, 0), (0, 9))
        own = [] if wrong == "stray" else [memory.Block(kept.data_ptr(), kept.nbytes, used=True)]
        return list(elsewhere) if pool == (0, 0) else own

    monkeypatch.setattr(memory, "blocks", blocks)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 9))
    monkeypatch.setattr(verify, "warm_up", lambda call, runs: [call() for _ in range(runs)])
    monkeypatch.setattr(verify, "refuse_synchronization", lambda name, call: (events.append(name), call()))
    monkeypatch.setattr(verify, "capture", lambda name, call, pool: (Graph(), call()))

    def captured() -> verify._Captured:
        return _capture("step", step, verify._Static(inputs()), inputs(), torch.device("cpu"), 2)

    if wrong:
        with refused("output[0]" if wrong == "stray" else "capture", "memory of the graph's pool"):
            captured()
        return
    found = captured()
    found.replay()
    assert list(found.outputs) == ["output[0]", "output[1]"]
    assert events == ["call", "step", "call", "call", "replay", "wait"]


def test_a_shape_that_depends_on_contents_is_found() -> None:
    with refused("output", r"\[2\] instead of torch.float32 \[3\]"):
        verify_capture_safe(lambda given: given["x"][0, : int(given["n"])] * 2, inputs(), inputs(1))


def test_a_dtype_that_changes_is_found() -> None:
    dtypes = iter((torch.float32, torch.float32, torch.int32))

    def step(given: dict[str, Tensor]) -> Tensor:
        return (given["x"] * 2).view(next(dtypes, torch.float32))

    with refused("output", r"torch.int32 \[4, 6\] instead of torch.float32 \[4, 6\]"):
        verify_capture_safe(step, inputs(), inputs(1))


def test_equal_inputs_prove_nothing() -> None:
    with pytest.raises(ArgumentError, match="contents that change an output"):
        verify_capture_safe(lambda given: given["x"] * 2, inputs(), inputs())


def test_an_output_that_the_inputs_do_not_change_is_reported() -> None:
    report = verify_capture_safe(
        lambda given: (given["x"] * 2, torch.zeros_like(given["x"])), inputs(), inputs(1)
    )
    assert report.unchanged == ("output[1]",)


def test_a_result_is_made_of_tensors() -> None:
    with pytest.raises(ArgumentError, match="a result of tensors, got float"):
        verify_capture_safe(lambda given: [given["x"], 1.0], inputs(), inputs(1))


def test_a_function_has_run_before_its_capture() -> None:
    with pytest.raises(ArgumentError, match="warmup_runs: expected at least 1"):
        verify_capture_safe(lambda given: given["x"] * 2, inputs(), inputs(1), warmup_runs=0)
    with pytest.raises(ArgumentError, match="warmup_runs: expected an integer"):
        verify_capture_safe(lambda given: given["x"] * 2, inputs(), inputs(1), warmup_runs=cast(Any, 1.5))


def test_an_input_may_be_written_for_the_other_inputs_alone() -> None:
    """Here the first inputs leave the bits of `out` as they were."""
    first, other = ({"x": torch.full((2,), value), "out": torch.zeros(2)} for value in (0.0, 1.0))
    report = verify_capture_safe(lambda given: given["out"].copy_(given["x"]), first, other)
    assert report.outputs == ("input out",)


def test_a_cpu_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UnsupportedError, match="no input on a CUDA device"):
        verify_capture_safe(lambda given: given["x"], inputs(), inputs(1))


@pytest.mark.parametrize(
    "other",
    [{"x": torch.zeros(4, 6)}, {**inputs(), "x": torch.zeros(6, 4).T}, {**inputs(), "n": torch.ones(1)}],
)
def test_the_inputs_match(monkeypatch: pytest.MonkeyPatch, other: dict[str, Tensor]) -> None:
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="other_inputs"):
        verify_capture_safe(lambda given: given["x"], inputs(), other)


def test_a_graph_has_one_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        first, second = ([torch.empty(2, device=f"cuda:{at}") for at in on] for on in ((1, 1), (0, 1)))
        assert _device("step", first, first) == torch.device("cuda", 1)
        with pytest.raises(ArgumentError, match="tensors on one CUDA device"):
            _device("step", second, second)


def test_memory_is_filled_by_its_address() -> None:
    memory_of = torch.arange(4, dtype=torch.int32)
    block = memory.Block(memory_of.data_ptr() + 4, 8, used=False)
    memory.bytes_of(block, torch.device("cpu")).fill_(0xFF)
    assert memory_of.tolist() == [0, -1, -1, 3]


SNAPSHOT = [
    {
        "device": 0,
        "segment_pool_id": pool,
        "address": address,
        "total_size": 30,
        "blocks": [{"size": 10, "state": "active_allocated"}, {"size": 20, "state": "inactive"}],
    }
    for pool, address in (((0, 0), 100), ((0, 3), 500), ((0, 3), 900))
]


def test_pools_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SNAPSHOT)
    device = torch.device("cuda", 0)
    assert list(memory.blocks(device)) == [(100, 10, True), (110, 20, False)]
    found = list(memory.blocks(device, (0, 3)))
    assert [(block.address, block.used) for block in found] == [
        (500, True), (510, False), (900, True), (910, False),
    ]  # fmt: skip
    assert list(memory.blocks(torch.device("cuda", 1))) == []
    assert memory.pool_bytes((0, 3)) == 60
    filled: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", filled.append)
    monkeypatch.setattr(
        memory, "bytes_of", lambda block, device: filled.append((block.address, block.size)) or torch.empty(0)
    )
    memory.poison(device, (0, 3), 0)
    # The memory that a tensor outside the pool has is left alone.
    assert filled == [device, (500, 10), (510, 20), (900, 10), (910, 20), (110, 20)]


def test_memory_that_a_stream_still_uses_is_no_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch tells of freed memory that it may not give away yet, because a stream has work on it."""
    states = [{"size": 8, "state": state} for state in ("active_awaiting_free", "inactive")]
    segment = {"device": 0, "segment_pool_id": (0, 0), "address": 64, "total_size": 16, "blocks": states}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])
    assert list(memory.blocks(torch.device("cuda", 0))) == [(64, 8, True), (72, 8, False)]


def test_the_end_of_a_block_is_not_in_it() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    at = tensor.data_ptr()
    for block, inside in (((at, 1), True), ((at - 1, 2), True), ((at - 4, 4), False), ((at + 1, 4), False)):
        assert memory.contains([memory.Block(*block, used=True)], tensor) is inside


def test_what_a_capture_forbids_is_named_with_its_line() -> None:
    def step() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with pytest.raises(CaptureError) as caught, capture._named("step"):
        step()
    assert "raise RuntimeError" in caught.value.got and "test_graph_verify.py" in caught.value.got
    assert str(caught.value.got).endswith("when stream is capturing")
    with pytest.raises(CaptureError, match="outer"), capture._named("outer"):
        raise RuntimeError("cudaErrorStreamCaptureUnsupported")
    # An error that names its line already stays as it is.
    with pytest.raises(CaptureError) as again, capture._named("outer"):
        raise caught.value
    assert again.value is caught.value


def test_an_error_of_torch_itself_has_a_line_too() -> None:
    namespace: dict[str, Any] = {}
    code = "def begin():\n    raise RuntimeError('already capturing')"
    exec(compile(code, f"{capture._TORCH}cuda/graphs.py", "exec"), namespace)
    with pytest.raises(RuntimeError) as caught:
        namespace["begin"]()
    traceback = caught.value.__traceback__
    assert traceback is not None
    assert "test_graph_verify.py" in capture._line(caught.value)
    assert capture._line(caught.value.with_traceback(traceback.tb_next)).endswith("(graphs.py:2)")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="no memory") as caught, capture._named("step"):
        raise RuntimeError("no memory")
    assert type(caught.value) is RuntimeError
