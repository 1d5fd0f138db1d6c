"""Captures without a GPU: streams, memory pools, the collector and modes of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from moe_fp8.graph import BatchBuckets, GraphRunner
from moe_fp8.graph import capture as capture_module
from tests.cpu.graph_inputs import SPECS, inputs


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


@pytest.mark.parametrize("own", [False, True])
def test_a_capture_keeps_no_casts_of_autocast(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """A cast that autocast kept from a warm-up is freed before a replay, also if the step has its own."""
    device, weight = _Device(monkeypatch), torch.nn.Linear(3, 3)
    capture_module._stream.cache_clear()

    def step() -> list[str]:
        inner = torch.autocast("cpu", torch.bfloat16, cache_enabled=True) if own else nullcontext()
        with torch.profiler.profile() as profile, inner:
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


def test_a_warm_up_and_the_current_stream_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up reads what the current stream wrote, and its memory is used again behind it."""
    events: list[object] = []

    class Stream:
        def __init__(self, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            events.append((self.name, other.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    capture_module.warm_up(lambda: events.append("call"), 2)
    assert events == [("side", "current"), "call", "call", ("current", "side")]

    def fail() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        capture_module.warm_up(fail, 1)
    assert events[-1] == ("current", "side")


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_takes_and_leaves_the_given_pool(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """All captures of a device have one stream, to which a pool gives its memory back."""
    graphs: list[dict[str, Any]] = []
    left: list[tuple[int, Any]] = []

    @contextmanager
    def graph(_: object, **options: Any) -> Iterator[None]:
        graphs.append(options)
        yield

    def step() -> int:
        if fails:
            raise ValueError("on purpose")
        return 5

    device = _Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *place: left.append(place), raising=False)
    capture_module._stream.cache_clear()
    for _ in range(2):
        with device.on(1), pytest.raises(ValueError) if fails else nullcontext():
            assert capture_module.capture("step", step, (0, 7))[1] == 5
    capture_module._stream.cache_clear()
    assert [options["pool"] for options in graphs] == [(0, 7), (0, 7)]
    assert graphs[0]["stream"] is graphs[1]["stream"]
    assert left == ([(1, (0, 7))] * 2 if fails else [])
