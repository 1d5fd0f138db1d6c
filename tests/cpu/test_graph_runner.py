"""The graph runner: its eager path, and captures on a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from moe_fp8.errors import ArgumentError
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphMemory, GraphRunner
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
        static = any(same_storage(tokens, buffer) for buffer in runner.buffers.view(2).values())
        seen.append((tokens.tolist(), static))
        tokens.add_(5)
        tensors["tokens"] = tokens * 2
        return {"tokens": tensors.pop("tokens")}

    runner = GraphRunner(step, SPECS, BatchBuckets([1, 2]), "cpu", warmup_runs=2)
    runner.capture(lambda bucket: runner.run(inputs(bucket)) and None)
    assert seen == [([-1, -1], True)] * 3 + [([-1], True)] * 3


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("pool", "taken"), [(None, (0, 1)), ((0, 5), (0, 5))])
def test_a_capture_is_in_the_given_pool_without_gradients(
    monkeypatch: pytest.MonkeyPatch, pool: Any, taken: Any
) -> None:
    inner, pools, recorded = runner_module.capture, [], []

    def capture(name: str, call: Callable[[], Any], given: Any) -> Any:
        pools.append(given)
        return inner(name, call, given)

    def step(tensors: Any) -> Any:
        recorded.append(torch.is_grad_enabled())
        return {"y": tensors["tokens"] + 1}

    monkeypatch.setattr(runner_module, "capture", capture)
    with torch.enable_grad():
        GraphRunner(step, SPECS, BatchBuckets([1, 2]), "cpu", pool=pool, warmup_runs=1).capture()
    assert pools == [taken] * 2 and recorded == [False] * 4


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


def test_a_step_is_a_function() -> None:
    with pytest.raises(ArgumentError, match="GraphRunner: step: expected a function, got NoneType"):
        GraphRunner(None, SPECS, BatchBuckets([2]), "cpu")  # type: ignore[arg-type]
