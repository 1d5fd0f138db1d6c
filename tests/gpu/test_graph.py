"""Graphs on a GPU: every op may be captured, unsafe functions are found, runners share a pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fp8
from moe_fp8 import CaptureError, paged_indexer_select
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphRunner, verify_capture_safe
from tests import cases, graph_cases


@pytest.mark.parametrize("name", graph_cases.CASES)
def test_every_op_may_be_captured(name: str) -> None:
    case = graph_cases.CASES[name]
    report = verify_capture_safe(case.call, case.inputs(0, "cuda"), case.inputs(1, "cuda"))
    assert report.outputs and not report.unchanged


def test_a_repeated_launch_may_be_captured() -> None:
    """Launches that are remembered from eager calls at the same addresses."""
    case = graph_cases.CASES["masked"]
    verify_capture_safe(case.call, case.inputs(0, "cuda"), case.inputs(1, "cuda"), warmup_runs=4)


def test_scales_that_are_converted_stay_in_the_pool() -> None:
    def inputs(seed: int) -> dict[str, Tensor]:
        case = cases.dense_case(33, 192, 256, "cuda", seed)
        return {"a": case.a, "scale": case.a_scale.contiguous(), "b": case.b, "b_scale": case.b_scale}

    def call(given: Mapping[str, Tensor]) -> Tensor:
        return moe_fp8.gemm_fp8(given["a"], given["scale"], given["b"], given["b_scale"])

    assert verify_capture_safe(call, inputs(0), inputs(1)).pool_bytes > 0


def _given(seed: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(4, 6, generator=gen).cuda(),
        "n": torch.tensor([2 + seed], device="cuda"),
        "host": torch.tensor([2 + seed]),
    }


_KEPT: list[Tensor] = []


def _host_read(given: Mapping[str, Tensor]) -> Tensor:
    return given["x"] * given["n"].item()


def _boolean_index(given: Mapping[str, Tensor]) -> Tensor:
    return given["x"][given["x"] > 0].sum()


def _wait(given: Mapping[str, Tensor]) -> Tensor:
    doubled = given["x"] * 2
    torch.cuda.synchronize()
    return doubled


def _host_value(given: Mapping[str, Tensor]) -> Tensor:
    return given["x"] * 0 + given["host"].item()


def _unwritten(given: Mapping[str, Tensor]) -> Tensor:
    out = torch.empty_like(given["x"])
    out[:3] = given["x"][:3]
    return out


def _scratch(given: Mapping[str, Tensor]) -> Tensor:
    return given["x"] + torch.empty_like(given["x"]).mul_(2)


def _memory_of_its_own(given: Mapping[str, Tensor]) -> Tensor:
    if not _KEPT:
        _KEPT.append(torch.empty_like(given["x"]))
    return torch.mul(given["x"], 2, out=_KEPT[0])


def _not_captured(given: Mapping[str, Tensor]) -> Tensor:
    # (torch hands out 32 streams in turn, so a new one may be the one that captures.)
    capturing = torch.cuda.current_stream()
    other = next(stream for stream in iter(torch.cuda.Stream, None) if stream != capturing)
    with torch.cuda.stream(other):
        return given["x"] * 2


@pytest.mark.parametrize(
    "unsafe, what, message",
    [
        (_host_read, "capture", r"`return given\[\"x\"\] \* given\[\"n\"\].item\(\)`"),
        (_boolean_index, "capture", "test_graph.py"),
        (_wait, "capture", "`torch.cuda.synchronize"),
        (_host_value, "output", "which is the result of the first inputs"),
        (_unwritten, "output", r"\[3, 0\]"),
        (_scratch, "output", "write scratch before reading it"),
        (_memory_of_its_own, "output", "memory of the graph's pool"),
        (_not_captured, None, None),
    ],
)
def test_what_is_unsafe_is_found(
    unsafe: Callable[[Any], Tensor], what: str | None, message: str | None
) -> None:
    _KEPT.clear()
    stream = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match=message) as caught:
        verify_capture_safe(unsafe, _given(0), _given(1))
    assert what in (None, caught.value.what)
    # The failed capture leaves nothing behind.
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    report = verify_capture_safe(lambda given: given["x"] * given["n"], _given(0), _given(1))
    assert report.outputs == ("output",) and report.pool_bytes > 0


def test_garbage_does_not_end_a_capture() -> None:
    old = GraphRunner(
        lambda given: {"out": given["x"] * 2},
        {"x": BufferSpec((3,), torch.float32)},
        BatchBuckets([2]),
        "cuda",
    )
    old.capture()
    kept = [old]
    del old

    def call(given: Mapping[str, Tensor]) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            cycle: list[object] = [kept.pop()]
            cycle.append(cycle)
            del cycle
            # So many new objects start the collector, which would free the old graph.
            assert len([[] for _ in range(5000)]) == 5000
        return given["x"] * given["n"]

    verify_capture_safe(call, _given(0), _given(1))
    assert not kept and gc.isenabled()


def test_a_graph_has_the_casts_of_autocast() -> None:
    layer = torch.nn.Linear(256, 256, device="cuda")
    given = {"x": BufferSpec((256,), torch.float32)}
    runner = GraphRunner(lambda tensors: {"y": layer(tensors["x"])}, given, BatchBuckets([2, 4]), "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        runner.capture()
    torch.cuda.empty_cache()
    x = torch.randn(4, 256, device="cuda")
    for scale in (1.0, -2.0):
        with torch.no_grad():
            layer.weight.mul_(scale)
        for rows in (2, 4):
            with torch.autocast("cuda", torch.bfloat16):
                expected = layer(x[:rows])
            assert torch.equal(runner.run({"x": x[:rows]})["y"], expected)


def test_a_step_may_write_to_its_inputs_and_to_their_names() -> None:
    def step(given: Any) -> dict[str, Tensor]:
        given["x"].add_(1)
        given["x"] = given["x"].float() * 2
        return {"out": given["x"]}

    runner = GraphRunner(step, {"x": BufferSpec((3,), torch.int32)}, BatchBuckets([2]), "cuda")
    runner.capture()
    for value in (3, 5):
        x = torch.full((2, 3), value, dtype=torch.int32, device="cuda")
        assert (runner.run({"x": x})["out"] == 2 * (value + 1)).all()


def test_a_runner_names_the_line_that_cannot_be_captured() -> None:
    runner = GraphRunner(
        lambda given: {"out": given["x"] * float(given["x"].sum())},
        {"x": BufferSpec((3,), torch.float32)},
        BatchBuckets([2]),
        "cuda",
    )
    with pytest.raises(CaptureError, match=r"test_graph\.py") as caught:
        runner.capture()
    assert caught.value.function == "GraphRunner.capture"
    runner.step = lambda given: {"out": given["x"] * 2}
    runner.capture()
    assert runner.run({"x": torch.ones(1, 3)})["out"].tolist() == [[2.0, 2.0, 2.0]]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_run_does_not_wait_and_host_inputs_may_be_reused(pinned: bool) -> None:
    specs = {"x": BufferSpec((1024,), torch.int64), "n": BufferSpec((), torch.int32)}
    runner = GraphRunner(
        lambda given: {"out": given["x"] * given["n"][:, None]}, specs, BatchBuckets([4]), "cuda"
    )
    runner.capture()
    given = {"x": torch.empty(3, 1024, dtype=torch.int64), "n": torch.empty(3, dtype=torch.int32)}
    if pinned:
        given = {name: tensor.pin_memory() for name, tensor in given.items()}
    seen: list[Tensor] = []
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    slept = torch.cuda.Event()
    slept.record()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 5):
            given["x"].fill_(number)
            given["n"].fill_(10)
            seen.append(runner.run(given)["out"].clone())
        given["x"].fill_(-1)
        given["n"].fill_(-1)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert not slept.query(), "run waited for the device"
    for number, out in enumerate(seen, 1):
        assert torch.equal(out, torch.full_like(out, 10 * number))


NEXT_N, TOPK = 2, 40


def _selecting(seed: int, pool: object) -> tuple[GraphRunner, cases.PagedCase]:
    """A runner of a selection with two tokens of a request, and requests for it."""
    case = cases.paged_case([70, 3, 200, 130], NEXT_N, 16, 64, "cuda", seed, max_pages=4)
    block_table = case.block_table.where(case.block_table < case.kv_cache.shape[0], 0)

    def step(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        chosen = paged_indexer_select(
            given["q"].view(-1, NEXT_N, 16, 128).to(torch.float8_e4m3fn),
            case.kv_cache,
            given["weights"],
            given["context_lens"],
            given["block_table"],
            topk=TOPK,
            max_context_len=256,
        )
        return {"chosen": chosen, "lens": given["context_lens"] + 0}

    specs = {
        "q": BufferSpec((16, 128), torch.float32, rows=NEXT_N),
        "weights": BufferSpec((16,), torch.float32, rows=NEXT_N),
        "context_lens": BufferSpec((), torch.int32),
        "block_table": BufferSpec((4,), torch.int32),
    }
    runner = GraphRunner(step, specs, BatchBuckets([1, 2, 4]), "cuda", pool=pool)
    runner.capture()
    return runner, cases.PagedCase(case.q, case.kv_cache, case.weights, case.context_lens, block_table)


def _select(runner: GraphRunner, case: cases.PagedCase, requests: int) -> dict[str, Tensor]:
    return runner.run(
        {
            "q": case.q[:requests].float().reshape(-1, 16, 128),
            "weights": case.weights[: requests * NEXT_N],
            "context_lens": case.context_lens[:requests],
            "block_table": case.block_table[:requests],
        }
    )


def test_runners_share_a_pool_and_a_request_has_two_tokens() -> None:
    pool = torch.cuda.graph_pool_handle()
    runners = [_selecting(seed, pool) for seed in range(2)]
    for requests in (1, 3, 4, 2):
        outputs = [_select(runner, case, requests) for runner, case in runners]
        # The second run has not changed the outputs of the first.
        for (_, case), out in zip(runners, outputs, strict=True):
            expected = paged_indexer_select(
                case.q[:requests],
                case.kv_cache,
                case.weights[: requests * NEXT_N],
                case.context_lens[:requests],
                case.block_table[:requests],
                topk=TOPK,
                max_context_len=256,
            )
            assert out["chosen"].shape == (requests * NEXT_N, TOPK)
            assert torch.equal(out["chosen"], expected)
            assert torch.equal(out["lens"], case.context_lens[:requests])
    memories = [runner.memory() for runner, _ in runners]
    assert memories[0].pool == memories[1].pool > 0
    for memory in memories:
        assert memory.buffers == 4 * (NEXT_N * 16 * 129 + 1 + 4) * 4
        assert sorted(memory.buckets) == [1, 2, 4]
    # The second runner reuses the scratch of the first.
    assert sum(memories[1].buckets.values()) <= sum(memories[0].buckets.values()) <= memories[0].pool
