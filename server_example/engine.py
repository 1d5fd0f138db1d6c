"""Continuous batching over one model: prefill runs in chunks, and decode runs in replayed graphs.

While the GPU computes a step, the host tells the clients the tokens of the step before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
from tokenizers import Tokenizer

from moe_fp8.errors import ConfigError
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphRunner
from server_example.backend import Backend, freeze_kernels, load_kernels, plan_options
from server_example.cache import DUMMY_PAGE, PAGE_TOKENS, LayerCache, PagePool, pages_for
from server_example.metrics import Metrics
from server_example.model.batch import PrefillBatch
from server_example.model.config import ModelConfig
from server_example.model.transformer import Transformer
from server_example.model.weights import LoadFormat, load_weights
from server_example.sampling import log_probabilities
from server_example.scheduler import FinishReason, Request, Scheduler, TokenEvent, TokenLogprob
from server_example.text import TextStream, TokenTexts

logger = logging.getLogger(__name__)

_Work = TypeVar("_Work")

_ENDINGS: dict[FinishReason, str] = {
    "cancelled": "the client closed the connection",
    "timeout": "the request did not finish in its time",
    "shutdown": "the server is shutting down",
}


@dataclass(frozen=True)
class EngineOptions:
    """`max_context` is capped by the model's limit; `cache_pages` includes the dummy page.

    `load_format` dummy gives random weights, and `num_hidden_layers` replaces the checkpoint's number: with
    both, a few layers of full size fit on a GPU for timing. `decode` eager launches each op instead of
    replaying graphs, to compare.
    """

    max_batch: int = 8
    max_context: int = 1024
    cache_pages: int = 129
    prefill_chunk: int = 256
    max_waiting: int = 64
    load_format: LoadFormat = "safetensors"
    num_hidden_layers: int | None = None
    decode: Literal["graph", "eager"] = "graph"

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_context", 2), ("prefill_chunk", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ConfigError(name, f"an integer >= {least}", getattr(self, name))
        if self.cache_pages < 2:
            raise ConfigError(
                "cache_pages", "at least 2: one for requests, one for padding", self.cache_pages
            )


@dataclass(frozen=True)
class _Choice:
    """A token that was chosen for a request, its number from 1, and the request's end if that is known.

    `logits` are there if the request reads them.
    """

    request: Request
    token: int
    logits: torch.Tensor | None
    number: int
    end: FinishReason | None


class EngineStoppedError(Exception):
    """The engine's thread has ended."""


