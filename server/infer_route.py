"""The infer endpoint on plain ASGI, without a framework's request object."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from server.errors import (
    MethodNotAllowedError,
    NotFoundError,
    ShuttingDownError,
    as_server_error,
)
from server.http_body import (
    ClientDisconnectedError,
    Receive,
    Scope,
    Send,
    read_body,
    read_headers,
    send_error,
    send_response,
)
from server.model_manager import ModelManager, ServedModel
from server.oip import EncodedResponse, decode_request, encode_response


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

    def __init__(self, manager: ModelManager, max_body_bytes: int) -> None:
        self._manager = manager
        self._max_body_bytes = max_body_bytes

    async def __call__(
        self, target: InferTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Sends the response or the error; sends nothing to a client that is gone."""
        try:
            if scope["method"] != "POST":
                raise MethodNotAllowedError("infer: expected the method POST", "POST")
            with self._manager.lease(target.name, target.version) as served:
                encoded = await self._infer(served, scope, receive)
        except ClientDisconnectedError:
            return
        except asyncio.CancelledError:
            error = ShuttingDownError("the server stopped before this request was answered")
            await send_error(send, error)
            return
        except Exception as error:
            await send_error(send, as_server_error(error))
            return
        await _send_encoded(send, encoded)

    async def _infer(self, served: ServedModel, scope: Scope, receive: Receive) -> EncodedResponse:
        model = served.model
        try:
            headers = read_headers(scope["headers"])
            body = await read_body(headers, receive, self._max_body_bytes)
            request = decode_request(
                body,
                headers.header_length,
                model.request_inputs,
                model.outputs,
                model.max_batch_size,
            )
        except ClientDisconnectedError:
            served.statistics.record_failure("CANCELED")
            raise
        except Exception:
            served.statistics.record_failure("OTHER")
            raise
        watcher = _DisconnectWatcher(receive)
        try:
            return await served.infer(
                request,
                lambda response: encode_response(
                    model.name, model.version, request, response, model.outputs
                ),
            )
        except asyncio.CancelledError:
            if watcher.saw_disconnect():
                raise ClientDisconnectedError from None
            raise
        finally:
            watcher.stop()


class _DisconnectWatcher:
    """Cancels the current task when the client goes away."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        task = asyncio.current_task()
        assert task is not None
        self._awaiting = task
        self._has_left = False
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._awaiting.cancel()

    def saw_disconnect(self) -> bool:
        """Whether it was the client that ended the wait; takes the cancellation back."""
        if self._has_left:
            self._awaiting.uncancel()
        return self._has_left

    def stop(self) -> None:
        """Ends the watch."""
        self._task.cancel()


async def _send_encoded(send: Send, encoded: EncodedResponse) -> None:
    if encoded.header_length is None:
        await send_response(send, 200, encoded.parts, {})
        return
    headers = {"Inference-Header-Content-Length": str(encoded.header_length)}
    await send_response(send, 200, encoded.parts, headers, b"application/octet-stream")
