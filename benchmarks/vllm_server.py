"""One vLLM engine on random weights in this process, which works only when `benchmarks.engine` asks it to.

It reads requests from standard input and writes answers to a pipe, one JSON object a line. So several engines
can live at the same time and take turns. vLLM 0.24 or newer must be importable. The weights are the same in
every process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .engine_models import MODELS, VOCABULARY, ServedModel

#: Bytes of the caches: enough for 256 requests of every model, and several engines fit on one GPU.
_CACHE_BYTES = 4 << 30


def _fill(model: Any) -> None:
    """Random weights with which activations keep a size near 1; each parameter has a seed of its own."""
    import torch

    for number, (name, parameter) in enumerate(model.named_parameters()):
        data = parameter.data
        if not data.is_floating_point():
            continue
        draw = torch.Generator(device=data.device).manual_seed(7000 + number)
        kind = name.rsplit(".", 1)[-1]
        if data.dtype is torch.float8_e4m3fn:
            for part in data if data.dim() == 3 else [data]:
                values = torch.randn(part.shape, generator=draw, device=data.device)
                part.copy_((64 * values).clamp_(-448, 448).to(data.dtype))
        elif "scale" in kind:
            if data.dim() < 2:
                data.fill_(1)
            else:
                sizes = torch.rand(data.shape, generator=draw, device=data.device) + 0.5
                data.copy_(sizes / (64 * math.sqrt(128 * data.shape[-1])))
        elif "norm" in name or kind == "bias" or data.dim() < 2:
            data.fill_(0 if "bias" in kind else 1)
        else:
            values = torch.randn(data.shape, generator=draw, device=data.device)
            width = 1.0 if "embed" in name else math.sqrt(data.shape[-1]) / (4 if "lm_head" in name else 1)
            data.copy_(values / width)


class Server:
    """An engine, and the requests that it may be asked to run. Methods without underscore are requests."""

    def __init__(self, served: ServedModel, folder: Path, batches: list[int]) -> None:
        import torch
        import vllm
        from vllm.model_executor.model_loader import dummy_loader

        dummy_loader.DummyModelLoader.load_weights = lambda self, model, model_config: _fill(model)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(served.config))
        longest = 8192 if served.prompt > 1000 else 4096
        options: dict[str, Any] = {}
        if served.attention:
            options["attention_config"] = {"backend": served.attention}
        if served.drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": served.drafts}
        compilation: dict[str, Any] = {
            "mode": served.mode,
            "cudagraph_capture_sizes": [batch * (1 + served.drafts) for batch in batches],
        }
        if served.backend:
            compilation["backend"] = served.backend
        if not served.mode:
            compilation["cudagraph_mode"] = "FULL_DECODE_ONLY"
        self.engine = vllm.LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=longest, max_num_seqs=max(batches),
            max_num_batched_tokens=8192, gpu_memory_utilization=0.1, kv_cache_memory_bytes=_CACHE_BYTES,
            enable_prefix_caching=False, disable_log_stats=True, async_scheduling=False,
            compilation_config=compilation, **options,
        ).llm_engine  # fmt: skip
        draw = torch.Generator().manual_seed(11)
        self._prompts = torch.randint(2, VOCABULARY, (max(batches), served.prompt), generator=draw).tolist()
        self._long = torch.randint(2, VOCABULARY, (longest,), generator=draw).tolist()
        self._running: Iterator[list[Any]] | None = None
        self._number = 0

    def tokens(self, batch: int, steps: int) -> dict[str, Any]:
        """Tokens of the first `batch` prompts and their log-probabilities."""
        done: dict[int, Any] = {}
        for outputs in self._steps(batch, steps, True):
            done |= {int(out.request_id.split("-")[1]): out.outputs[0] for out in outputs if out.finished}
        chosen = [done[i] for i in range(batch)]
        logprobs = [
            [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            for one in chosen
        ]
        return {"tokens": [list(one.token_ids) for one in chosen], "logprobs": logprobs}

    def begin(self, batch: int, tokens: int) -> None:
        """Read the first `batch` prompts. Each may then decode `tokens` tokens in turns."""
        self._running = self._steps(batch, tokens, False)
        started: set[str] = set()
        while len(started) < batch:
            started |= {output.request_id for output in next(self._running)}

    def decode(self, steps: int) -> dict[str, float]:
        """Microseconds of a decode step: the median of `steps`."""
        walls = []
        last = time.perf_counter()
        for _ in range(steps):
            self._step()
            now = time.perf_counter()
            walls.append(now - last)
            last = now
        return {"wall_us": statistics.median(walls) * 1e6}

    def profile(self, steps: int) -> dict[str, Any]:
        """Microseconds of a decode step in which the GPU runs any kernel, and those of the kernels."""
        return _profile([self._step] * steps)

    def end(self) -> None:
        """Drop the requests of `begin`."""
        self._running = None
        self.engine.abort_request([f"{self._number}-{i}" for i in range(len(self._prompts))])
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def prefill(self, lengths: list[int]) -> dict[str, float]:
        """Microseconds from a prompt to its first token: the median of prompts that come one by one."""
        walls = []
        for length in lengths:
            start = time.perf_counter()
            self._prefill(length)
            walls.append(time.perf_counter() - start)
        return {"wall_us": statistics.median(walls) * 1e6}

    def profile_prefill(self, lengths: list[int]) -> dict[str, Any]:
        """As `profile`, of the steps that read these prompts."""
        return _profile([partial(self._prefill, length) for length in lengths])

    def counters(self) -> dict[str, int] | None:
        """What the package has compiled, loaded and missed, if it is in use."""
        if "moe_fp8" not in sys.modules:
            return None
        counted = sys.modules["moe_fp8"].jit.counters()
        names = ("compiles", "store_hits", "loads", "misses", "scale_conversions")
        return {name: getattr(counted, name) for name in names}

    def _step(self) -> list[Any]:
        if self._running is None:
            raise RuntimeError("no batch was begun")
        return next(self._running)

    def _prefill(self, length: int) -> None:
        for _ in self._requests([self._long[:length]], 1, False):
            pass

    def _steps(self, batch: int, tokens: int, logprobs: bool) -> Iterator[list[Any]]:
        """Run the first prompts together; yields the outputs of each step."""
        return self._requests(self._prompts[:batch], tokens, logprobs)

    def _requests(self, prompts: list[list[int]], tokens: int, logprobs: bool) -> Iterator[list[Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False,
            logprobs=0 if logprobs else None,
        )  # fmt: skip
        self._number += 1
        for i, prompt in enumerate(prompts):
            self.engine.add_request(f"{self._number}-{i}", {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            yield self.engine.step()


def _profile(steps: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Microseconds of a step in which the GPU runs any kernel, and those of the kernels."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            step()
        torch.cuda.synchronize()
    busy, kernels = _busy(profiler, len(steps))
    return {"gpu_us": busy, "kernels_us": dict(sorted(kernels.items(), key=lambda item: -item[1])[:14])}


def _busy(profiler: Any, steps: int) -> tuple[float, dict[str, float]]:
    """Microseconds of a step in which at least one kernel runs, and the kernels' own times, which overlap."""
    from torch._C._autograd import DeviceType

    spans = []
    kernels: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            name = event.name[:80]
            kernels[name] = kernels.get(name, 0.0) + (event.time_range.end - event.time_range.start) / steps
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / steps, kernels


def main() -> None:
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where config.json is written")
    parser.add_argument("--batches", required=True)
    parser.add_argument("--answers", type=int, required=True, help="the pipe's descriptor")
    options = parser.parse_args()
    answers = os.fdopen(options.answers, "w", buffering=1)
    server = Server(
        MODELS[options.model], options.folder, [int(batch) for batch in options.batches.split(",")]
    )
    up = time.time()
    server.tokens(1, 1)
    seconds = {"imports": started - float(os.environ.get("STARTED", started)), "engine": up - started}
    answers.write(json.dumps(seconds | {"first token": time.time() - up}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("request")
        if name.startswith("_"):
            raise ValueError(f"no request: {name}")
        answers.write(json.dumps(getattr(server, name)(**request)) + "\n")
    os._exit(0)  # vLLM's own end of a process takes seconds


if __name__ == "__main__":
    main()