class Engine:
    """The owner of the model, the cache and one thread that does all device work."""

    def __init__(self, folder: Path, backend: Backend, options: EngineOptions) -> None:
        """Loads the model; on CUDA the backend's kernels must be loaded already."""
        self.options = options
        self.backend = backend
        self.name = folder.resolve().name.lstrip(".") or "model"
        layers = options.num_hidden_layers
        self.config = ModelConfig.load(folder, **({} if layers is None else {"num_hidden_layers": layers}))
        self.created = int(time.time())
        self.tokenizer = load_tokenizer(folder, self.config.vocab_size)
        self.token_texts = TokenTexts(self.tokenizer)
        max_context = min(options.max_context, self.config.max_position_embeddings)
        self.model = Transformer(
            self.config,
            load_weights(folder, self.config, backend.device, load_format=options.load_format),
            max_positions=max_context,
            num_workers=backend.num_sms,
        )
        self.caches = [
            LayerCache.allocate(self.config, options.cache_pages, backend.device)
            for _ in range(self.config.num_hidden_layers)
        ]
        self.table_width = pages_for(max_context)
        self.runner = GraphRunner(
            lambda inputs: self.model.decode(inputs, self.caches),
            {
                "tokens": BufferSpec((), torch.int64),
                "context_lens": BufferSpec((), torch.int32),
                "block_table": BufferSpec((self.table_width,), torch.int32, pad=DUMMY_PAGE),
            },
            BatchBuckets.up_to(options.max_batch),
            backend.device,
        )
        self._step = self.runner.run if options.decode == "graph" else self._eager_step
        self.scheduler = Scheduler(
            PagePool(options.cache_pages),
            max_batch=options.max_batch,
            max_waiting=options.max_waiting,
            max_context=max_context,
        )
        scheduler = self.scheduler
        self.metrics = Metrics(
            {
                "server_requests_waiting": ("Requests in the queue", lambda: len(scheduler.waiting)),
                "server_requests_running": ("Requests in the batch", lambda: len(scheduler.running)),
                "server_pages_free": ("Cache pages that no request holds", lambda: scheduler.pool.free),
                "server_cache_use": ("Share of the cache's pages that requests hold", scheduler.pool.use),
                "server_graph_replays": ("Decode graphs replayed", lambda: self.runner.replays),
            }
        )
        self.failure: str | None = None
        #: Called by the engine's thread after the events of a step, and after the last events.
        self.flush: Callable[[], None] = lambda: None
        #: The requests that have not ended, and the text of each; an end is told last.
        self._open: dict[Request, TextStream] = {}
        self._untold: list[_Choice] = []
        # On a CPU a step returns when it is done, so there is nothing to do meanwhile.
        self._tells_late = backend.device.type == "cuda"
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # The server's threads call the following methods.

    def warm_up(self) -> None:
        """Runs a prefill and every decode bucket once; captures graphs on CUDA. Call it before `start`."""
        page = [DUMMY_PAGE] * self.table_width
        self.model.prefill(PrefillBatch.of([0, 0], 0, page, self.backend.device), self.caches)
        if self.options.decode == "graph":
            self.runner.capture()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step; unfinished requests get an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def submit(self, *requests: Request) -> None:
        """Queues all requests or none; their events come through `request.emit`.

        Raises `RequestTooLongError`, `QueueFullError` or `EngineStoppedError`.
        """
        with self._wake:
            if not self.alive or self._stopping:
                raise EngineStoppedError(self.failure or "the engine is stopped")
            self.scheduler.submit(*requests)
            for request in requests:
                self._open[request] = TextStream(self.tokenizer, request.params.stop)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Frees the request's pages at the next step. Has no effect after the request has finished."""
        with self._wake:
            request.cancelled = True
            self._wake.notify()

    # The engine's thread runs the following methods.

    def _loop(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping or self._open)
                    if self._stopping:
                        break
                    for request, reason in self.scheduler.drop_ended():
                        self._finish(request, "", reason, _ENDINGS[reason])
                    self.metrics.preemptions.inc(len(self.scheduler.grow()))
                    self.scheduler.admit()
                    prefill, decoding = self.scheduler.next_prefill(), self.scheduler.decoding()
                if prefill is not None:
                    self._timed("prefill", self._prefill, prefill)
                if decoding:
                    self._timed("decode", self._decode, decoding)
                if prefill is None and not decoding:
                    self._tell()
            self._tell()
        except Exception as error:
            logger.exception("the engine failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            last: FinishReason = "error" if self.failure else "shutdown"
            with self._wake:
                for request in list(self._open):
                    self._finish(request, "", last, self.failure or _ENDINGS[last])
            self.flush()

    def _timed(self, phase: str, work: Callable[[_Work], None], on: _Work) -> None:
        start = time.perf_counter()
        work(on)
        self.metrics.step_seconds.labels(phase).observe(time.perf_counter() - start)

    def _prefill(self, request: Request) -> None:
        """Prefills one chunk, so that a long prompt does not delay the decoding requests."""
        chunk = request.before_decode[request.context : request.context + self.options.prefill_chunk]
        batch = PrefillBatch.of(chunk, request.context, request.pages, self.backend.device)
        logits = self.model.prefill(batch, self.caches)
        request.context += len(chunk)
        self.metrics.prompt_tokens.inc(len(chunk))
        self._tell()
        if not request.prefilling and not request.generated:
            self._choose([request], {"logits": logits[None], "tokens": logits.argmax(-1, keepdim=True)})

    def _decode(self, requests: list[Request]) -> None:
        # The text of a request may have ended while the prefill ran.
        requests = [request for request in requests if request in self._open]
        if not requests:
            return
        self.metrics.batch_size.observe(len(requests))
        outputs = self._step(self._decode_inputs(requests))
        self._tell()
        for request in requests:
            request.context += 1
        self._choose(requests, outputs)

    def _eager_step(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        on_device = {name: tensor.to(self.backend.device) for name, tensor in inputs.items()}
        return self.model.decode(on_device, self.caches)

    def _decode_inputs(self, requests: list[Request]) -> Mapping[str, torch.Tensor]:
        width = self.table_width
        table = [request.pages + [DUMMY_PAGE] * (width - len(request.pages)) for request in requests]
        return {
            "tokens": torch.tensor([request.generated[-1] for request in requests], dtype=torch.int64),
            "context_lens": torch.tensor([request.context + 1 for request in requests], dtype=torch.int32),
            "block_table": torch.tensor(table, dtype=torch.int32),
        }

    def _choose(self, requests: list[Request], outputs: Mapping[str, torch.Tensor]) -> None:
        """Chooses each request's next token; a request whose last token it is leaves the batch.

        The host reads the logits of those requests alone that need them: with a large vocabulary, all logits
        take longer to copy than the step takes.
        """
        reading = [row for row, request in enumerate(requests) if request.params.reads_logits]
        logits = dict(zip(reading, outputs["logits"][reading].cpu(), strict=True)) if reading else {}
        for at, (request, token) in enumerate(zip(requests, outputs["tokens"].tolist(), strict=True)):
            row = logits.get(at)
            if row is not None and request.params.temperature > 0:
                token = request.sampler(row)
            request.generated.append(token)
            number = len(request.generated)
            end: FinishReason | None = None
            if self._is_end(request, token):
                end = "stop"
            elif number >= request.params.max_tokens:
                end = "length"
            if end is not None:
                with self._wake:
                    self.scheduler.release(request)
            self._untold.append(_Choice(request, token, row, number, end))
        if not self._tells_late:
            self._tell()

    def _is_end(self, request: Request, token: int) -> bool:
        return token == self.config.eos_token_id and not request.params.ignore_eos

    def _tell(self) -> None:
        """Emits the text of the tokens that were chosen, and ends requests.

        A stop string shows only in the text. The request may then be in a step that runs, whose token for it
        is dropped.
        """
        untold, self._untold = self._untold, []
        for choice in untold:
            request = choice.request
            text = self._open.get(request)
            if text is None:
                continue
            self.metrics.token(request)
            piece, logprob = "", None
            if not self._is_end(request, choice.token):
                piece, logprob = text.push(choice.token), self._logprob(request, choice.logits, choice.token)
            reason: FinishReason | None = "stop" if text.stopped else choice.end
            if reason is None:
                request.emit(TokenEvent(piece, choice.number, logprob=logprob))
                continue
            piece += text.finish()
            with self._wake:
                self._finish(request, piece, reason, logprob=logprob, tokens=choice.number)
        self.flush()

    def _logprob(self, request: Request, logits: torch.Tensor | None, token: int) -> TokenLogprob | None:
        if request.params.logprobs is None or logits is None:
            return None
        chosen, *top = log_probabilities(logits, token, request.params.logprobs)
        return TokenLogprob(
            self.token_texts[token],
            chosen[1],
            tuple((self.token_texts[other], value) for other, value in top),
        )

    def _finish(
        self,
        request: Request,
        text: str,
        reason: FinishReason,
        error: str | None = None,
        logprob: TokenLogprob | None = None,
        tokens: int | None = None,
    ) -> None:
        self.scheduler.release(request)
        del self._open[request]
        self.metrics.requests.labels(reason).inc()
        told = len(request.generated) if tokens is None else tokens
        request.emit(TokenEvent(text, told, reason, error, logprob))


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a model. Raises `ConfigError`."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("tokenizer.json", "a file in the model folder", None, "the checkpoint lacks it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower exception.
        raise ConfigError("tokenizer.json", "a tokenizer of the tokenizers library", str(error)) from error
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError("tokenizer.json", f"at most {vocab_size} tokens", tokenizer.get_vocab_size())
    return tokenizer


def prepare_engine(folder: Path, backend: Backend, options: EngineOptions) -> Engine:
    """An engine that is ready to start; on CUDA kernels are loaded and frozen, and graphs are captured."""
    start = time.perf_counter()
    if backend.name == "cuda":
        kernels = plan_options(options.prefill_chunk, options.max_batch, backend.num_sms, PAGE_TOKENS)
        load_kernels(folder, kernels)
        # Freeze before the capture: a kernel that the plan lacks should end the start, not a request.
        freeze_kernels()
    engine = Engine(folder, backend, options)
    engine.warm_up()
    captured = f", graphs for batches of {list(engine.runner.captured)}" if engine.runner.captured else ""
    logger.info("ready after %.1f s%s", time.perf_counter() - start, captured)
    return engine
