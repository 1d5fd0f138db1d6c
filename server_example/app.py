"""The HTTP interface: completions, chat, models, health, readiness, metrics, and a page for browsers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from sse_starlette.sse import EventSourceResponse
from starlette.background import BackgroundTask

import moe_fp8
from server_example.answers import ChatForm, CompletionForm, Form, Piece
from server_example.client import EngineClient
from server_example.errors import DOCUMENTED, ApiError, add_error_handlers, unless
from server_example.gate import Awaited, Counted, Gate
from server_example.generation import Deadline
from server_example.intake import Intake, client_left
from server_example.messages import EngineUnavailableError
from server_example.metrics import HttpMetrics
from server_example.protocol import (
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    Model,
    ModelList,
)
from server_example.settings import Settings
from server_example.stats import Stats

_PAGE = Path(__file__).parent / "page"
_PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE_FILES = {path.name: _PAGE_TYPES[path.suffix] for path in _PAGE.iterdir() if path.suffix in _PAGE_TYPES}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_BLOCK_BYTES = 1 << 16


class Service:
    """What the process tells the routes: the engine once it is warm, and whether the server drains."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine: EngineClient | None = None
        self.intake = Intake()
        self.stats = Stats()
        self.metrics = HttpMetrics()
        self.draining = False

    def ready_engine(self) -> EngineClient:
        """Raises `ApiError` 503 unless the engine takes requests."""
        if self.draining:
            raise ApiError(503, "the server is shutting down")
        if self.engine is None:
            raise ApiError(503, "the server is loading its model")
        if not self.engine.alive:
            raise ApiError(503, f"the engine has failed: {self.engine.failure}")
        return self.engine

    @property
    def busy(self) -> bool:
        """Whether a request has not ended, or its answer is not sent yet."""
        return self.intake.open > 0 or (self.engine is not None and self.engine.busy)

    @property
    def status(self) -> str:
        if self.engine is None:
            return "loading"
        return "draining" if self.draining else "ok" if self.engine.alive else "failed"

    async def look(self) -> tuple[str, dict[str, Any]]:
        """The status, which is `silent` if a living engine does not answer, and what the engine says."""
        if self.engine is None:
            return self.status, {}
        details: dict[str, Any] = {}
        failure = None
        try:
            details = await self.engine.call("details")
        except EngineUnavailableError as error:
            failure = str(error)
        status = self.status
        if status == "ok" and failure is not None:
            status = "silent"
        return status, {**details, "failure": self.engine.failure or failure}


