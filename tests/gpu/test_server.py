"""The engine on Hopper is frozen, decodes in replayed graphs, and gives the reference backend's tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import moe_fp8
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphRunner
from moe_fp8.ops.indexer import select
from server_example.backend import choose_backend
from server_example.engine import Engine, prepare_engine
from server_example.host import read_engine
from server_example.messages import SamplingParams, TokenEvent
from server_example.model.batch import PrefillBatch, Run
from server_example.model.moe import Moe
from server_example.model.transformer import Transformer
from server_example.options import EngineOptions
from server_example.scheduler import Request
from tests.demo_model import PROMPTS, TIE, behind, demo_folder, demo_model, load_model, model_run

__all__ = ["demo_folder", "demo_model"]

TOKENS = 64

OPTIONS = EngineOptions(max_batch=4, max_context=512, cache_pages=65, prefill_chunk=256)


@pytest.fixture(scope="module")
def engine(demo_folder: Path, fresh_module_runtime: None) -> Iterator[Engine]:
    backend = choose_backend("cuda")
    engine = prepare_engine(demo_folder, backend, OPTIONS)
    engine.start()
    yield engine
    engine.stop()


def generate(engine: Engine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of requests that run together."""
    done = threading.Semaphore(0)
    last: list[TokenEvent] = []

    def emit(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            last.append(event)
            done.release()

    params = SamplingParams(max_tokens=count, ignore_eos=True)
    requests = [Request(prompt, params, emit) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    for _ in requests:
        assert done.acquire(timeout=120)
    assert [event.finish_reason for event in last] == ["length"] * len(prompts), last
    return [request.generated for request in requests]


def encode(folder: Path, text: str) -> list[int]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_twenty_prompts_get_the_references_tokens_up_to_ties(
    engine: Engine, demo_folder: Path, demo_model: Transformer
) -> None:
    """The reference follows the engine's tokens; each must be its own choice, or nearly tie with it."""
    before, replays = moe_fp8.jit.counters(), engine.runner.replays
    assert moe_fp8.jit.is_frozen()
    assert engine.runner.captured == (1, 2, 4)
    words = (demo_folder / "heldout.txt").read_text(encoding="utf-8").split()
    prompts = [encode(demo_folder, " ".join(words[at : at + 12])) for at in range(0, 20 * 200, 200)]
    gaps = []
    for prompt, tokens in zip(prompts, generate(engine, prompts, 100), strict=True):
        run = model_run(demo_model, len(prompt) + 100)
        batch = PrefillBatch.of([Run(prompt + tokens[:-1], 0, run.pages)], demo_model.device)
        logits = demo_model.score(batch, run.caches)[len(prompt) - 1 :]
        gaps.append(behind(logits, tokens))
    short = torch.stack(gaps)
    assert short.shape == (20, 100)
    print(f"{int((short > 0).sum())} of 2000 tokens are ties, the widest of {float(short.max()):.3f}")
    assert float(short.max()) <= TIE, short.amax(1)
    assert int((short > 0).sum()) <= 60, "ties should be rare"
    assert 0 < engine.runner.replays - replays < 20 * 99, "they did not decode together"
    assert engine.scheduler.pool.free == engine.scheduler.pool.capacity
    after = moe_fp8.jit.counters()
    assert (after.misses, after.loads) == (before.misses, before.loads)


#: For each op that writes to an argument, the argument's position.
WRITTEN = {
    "indexer_quantize_and_cache": 1,
    "mqa_logits_fp8": 8,
    "paged_mqa_logits_metadata": 3,
    "paged_mqa_logits_fp8": 6,
    "indexer_topk": 5,
}

#: The module and the name of each op that a selection calls.
SELECTION = {
    "mqa_logits_fp8": (select, "mqa_logits_chunk_op"),
    "paged_mqa_logits_metadata": (select, "metadata_op"),
    "paged_mqa_logits_fp8": (select, "paged_logits_op"),
    "indexer_topk": (select, "topk_chunk_op"),
}


def _results(name: str, arguments: tuple[Any, ...], returned: Any) -> list[torch.Tensor]:
    """The results of a call, as float64 on the CPU."""
    if name in WRITTEN:
        returned = arguments[WRITTEN[name]]
    given = returned if isinstance(returned, tuple) else (returned,)
    return [item.cpu().double() for item in given]


def test_every_op_agrees_on_the_models_own_inputs(
    demo_folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test compares op by op, because a rounding that flips an FP8 value or the last selected key grows
    # from layer to layer.
    worst: dict[str, float] = {}

    def compare(module: ModuleType, attribute: str, name: str) -> None:
        op = getattr(module, attribute)

        def both(*arguments: Any, **options: Any) -> Any:
            # Copy the arguments before the call, which may write into them.
            on_cpu = tuple(item.cpu() if isinstance(item, torch.Tensor) else item for item in arguments)
            more = {
                key: item.cpu() if isinstance(item, torch.Tensor) else item for key, item in options.items()
            }
            before = _results(name, on_cpu, None) if name in WRITTEN else [None]
            returned = op(*arguments, **options)
            wanted = _results(name, on_cpu, op(*on_cpu, **more))
            for got, want, old in zip(_results(name, arguments, returned), wanted, before, strict=False):
                assert got.shape == want.shape
                defined = torch.isfinite(want)
                if old is not None:
                    # Elements that the op does not write keep the buffer's content.
                    defined &= want != old
                got, want = got[defined], want[defined]
                error = float((got - want).norm() / want.norm().clamp(min=1e-30))
                worst[name] = max(worst.get(name, 0.0), error)
            return returned

        monkeypatch.setattr(module, attribute, both)

    limits = {
        "quantize_fp8": 0.0,
        "indexer_quantize_and_cache": 0.0,
        # Hopper keeps fewer bits of a sum than fp32, and the sums of trained weights cancel.
        "gemm_fp8": 1e-2,
        # The hardware's exp moves some values by a rounding step of FP8.
        "silu_mul_quantize": 1e-2,
        "fused_moe": 2e-2,
        "route_topk": 1e-5,
        "mqa_logits_fp8": 1e-3,
        "paged_mqa_logits_metadata": 0.0,
        "paged_mqa_logits_fp8": 1e-3,
        "indexer_topk": 0.0,
    }
    for name in limits:
        compare(*SELECTION.get(name, (moe_fp8, name)), name)
    on_gpu = load_model(demo_folder, engine.backend.device, engine.backend.num_sms)
    for seed, length in enumerate((3, 40, 150)):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, 512, (length + 8,), generator=generator).tolist()
        model_run(on_gpu, length + 8).follow(tokens[:length], tokens[length:])
    assert worst.keys() == limits.keys()
    assert {name: error for name, error in worst.items() if error > limits[name]} == {}


def test_long_prompts_in_chunks_and_many_batch_sizes(engine: Engine) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(1, 512, (length,), generator=generator).tolist()
        for length in (1, 63, 200, 255, 256, 257, 401)
    ]
    misses = moe_fp8.jit.counters().misses
    generated = generate(engine, prompts, 24)
    assert [len(tokens) for tokens in generated] == [24] * len(prompts)
    assert moe_fp8.jit.counters().misses == misses


def test_the_experts_tokens_are_counted_in_graphs(engine: Engine, demo_folder: Path) -> None:
    """Padded rows do not count. The stream of figures may read while the engine's thread replays."""
    prompts = [encode(demo_folder, prompt) for prompt in PROMPTS]
    layers = sum(isinstance(layer.feed_forward, Moe) for layer in engine.model.layers)
    before, replays = read_engine(engine, None).experts, engine.runner.replays
    read: list[int] = []
    ended = threading.Event()

    def listen() -> None:
        stream = torch.cuda.Stream()
        while not ended.is_set():
            read.append(sum(read_engine(engine, stream).experts))

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        generate(engine, prompts, TOKENS)
    finally:
        ended.set()
        listener.join()
    assert engine.runner.replays > replays
    torch.cuda.synchronize()
    after = read_engine(engine, None).experts
    inputs = sum(len(prompt) + TOKENS - 1 for prompt in prompts)
    assert sum(after) - sum(before) == inputs * layers * engine.config.num_experts_per_tok
    assert all(old <= new for old, new in zip(before, after, strict=True))
    assert len(set(read)) > 2 and read == sorted(read)


def test_replay_reads_new_inputs_and_padding() -> None:
    state = torch.zeros(4, device="cuda")

    def step(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        state.add_(1)
        return {"twice": tensors["x"] * 2, "total": tensors["x"].sum().expand(tensors["x"].shape[0])}

    runner = GraphRunner(step, {"x": BufferSpec((3,), torch.float32)}, BatchBuckets([2, 4]), "cuda")
    runner.capture()
    calls = float(state[0])
    for rows in (4, 1, 3, 2, 1):
        x = torch.randn(rows, 3)
        out = runner.run({"x": x})
        torch.testing.assert_close(out["twice"].cpu(), x * 2)
        torch.testing.assert_close(out["total"].cpu(), x.sum().expand(rows))
    assert runner.replays == 5
    assert float(state[0]) == calls + 5, "a replay did not run the step once"
