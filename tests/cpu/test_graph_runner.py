"""The graph runner: its eager path, and captures on a stand-in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from moe_fp8.errors import ArgumentError
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphMemory, GraphRunner
from moe_fp8.graph import capture as capture_module
from moe_fp8.graph import runner as runner_module
from moe_fp8.ops.arguments import same_storage
from tests.cpu.graph_inputs import SPECS, inputs


@pytest.mark.parametrize("order", [("tokens", "seen"), ("seen", "tokens")])
def test_an_input_that_a_step_returns_may_be_the_next_input(order: tuple[str, str]) -> None:
    specs = {name: BufferSpec((), torch.int64) for name in ("tokens", "seen")}

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"seen": tensors["tokens"], "tokens": tensors["seen"][:]}

    runner = GraphRunner(step, specs, BatchBuckets([4]), "cpu")
    out = runner.run({"tokens": torch.tensor([1, 2, 3]), "seen": torch.tensor([7, 8, 9])})
    out = runner.run({name: out[name] for name in order})
    assert (out["tokens"].tolist(), out["seen"].tolist()) == ([1, 2, 3], [7, 8, 9])


def test_an_input_may_be_a_shifted_view_of_its_own_buffer() -> None:
    runner = GraphRunner(dict, SPECS, BatchBuckets([4]), "cpu")
    out = runner.run(inputs(3))
    assert runner.run({name: tensor[1:] for name, tensor in out.items()})["tokens"].tolist() == [2, 3]


@pytest.mark.parametrize(("made", "used"), [(True, False), (False, True), (True, True)])
def test_a_runner_works_in_and_outside_of_inference_mode(made: bool, used: bool) -> None:
    with torch.inference_mode(made):
        runner = GraphRunner(
            lambda tensors: {"tokens": tensors["tokens"] + 1}, SPECS, BatchBuckets([2, 4]), "cpu"
        )
        runner.capture()
    with torch.inference_mode(used):
        out = runner.run(inputs(3))
        assert out["tokens"].tolist() == [2, 3, 4]
        runner.capture()
    assert runner.run({**inputs(3), "tokens": out["tokens"]})["tokens"].tolist() == [3, 4, 5]


def test_a_step_records_no_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    modes: list[bool] = []

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        modes.append(torch.is_grad_enabled())
        return {"x": tensors["table"] * weight}

    runner = GraphRunner(step, SPECS, BatchBuckets([2]), "cpu")
    runner.capture()
    assert not runner.run(inputs(2))["x"].requires_grad
    assert modes == [False, False] and torch.is_grad_enabled()


@pytest.mark.parametrize("result", [None, torch.zeros(2), [torch.zeros(2)], {"odd": None}, {"odd": [0, 0]}])
def test_a_step_must_return_a_dict_of_tensors(result: Any) -> None:
    runner = GraphRunner(lambda tensors: result, SPECS, BatchBuckets([2]), "cpu")
    for call in (runner.capture, lambda: runner.run(inputs(2))):
        with pytest.raises(ArgumentError, match=r"step: expected a dict|output odd: expected a tensor"):
            call()


@pytest.mark.parametrize("name", ["tokens", "table"])
@pytest.mark.parametrize("value", [None, [1, 2], 1])
def test_an_input_must_be_a_tensor(name: str, value: Any) -> None:
    runner = GraphRunner(lambda tensors: tensors, SPECS, BatchBuckets([2]), "cpu")
    with pytest.raises(ArgumentError, match=f"{name}: expected a tensor") as caught:
        runner.run({**inputs(2), name: value})
    assert caught.value.argument == name


def test_runner_refuses_what_is_no_batch() -> None:
    runner = GraphRunner(lambda tensors: tensors, SPECS, BatchBuckets([2]), "cpu")
    for bad in ({}, {"tokens": torch.tensor(1), "table": torch.zeros(0, 3, dtype=torch.int32)}, inputs(0)):
        with pytest.raises(ArgumentError):
            runner.run(bad)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners take their path for GPUs, with calls in the place of warm-ups and captures."""

    class Graph:
        def replay(self) -> None:
            pass

    def capture(name: str, call: Callable[[], Any], pool: Any) -> tuple[Graph, Any]:
        return Graph(), call()

    monkeypatch.setattr(runner_module, "capture", capture)
    monkeypatch.setattr(runner_module, "warm_up", lambda call, runs: [call() for _ in range(runs)])
    monkeypatch.setattr(runner_module.memory, "pool_bytes", lambda pool: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(GraphRunner, "_on_device", lambda self: nullcontext())
    # A runner on a CPU has no current GPU to ask for.
    monkeypatch.setattr(GraphRunner, "uses_graphs", property(lambda self: hasattr(self, "_rows")))


@pytest.mark.usefixtures("graphs")
def test_a_step_may_write_to_its_inputs_and_to_their_names() -> None:
    seen: list[tuple[list[int], bool]] = []

    def step(tensors: Any) -> Mapping[str, torch.Tensor]:
        tokens = tensors["tokens"]
        static = any(same_storage(tokens, buffer) for buffer in runner.buffers.view(4).values())
        seen.append((tokens.tolist(), static))
        tokens.add_(5)
        tensors["tokens"] = tokens * 2
        return {"tokens": tensors.pop("tokens")}

    runner = GraphRunner(step, SPECS, BatchBuckets([1, 2]), "cpu", warmup_runs=2)
    runner.capture(lambda bucket: runner.run(inputs(bucket)) and None)
    assert seen == [([-1, -1], True)] * 3 + [([-1], True)] * 3


@pytest.mark.usefixtures("graphs")
def test_a_step_may_return_one_dict_for_all_buckets() -> None:
    kept: dict[str, torch.Tensor] = {}

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        kept["tokens"] = tensors["tokens"] * 2
        return kept

    runner = GraphRunner(step, SPECS, BatchBuckets([1, 4]), "cpu")
    runner.capture()
    assert runner.run(inputs(3))["tokens"].shape == (3,)


@pytest.mark.usefixtures("graphs")
def test_a_capture_that_fails_leaves_no_earlier_graph() -> None:
    """An earlier graph would read tensors that the step no longer has."""
    results: list[Any] = [{"y": torch.zeros(4)}, {"y": torch.zeros(2)}, {"y": torch.zeros(4)}, None]
    runner = GraphRunner(lambda _: results.pop(0), SPECS, BatchBuckets([2, 4]), "cpu", warmup_runs=0)
    runner.capture()
    assert runner.captured == (2, 4) and set(runner.memory().buckets) == {2, 4}
    with pytest.raises(ArgumentError, match="a dict of tensors"):
        runner.capture()
    assert runner.captured == (4,) and set(runner.memory().buckets) == {4}
    with pytest.raises(ArgumentError, match=r"a captured bucket, got 2.*call capture\(\)"):
        runner.run(inputs(2))


def test_capture_runs_on_padding_even_after_a_batch() -> None:
    seen: list[list[int]] = []

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        seen.append(tensors["tokens"].tolist())
        return {"tokens": tensors["tokens"]}

    runner = GraphRunner(step, SPECS, BatchBuckets([2]), "cpu")
    runner.run(inputs(2))
    runner.capture()
    assert seen == [[1, 2], [-1, -1]]


@pytest.mark.parametrize("output", [torch.zeros(()), torch.zeros(1)], ids=["a number", "too few rows"])
def test_outputs_must_have_the_batch_first(output: torch.Tensor) -> None:
    runner = GraphRunner(lambda tensors: {"odd": output}, SPECS, BatchBuckets([2]), "cpu")
    with pytest.raises(ArgumentError, match="output odd"):
        runner.capture()


def test_a_request_may_have_several_rows() -> None:
    specs = {"tokens": BufferSpec((), torch.int64, pad=-1, rows=3), "lens": BufferSpec((), torch.int32)}

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"next": tensors["tokens"] + 1, "seen": tensors["lens"] * 2}

    runner = GraphRunner(step, specs, BatchBuckets([1, 4]), "cpu")
    runner.capture()
    given = {"tokens": torch.arange(6), "lens": torch.tensor([5, 7], dtype=torch.int32)}
    out = runner.run(given)
    assert (out["next"].tolist(), out["seen"].tolist()) == ([1, 2, 3, 4, 5, 6], [10, 14])
    assert runner.buffers.view(4)["tokens"].tolist() == [0, 1, 2, 3, 4, 5, *[-1] * 6]
    assert runner.buffers.view(4)["lens"].tolist() == [5, 7, 0, 0]
    for bad in ({"tokens": torch.arange(5)}, {"tokens": torch.arange(9)}):
        with pytest.raises(ArgumentError, match=r"tokens|lens"):
            runner.run({**given, **bad})
    with pytest.raises(ArgumentError, match="rows: expected at least 1, got 0"):
        BufferSpec((), torch.int64, rows=0)


