"""Every refusal and failure, in OpenAI's form."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from server_example.protocol import ErrorDetail, ErrorResponse, field_of

Result = TypeVar("Result")

#: The statuses that the routes under /v1 answer with, for their documentation.
DOCUMENTED = {
    400: "The request is refused; `param` names the field",
    401: "The API key is wrong or missing",
    404: "The model is not served here",
    408: "The request came too slowly, or did not finish in the time that it named",
    413: "The body is too large",
    429: "The queue is full",
    500: "The engine failed",
    503: "The server is loading or shutting down",
    504: "The request did not finish in the server's time",
}

_KINDS = {401: "authentication_error", 408: "timeout_error", 429: "overloaded_error", 504: "timeout_error"}
#: Seconds are for whoever retries. A deadline that passed once would pass again, and OpenAI's client retries
#: 408 and 504 unless it is told not to.
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"x-should-retry": "false"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
    504: {"x-should-retry": "false"},
}


class ApiError(Exception):
    """An answer with an OpenAI-style error body."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = _KINDS.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        # A client's text may have what UTF-8 cannot hold, and messages quote it.
        printable = [
            text and text.encode(errors="backslashreplace").decode() for text in (message, param, code)
        ]
        detail = ErrorDetail(message=printable[0] or "", type=kind, param=printable[1], code=printable[2])
        self.body = ErrorResponse(error=detail)

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        all_headers = {**(headers or {}), **_HEADERS.get(self.status, {})}
        return JSONResponse(self.body.model_dump(), status_code=self.status, headers=all_headers)


async def unless(work: Coroutine[Any, Any, Result], *ends: Coroutine[Any, Any, ApiError]) -> Result:
    """The result of `work`. If one of `ends` returns first, `work` is cancelled, and that error is raised."""
    working = asyncio.ensure_future(work)
    ending = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait([working, *ending], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise next(end.result() for end in ending if end.done())
    finally:
        for task in (working, *ending):
            task.cancel()


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "missing" and first["loc"] == ("body",):
            return ApiError(400, "the body is missing; send a JSON object").response()
        param = field_of(first)
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
        return ApiError(400, message, param=param).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message).response(dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises the error again after this answer, so that it is logged.
        return ApiError(500, f"the server failed: {type(error).__name__}").response()