def create_app(service: Service) -> FastAPI:
    settings = service.settings
    # FastAPI's pages of documentation load scripts from elsewhere, so there are none.
    app = FastAPI(
        title="moe_fp8 example server",
        version=moe_fp8.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_error_handlers(app)
    key = settings.api_key
    # A drain begins, and then it counts. So a request is counted, and then it looks for a drain.
    app.add_middleware(Awaited, awaited=service.intake.one_more)
    app.add_middleware(
        Gate,
        api_key=key.get_secret_value() if key is not None else None,
        max_body_bytes=settings.body_bytes,
        receive_seconds=settings.receive_seconds,
        drained=service.intake.drained,
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "x-should-retry"],
        )
    app.add_middleware(Counted, answers=service.metrics.answers)
    # `Gate` checks the key; the dependency only documents it.
    secured = [Depends(HTTPBearer(auto_error=False))] if key is not None else []
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": text} for status, text in DOCUMENTED.items()
    }
    errors["default"] = {"model": ErrorResponse, "description": "Any other error has this form too"}

    def answers_with(model: Any) -> dict[int | str, dict[str, Any]]:
        stream = {"text/event-stream": {"schema": {"type": "string"}}}
        text = "The answer; with `stream`, chunks and then [DONE]"
        return {200: {"model": model, "content": stream, "description": text}, **errors}

    async def generate(body: CompletionRequest | ChatRequest, http: Request) -> Response:
        deadline = Deadline.of(body, settings.request_seconds)
        engine = service.ready_engine()
        _check_model(engine, body.model)
        generation = await service.intake.submit(engine, body, deadline, http)
        name = engine.served.name
        form: Form = ChatForm(name) if isinstance(body, ChatRequest) else CompletionForm(name)
        if body.stream:
            # A stream cancels its requests when it closes. If the client leaves before the stream begins,
            # the stream never runs, so this task cancels the requests.
            left = BackgroundTask(generation.cancel)
            return EventSourceResponse(generation.stream(form), sep="\n", background=left)
        pieces = await unless(generation.collect(form), client_left(http))
        length = {"content-length": str(sum(map(len, pieces)))}
        return StreamingResponse(_blocks(pieces), headers=length, media_type="application/json")

    @app.post(
        "/v1/completions",
        response_model=None,
        responses=answers_with(CompletionResponse),
        dependencies=secured,
    )
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await generate(body, http)

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=answers_with(ChatResponse),
        dependencies=secured,
    )
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await generate(body, http)

    @app.head("/v1/models", dependencies=secured, include_in_schema=False)
    @app.get("/v1/models", dependencies=secured, responses=errors)
    async def models() -> ModelList:
        return ModelList(data=[_model(service.ready_engine())])

    @app.head("/v1/models/{model:path}", dependencies=secured, include_in_schema=False)
    @app.get("/v1/models/{model:path}", dependencies=secured, responses=errors)
    async def model(model: str) -> Model:
        engine = service.ready_engine()
        _check_model(engine, model)
        return _model(engine)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"description": "The engine has failed or does not answer"}})
    async def health() -> JSONResponse:
        """Liveness: 503 after the engine has failed, and while it does not answer."""
        status, details = await service.look()
        wrong = status in ("failed", "silent")
        return JSONResponse({"status": status, **details}, status_code=503 if wrong else 200)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses={503: {"description": "The server takes no requests; `status` says why"}})
    async def ready() -> JSONResponse:
        """Readiness: 200 once the model is warm, while the server takes requests and its engine answers."""
        status, _ = await service.look()
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    @app.head("/metrics", include_in_schema=False)
    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 503: errors[503]},
    )
    async def metrics() -> Response:
        if service.engine is None:
            raise ApiError(503, "the server is loading its model")
        try:
            rendered = await service.engine.call("metrics")
        except EngineUnavailableError as error:
            raise ApiError(503, str(error)) from None
        return Response(rendered + service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    # The schema leaves these out: a tool that tries every route would wait for the end of the stream.

    @app.get("/v1/stats", include_in_schema=False)
    async def stats() -> Response:
        return EventSourceResponse(service.stats.events(service.ready_engine()), sep="\n")

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    @app.get("/page/{name}", include_in_schema=False)
    async def page(name: str = "index.html") -> Response:
        if name not in _PAGE_FILES:
            raise ApiError(404, f"the page has no file {name!r}")
        return FileResponse(_PAGE / name, media_type=_PAGE_FILES[name], headers=_PAGE_HEADERS)

    return app


async def _blocks(pieces: Iterable[Piece]) -> AsyncIterator[bytes]:
    """An answer to send. A block of megabytes would be copied several times before other tasks get a turn."""
    block = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), _BLOCK_BYTES):
            block += piece[start : start + _BLOCK_BYTES]
            if len(block) >= _BLOCK_BYTES:
                yield bytes(block)
                block.clear()
                await asyncio.sleep(0)
    yield bytes(block)


def _check_model(engine: EngineClient, name: str | None) -> None:
    if name not in (None, engine.served.name):
        message = f"model {name!r} is not served; {engine.served.name!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


def _model(engine: EngineClient) -> Model:
    served = engine.served
    return Model(id=served.name, created=served.created, max_model_len=served.max_context)