def test_a_refused_output_leaves_nothing_behind() -> None:
    results = iter([{"a": torch.zeros(4), "b": None}, {"a": torch.zeros(2), "b": torch.zeros(2)}])
    runner = GraphRunner(lambda tensors: next(results), SPECS, BatchBuckets([2]), "cpu")  # type: ignore[arg-type,return-value]
    with pytest.raises(ArgumentError, match="output b"):
        runner.run(inputs(2))
    assert runner.run(inputs(2))["a"].shape == (2,)


def test_an_output_has_the_same_rows_in_every_bucket() -> None:
    runner = GraphRunner(lambda tensors: {"odd": torch.zeros(4)}, SPECS, BatchBuckets([2, 4]), "cpu")
    with pytest.raises(ArgumentError, match="2 rows: the bucket's 2 requests of 1"):
        runner.capture()


def test_memory_on_a_cpu_is_that_of_the_buffers() -> None:
    runner = GraphRunner(lambda tensors: tensors, SPECS, BatchBuckets([2, 4]), "cpu")
    runner.capture()
    assert runner.memory() == GraphMemory(buffers=4 * (8 + 3 * 4), pool=0, buckets={})


def test_runner_pads_to_the_bucket_and_returns_the_rows() -> None:
    seen: list[int] = []

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        seen.append(tensors["tokens"].shape[0])
        return {"sum": tensors["table"].sum(1) + tensors["tokens"]}

    runner = GraphRunner(step, SPECS, BatchBuckets([2, 4]), "cpu")
    done: list[int] = []
    runner.capture(done.append)
    assert seen == done == [4, 2]
    out = runner.run(inputs(3))["sum"]
    assert seen[-1] == 4
    assert out.tolist() == [6 + 1, 15 + 2, 24 + 3]
    assert (runner.uses_graphs, runner.captured, runner.replays) == (False, (), 0)
    with pytest.raises(ArgumentError):
        runner.run(inputs(5))


