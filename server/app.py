"""The ASGI application: the infer route in front, everything else in FastAPI behind it."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cache.errors import CacheError
from models.errors import ModelError
from server.errors import (
    ClientDisconnectedError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    ServerError,
    ShuttingDownError,
    as_server_error,
)
from server.http_body import (
    Message,
    Receive,
    Scope,
    Send,
    error_body,
    send_error,
)
from server.infer_route import InferRoute, infer_target
from server.openapi import describe
from server.routes import Services, create_router


class App:
    """Answers every request; no error leaves it.

    Paths are matched as they came, so that a name is percent-decoded once, by the route that
    uses it, and an encoded slash never splits it.
    """

    def __init__(self, services: Services) -> None:
        self._infer = InferRoute(services.manager, services.bodies)
        self._api = create_api(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            return
        try:
            target = infer_target(scope["raw_path"])
        except ServerError as error:
            await send_error(send, error)
            return
        if target is not None:
            await self._infer(target, scope, receive, send)
        else:
            await self._call_api({**scope, "path": _undecoded(scope["raw_path"])}, receive, send)

    async def _call_api(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def noting_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._api(scope, receive, noting_send)
        except ClientDisconnectedError:
            pass
        except asyncio.CancelledError:
            if is_started:
                raise
            await send_error(send, ShuttingDownError("the server stopped before it could answer"))
        except Exception as error:
            if is_started:
                raise
            await send_error(send, as_server_error(error, _undecoded(scope["raw_path"])))


def _undecoded(raw_path: bytes) -> str:
    return raw_path.decode("ascii", "replace")


def create_api(services: Services) -> FastAPI:
    """All endpoints but infer, which the description has all the same."""
    api = FastAPI(
        title="Hotshelf",
        version=services.version,
        docs_url="/docs",
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,
    )
    api.state.bodies = services.bodies
    api.include_router(create_router(services))
    for kind in (ServerError, ModelError, CacheError):
        api.add_exception_handler(kind, _answer_error)
    api.add_exception_handler(HTTPException, _answer_http_exception)
    api.add_exception_handler(RequestValidationError, _answer_validation_error)
    api.openapi = lambda: describe(api)  # type: ignore[method-assign]
    return api


def _answer(error: ServerError) -> Response:
    return Response(
        error_body(error), error.status, dict(error.headers()), media_type="application/json"
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    return _answer(as_server_error(error, request.url.path))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _answer(
            MethodNotAllowedError(f"{request.method} {path}: expected {allowed}", allowed)
        )
    if error.status_code == 404:
        return _answer(NotFoundError(f"no such path: {path}"))
    return _answer(as_server_error(error, path))


async def _answer_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
    return _answer(InvalidRequestError("; ".join(faults)))
