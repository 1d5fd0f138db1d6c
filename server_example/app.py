"""The HTTP interface: completions (plain and streamed), models, health, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sse_starlette.sse import EventSourceResponse
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException

import moe_fp8
from server_example import scheduler
from server_example.engine import Engine, EngineStoppedError
from server_example.protocol import (
    Choice,
    CompletionRequest,
    CompletionResponse,
    Usage,
    completion_id,
    error_body,
)
from server_example.sampling import SamplingParams

_DISCONNECT_POLL_SECONDS = 0.1


class ApiError(Exception):
    """An answer with an OpenAI-style error body."""

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(kind, message, param=param)


def create_app(engine: Engine) -> FastAPI:
    """An app that starts the engine's thread, and stops the thread on shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    app = FastAPI(title="moe_fp8 example server", lifespan=lifespan)
    _add_error_handlers(app)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, http: Request) -> Response:
        completion = Completion(engine, body)
        completion.submit()
        if body.stream:
            # A stream cancels its request when it closes. If the client leaves before the stream begins, the
            # stream never runs, so this task cancels the request.
            left = BackgroundTask(engine.cancel, completion.request)
            return EventSourceResponse(completion.stream(), sep="\n", background=left)
        answer = await completion.collect(http)
        return JSONResponse(answer.model_dump())

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {
            "id": engine.name,
            "object": "model",
            "owned_by": "server_example",
            "max_model_len": engine.scheduler.max_context,
        }
        return {"object": "list", "data": [entry]}

    @app.get("/health")
    async def health() -> JSONResponse:
        counters = moe_fp8.jit.counters()
        body = {
            "status": "ok" if engine.alive else "failed",
            "failure": engine.failure,
            "model": engine.name,
            "backend": engine.backend.name,
            "backend_reason": engine.backend.reason,
            "device": engine.backend.description,
            "running": len(engine.scheduler.running),
            "waiting": len(engine.scheduler.waiting),
            "free_pages": engine.scheduler.pool.free,
            "total_pages": engine.scheduler.pool.capacity,
            "graphs": {"captured": engine.runner.captured, "replays": engine.runner.replays},
            "jit": {
                "frozen": moe_fp8.jit.is_frozen(),
                "loads": counters.loads,
                "compiles": counters.compiles,
                "misses": counters.misses,
            },
        }
        return JSONResponse(body, status_code=200 if engine.alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app


class Completion:
    """One request, from its HTTP body to its answer."""

    def __init__(self, engine: Engine, body: CompletionRequest) -> None:
        self.engine = engine
        self.body = body
        self.id, self.created = completion_id()
        if body.model not in (None, engine.name):
            raise ApiError(
                404,
                "invalid_request_error",
                f"model {body.model!r} is not served; {engine.name!r} is",
                param="model",
            )
        if body.stream_options is not None and not body.stream:
            raise ApiError(
                400, "invalid_request_error", "stream_options needs stream: true", param="stream_options"
            )
        events: asyncio.Queue[scheduler.TokenEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.events = events

        def emit(event: scheduler.TokenEvent) -> None:
            # A closed loop has no listener left; the engine must not fail because of it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        self.request = scheduler.Request(
            prompt=self._prompt_tokens(),
            params=SamplingParams(
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                seed=body.seed,
                stop=body.stop_strings,
                ignore_eos=body.ignore_eos,
            ),
            emit=emit,
        )

    def _prompt_tokens(self) -> list[int]:
        prompt, vocab = self.body.prompt, self.engine.config.vocab_size
        tokens = list(self.engine.tokenizer.encode(prompt).ids) if isinstance(prompt, str) else prompt
        if not tokens:
            raise ApiError(400, "invalid_request_error", "prompt is empty", param="prompt")
        if max(tokens) >= vocab:
            raise ApiError(
                400,
                "invalid_request_error",
                f"token id {max(tokens)} is outside the vocabulary of {vocab}",
                param="prompt",
            )
        return tokens

    def submit(self) -> None:
        try:
            self.engine.submit(self.request)
        except scheduler.RequestTooLongError as error:
            raise ApiError(400, "invalid_request_error", str(error), param="max_tokens") from None
        except scheduler.QueueFullError as error:
            raise ApiError(429, "overloaded_error", str(error)) from None
        except EngineStoppedError as error:
            raise ApiError(503, "server_error", str(error)) from None

    def _usage(self, completion_tokens: int) -> Usage:
        prompt_tokens = len(self.request.prompt)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

    def _response(self, choices: list[Choice], usage: Usage | None) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self.created, model=self.engine.name, choices=choices, usage=usage
        )

    async def collect(self, http: Request) -> CompletionResponse:
        """Waits for the whole answer; if the client disconnects, the request is cancelled."""
        watcher = asyncio.ensure_future(_disconnected(http))
        pieces = []
        try:
            while True:
                event = asyncio.ensure_future(self.events.get())
                await asyncio.wait((event, watcher), return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    raise ApiError(499, "invalid_request_error", "the client closed the connection")
                got = event.result()
                pieces.append(got.text)
                if got.finish_reason == "error":
                    raise ApiError(500, "server_error", got.error or "the engine failed")
                if got.finish_reason in ("stop", "length"):
                    choice = Choice(text="".join(pieces), finish_reason=got.finish_reason)
                    return self._response([choice], self._usage(got.completion_tokens))
        finally:
            watcher.cancel()
            self.engine.cancel(self.request)

    async def stream(self) -> AsyncIterator[dict[str, str]]:
        """Yields server-sent events; if the connection closes, the request is cancelled."""
        try:
            while True:
                got = await self.events.get()
                if got.finish_reason == "error":
                    yield {"data": json.dumps(error_body("server_error", got.error or ""))}
                    return
                finish = got.finish_reason if got.finish_reason in ("stop", "length") else None
                if got.text or finish:
                    chunk = self._response([Choice(text=got.text, finish_reason=finish)], None)
                    yield {"data": chunk.model_dump_json()}
                if finish:
                    break
            if self.body.stream_options and self.body.stream_options.include_usage:
                yield {"data": self._response([], self._usage(got.completion_tokens)).model_dump_json()}
            yield {"data": "[DONE]"}
        finally:
            self.engine.cancel(self.request)


async def _disconnected(http: Request) -> None:
    with suppress(asyncio.CancelledError):
        while not await http.is_disconnected():
            await asyncio.sleep(_DISCONNECT_POLL_SECONDS)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body, status_code=error.status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        param = place[0] if place and first["type"] != "json_invalid" else None
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
        return JSONResponse(error_body("invalid_request_error", message, param=param), status_code=400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        body = error_body("invalid_request_error", f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