class _Device:
    """The current device of a process with several, as torch's streams change it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = 0
        cuda = torch.cuda

        class Stream:
            def __init__(stream, device: int | None = None) -> None:
                stream.device = self.current if device is None else device

        patch.setattr(cuda, "Stream", Stream)
        patch.setattr(cuda, "current_stream", lambda *_: Stream())
        patch.setattr(cuda, "current_device", lambda: self.current)
        patch.setattr(cuda, "stream", lambda stream: self.on(stream.device))
        patch.setattr(cuda, "synchronize", lambda *_: None)
        patch.setattr(cuda, "empty_cache", lambda: None)
        patch.setattr(cuda, "CUDAGraph", lambda: self)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(cuda.graph, "default_capture_stream", None)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def capture_begin(self, *_: object, **__: object) -> None:
        self.began = self.current

    def capture_end(self) -> None: ...


def test_each_device_captures_on_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own stream for captures stays that of the first device."""
    device = _Device(monkeypatch)
    capture_module._stream.cache_clear()
    for number in (0, 1, 0):
        with device.on(number):
            _, current = capture_module.capture("capture", lambda: device.current, (0, number))
        assert device.began == current == number
    capture_module._stream.cache_clear()


def test_a_step_with_other_rows_can_be_captured_again() -> None:
    runner = GraphRunner(
        lambda given: {"y": given["tokens"].repeat(rows)}, SPECS, BatchBuckets([1, 4]), "cpu"
    )
    for rows in (1, 2):
        runner.capture()
        assert runner.run(inputs(3))["y"].shape == (3 * rows,)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_behind_a_capture(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    device = _Device(monkeypatch)
    capture_module._stream.cache_clear()
    (gc.enable if enabled else gc.disable)()
    try:
        with device.on(0):
            _, during = capture_module.capture("capture", gc.isenabled, (0, 0))
        assert (during, gc.isenabled()) == (False, enabled)
    finally:
        gc.enable()
        capture_module._stream.cache_clear()


def test_a_capture_keeps_no_casts_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast that autocast kept from a warm-up is freed before a replay."""
    device, weight = _Device(monkeypatch), torch.nn.Linear(3, 3)
    capture_module._stream.cache_clear()

    def step() -> list[str]:
        with torch.profiler.profile() as profile:
            weight(torch.ones(1, 3))
        return [event.name for event in profile.events() if event.name == "aten::_to_copy"]

    with device.on(0), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first, again = step(), step()
        _, captured = capture_module.capture("capture", step, (0, 0))
        assert torch.is_autocast_cache_enabled()
    assert (len(first), len(again), len(captured)) == (3, 1, 3)
    capture_module._stream.cache_clear()


@pytest.mark.parametrize("mode", [0, 1])
def test_the_mode_of_synchronizations_is_as_it_was(monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    modes: list[Any] = [mode]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def fail() -> None:
        assert modes[-1] == "error"
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        capture_module.refuse_synchronization("step", fail)
    assert modes[-1] == mode


def test_a_failed_capture_tells_the_error_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a failed capture raises an error of its own, which says less."""
    device = _Device(monkeypatch)
    capture_module._stream.cache_clear()

    def end() -> None:
        raise RuntimeError("capture ended in vain")

    def step() -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(device, "capture_end", end)
    with pytest.raises(ValueError, match="on purpose"), device.on(0):
        capture_module.capture("step", step, (0, 0))
    capture_module._stream.cache_clear()
