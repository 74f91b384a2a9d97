"""The infer endpoint on plain ASGI, without a framework's request object."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import unquote_to_bytes

from server.errors import (
    ClientDisconnectedError,
    MethodNotAllowedError,
    NotFoundError,
    ShuttingDownError,
    as_server_error,
)
from server.http_body import (
    BodyReader,
    Receive,
    Scope,
    Send,
    read_headers,
    send_error,
    send_response,
)
from server.model_manager import ModelManager, failure_reason
from server.oip_decode import decode_request
from server.oip_encode import EncodedResponse, encode_response
from server.statistics import ModelStatistics


@dataclass(frozen=True, slots=True)
class InferTarget:
    """The model that an infer path names; `version` is None where the path has none."""

    name: str
    version: str | None


def decode_name(raw: str | bytes) -> str:
    """A path segment, percent-decoded once; raises NotFoundError where it cannot be a name."""
    try:
        name = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise NotFoundError("a name in the path is not UTF-8") from None
    if not name:
        raise NotFoundError("a name in the path is empty")
    return name


def infer_target(raw_path: bytes) -> InferTarget | None:
    """What an infer path names, or None for another path. Segments are split before decoding."""
    if not raw_path.endswith(b"/infer") or not raw_path.startswith(b"/v2/models/"):
        return None
    match raw_path.split(b"/")[3:-1]:
        case [name]:
            return InferTarget(decode_name(name), None)
        case [name, b"versions", version]:
            return InferTarget(decode_name(name), decode_name(version))
    return None


class InferRoute:
    """Answers one infer request: decode, run, encode. A client that goes away cancels its run."""

    def __init__(self, manager: ModelManager, bodies: BodyReader) -> None:
        self._manager = manager
        self._bodies = bodies

    async def __call__(
        self, target: InferTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends the response or the error; sends nothing to a client that is gone."""
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowedError("infer: expected the method POST", "POST")
            encoded = await self._infer(target, scope, receive)
        except ClientDisconnectedError:
            return
        except asyncio.CancelledError:
            error = ShuttingDownError("the server stopped before this request was answered")
            await send_error(send, error)
            return
        except Exception as error:
            await send_error(send, as_server_error(error, f"model {target.name!r}"))
            return
        await _send_encoded(send, encoded)

    async def _infer(self, target: InferTarget, scope: Scope, receive: Receive) -> EncodedResponse:
        found = await self._manager.find(target.name, target.version)
        async with AsyncExitStack() as leased:
            with _failures_counted(found.statistics):
                headers = read_headers(scope["headers"])
                body = await self._bodies.read(headers, receive)
                # A slow client does not hold the model: it is leased when the body is there.
                served = await leased.enter_async_context(
                    self._manager.lease(target.name, target.version)
                )
                model = served.model
                request = decode_request(
                    body,
                    headers.header_length,
                    model.request_inputs,
                    model.outputs,
                    model.max_batch_size,
                )
            return await served.infer(
                request,
                lambda response: encode_response(
                    model.name, model.version, request, response, model.outputs
                ),
                waiting=DisconnectWatcher(receive),
            )


@contextmanager
def _failures_counted(statistics: ModelStatistics) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        statistics.record_failure(failure_reason(error))
        raise


class DisconnectWatcher:
    """While it is entered, a client that goes away ends the task with ClientDisconnectedError."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_left = False
        self._awaiting: asyncio.Task[object]
        self._watching: asyncio.Task[None]

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._awaiting = task
        self._watching = asyncio.create_task(self._watch())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        if self._has_left and isinstance(error, asyncio.CancelledError):
            self._awaiting.uncancel()
            raise ClientDisconnectedError from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._awaiting.cancel()


async def _send_encoded(send: Send, encoded: EncodedResponse) -> None:
    if encoded.header_length is None:
        await send_response(send, 200, encoded.parts, {})
        return
    headers = {"Inference-Header-Content-Length": str(encoded.header_length)}
    await send_response(send, 200, encoded.parts, headers, b"application/octet-stream")
