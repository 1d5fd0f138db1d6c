"""Continuous batching over one model: prefill runs in chunks, and decode runs in replayed graphs.

The host is one step behind the GPU. It starts a step before it has read the tokens of the step before, which
the GPU finds in its own memory. While the GPU computes, the host reads those tokens, tells them, and
schedules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_fp8 import jit
from moe_fp8.graph import BatchBuckets, BufferSpec, GraphRunner
from server_example.backend import Backend, load_kernels, plan_kernels
from server_example.cache import BlockTable, LayerCache
from server_example.messages import ENDINGS, Ending, EngineUnavailableError, TokenEvent, TokenLogprob
from server_example.metrics import Metrics
from server_example.model.batch import PrefillBatch, Run
from server_example.model.config import ModelConfig
from server_example.model.transformer import Transformer
from server_example.model.weights import load_weights
from server_example.options import EngineOptions
from server_example.pages import DUMMY_PAGE, PagePool, pages_for
from server_example.sampling import likeliest, log_probabilities
from server_example.scheduler import Request, Scheduler
from server_example.text import TextStream, TokenTexts, load_tokenizer

logger = logging.getLogger(__name__)

#: What is said of a request whose logits have no likeliest token.
UNCHOSEN = "no token can be chosen: the largest logit is not finite"


@dataclass(frozen=True)
class _Flight:
    """Tokens on their way to the host, [B] for B requests. `outputs` are valid until the next step."""

    requests: list[Request]
    outputs: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    arrived: torch.cuda.Event | None


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
        self._block_table = BlockTable(options.max_batch, self.table_width)
        #: The last token of each seat; the last entry is for padding.
        self._last_tokens = torch.zeros(options.max_batch + 1, dtype=torch.int64, device=backend.device)
        self.runner = GraphRunner(
            self.decode_step,
            {
                "seats": BufferSpec((), torch.int64, pad=options.max_batch),
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
        self._flights: deque[_Flight] = deque()
        # On a CPU a step returns when it is done, so there is nothing to do meanwhile.
        self._ahead = 1 if backend.device.type == "cuda" else 0
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # The server's threads call the following methods.

    def warm_up(self) -> None:
        """Runs a short and the largest prefill, and every decode bucket; captures graphs on CUDA.

        A prefill needs most memory with a whole chunk at the end of the longest context: if the device has
        too little, it shows here and not at a request. Call this before `start`.
        """
        longest = self.scheduler.max_context
        pages = [DUMMY_PAGE] * self.table_width
        for count in (2, min(self.options.prefill_chunk, longest)):
            run = Run([0] * count, longest - count, pages)
            self.model.prefill(PrefillBatch.of([run], self.backend.device), self.caches)
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

        Raises `RequestTooLongError`, `QueueFullError` or `EngineUnavailableError`.
        """
        with self._wake:
            if not self.alive or self._stopping:
                raise EngineUnavailableError(self.failure or "the engine is stopped")
            self.scheduler.submit(*requests)
            for request in requests:
                self._open[request] = TextStream(self.token_texts, request.params.stop)
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
                begun = time.perf_counter()
                if self.scheduler.may_preempt():
                    self._land()  # A request that waits again must have all its tokens.
                with self._wake:
                    for request, reason in self.scheduler.drop_ended():
                        self._finish(request, "", reason, ENDINGS[reason])
                    self.metrics.preemptions.inc(len(self.scheduler.grow()))
                    self.scheduler.admit()
                    prefill = self.scheduler.next_prefill(self.options.prefill_chunk)
                    decoding = self.scheduler.decoding()
                if prefill:
                    self._prefill(prefill)
                if decoding:
                    self._decode(decoding)
                if prefill or decoding:
                    phase = "prefill" if prefill else "decode"
                    self.metrics.step_seconds.labels(phase).observe(time.perf_counter() - begun)
                else:
                    self._land()
            self._land()
        except Exception as error:
            logger.exception("the engine failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            last: Ending = "error" if self.failure else "shutdown"
            with self._wake:
                for request in list(self._open):
                    self._finish(request, "", last, self.failure or ENDINGS[last])
            self.flush()

    def _prefill(self, chosen: list[tuple[Request, int]]) -> None:
        """Prefills the next tokens of each request, and tells the first token of those that are complete."""
        runs = [
            Run(
                request.before_decode[request.context : request.context + count],
                request.context,
                request.pages,
            )
            for request, count in chosen
        ]
        logits = self.model.prefill(PrefillBatch.of(runs, self.backend.device), self.caches)
        complete = []
        for row, (request, count) in enumerate(chosen):
            request.context += count
            if request.prefilling:
                continue
            if request.generated:  # It was preempted.
                self._last_tokens[request.seat] = request.generated[-1]
            else:
                self.metrics.prompt_tokens.inc(len(request.prompt))
                complete.append(row)
        if not complete:
            self._land()
            return
        requests, logits = [chosen[row][0] for row in complete], logits[complete]
        tokens = likeliest(logits)
        self._last_tokens[[request.seat for request in requests]] = tokens
        self._fly(requests, {"logits": logits, "tokens": tokens})

    def _decode(self, requests: list[Request]) -> None:
        # The text of a request may have ended while the prefill ran.
        requests = [request for request in requests if request in self._open]
        if not requests:
            return
        self.metrics.batch_size.observe(len(requests))
        outputs = self._step(self._decode_inputs(requests))
        for request in requests:
            request.context += 1
        self._fly(requests, outputs)

    @torch.inference_mode()
    def decode_step(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Transformer.decode`, for requests by their seats. Safe to capture."""
        seats = inputs["seats"]
        outputs = self.model.decode({**inputs, "tokens": self._last_tokens[seats]}, self.caches)
        self._last_tokens[seats] = outputs["tokens"]
        return outputs

    def _eager_step(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        on_device = {name: tensor.to(self.backend.device) for name, tensor in inputs.items()}
        return self.decode_step(on_device)

    def _decode_inputs(self, requests: list[Request]) -> Mapping[str, torch.Tensor]:
        seats = [request.seat for request in requests if request.seat is not None]
        return {
            "seats": torch.tensor(seats, dtype=torch.int64),
            "context_lens": torch.tensor([request.context + 1 for request in requests], dtype=torch.int32),
            "block_table": self._block_table.rows(seats, [request.pages for request in requests]),
        }

    def _fly(self, requests: list[Request], outputs: Mapping[str, torch.Tensor]) -> None:
        """Sends the tokens of a step on their way, and reads those of the steps before."""
        for request in requests:
            request.flying += 1
        tokens, arrived = outputs["tokens"], None
        if tokens.is_cuda:
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens, arrived = host.copy_(tokens, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._flights.append(_Flight(requests, outputs, tokens, arrived))
        # The next step needs what the host chooses from logits.
        chooses = any(request.params.reads_logits for request in requests)
        self._land(ahead=0 if chooses else self._ahead)

    def _land(self, ahead: int = 0) -> None:
        """Reads and tells all tokens but those of the last `ahead` steps."""
        while len(self._flights) > ahead:
            self._read(self._flights.popleft())
        self.flush()

    def _read(self, flight: _Flight) -> None:
        """Appends each request's next token, and tells it.

        The host reads the logits of those requests alone that need them: with a large vocabulary, all logits
        take longer to copy than the step takes.
        """
        if flight.arrived is not None:
            flight.arrived.synchronize()
        requests = flight.requests
        reading = [row for row, request in enumerate(requests) if request.params.reads_logits]
        logits = dict(zip(reading, flight.outputs["logits"][reading].cpu(), strict=True)) if reading else {}
        told: list[Request] = []
        for at, (request, token) in enumerate(zip(requests, flight.tokens.tolist(), strict=True)):
            request.flying -= 1
            if request not in self._open:
                continue  # Its end was read after this step had begun.
            if token < 0:  # The other requests go on.
                with self._wake:
                    self._finish(request, "", "error", UNCHOSEN)
                continue
            row = logits.get(at)
            if row is not None and request.params.temperature > 0:
                token = request.sampler(row)
                self._last_tokens[request.seat] = token
            request.generated.append(token)
            told.append(request)
            self._tell(request, token, row)
        self.metrics.tokens(told)

    def _tell(self, request: Request, token: int, logits: torch.Tensor | None) -> None:
        """Emits the text of a token, and ends the request if the token is its last.

        The request may be in a step that runs, whose token for it is then dropped.
        """
        text, number = self._open[request], len(request.generated)
        is_end = token == self.config.eos_token_id and not request.params.ignore_eos
        piece, logprob = "", None
        if not is_end:
            logprob = self._logprob(request, logits, token, text.length)
            piece = text.push(token)
        if not is_end and not text.stopped and number < request.params.max_tokens:
            request.emit(TokenEvent(piece, number, logprob=logprob))
            return
        piece += text.finish()
        with self._wake:
            reason: Ending = "stop" if is_end or text.stopped else "length"
            self._finish(request, piece, reason, logprob=logprob)

    def _logprob(
        self, request: Request, logits: torch.Tensor | None, token: int, offset: int
    ) -> TokenLogprob | None:
        if request.params.logprobs is None or logits is None:
            return None
        chosen, *top = log_probabilities(logits, token, request.params.logprobs)
        return TokenLogprob(
            self.token_texts[token],
            chosen[1],
            tuple((self.token_texts[other], value) for other, value in top),
            offset,
        )

    def _finish(
        self,
        request: Request,
        text: str,
        reason: Ending,
        error: str | None = None,
        logprob: TokenLogprob | None = None,
    ) -> None:
        self.scheduler.release(request)
        del self._open[request]
        self.metrics.requests.labels(reason).inc()
        request.emit(TokenEvent(text, len(request.generated), reason, error, logprob))


def prepare_engine(folder: Path, backend: Backend, options: EngineOptions) -> Engine:
    """An engine that is ready to start; on CUDA kernels are loaded and frozen, and graphs are captured."""
    start = time.perf_counter()
    if backend.name == "cuda":
        load_kernels(plan_kernels(folder, options.prefill_chunk, options.max_batch, backend.num_sms))
        # Freeze before the capture: a kernel that the plan lacks should end the start, not stall a request.
        jit.freeze("strict")
    engine = Engine(folder, backend, options)
    engine.warm_up()
    captured = f", graphs for batches of {list(engine.runner.captured)}" if engine.runner.captured else ""
    logger.info("ready after %.1f s%s", time.perf_counter() - start, captured)
    return engine
