"""Request bodies and JSON answers on plain ASGI: limits, content encodings, errors."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from server.errors import (
    ClientDisconnectedError,
    InvalidRequestError,
    PayloadTooLargeError,
    ServerError,
    ShuttingDownError,
    UnsupportedEncodingError,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# zlib's window bits: 31 expects a gzip header, 15 a zlib header.
_ENCODING_TO_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
_JOIN_BELOW_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class BodyHeaders:
    """What the request headers say about the body.

    `header_length` is Inference-Header-Content-Length, None where it is left out. `window_bits` is
    None for a body that is not compressed.
    """

    content_length: int | None
    window_bits: int | None
    header_length: int | None


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> BodyHeaders:
    """Reads the headers of a scope; raises InvalidRequestError and UnsupportedEncodingError."""
    content_length: int | None = None
    encodings: list[bytes] = []
    header_lengths: list[bytes] = []
    for name, value in headers:
        if name == b"content-length":
            content_length = int(value)  # the HTTP parser has checked it
        elif name == b"content-encoding":
            encodings += value.lower().split(b",")
        elif name == b"inference-header-content-length":
            header_lengths.append(value)
    return BodyHeaders(content_length, _window_bits(encodings), _header_length(header_lengths))


def _window_bits(encodings: Iterable[bytes]) -> int | None:
    names = [name for encoding in encodings if (name := encoding.strip()) not in (b"", b"identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _ENCODING_TO_WINDOW_BITS:
        given = b", ".join(names).decode("latin-1")
        raise UnsupportedEncodingError(
            f"Content-Encoding: expected one of gzip, deflate or identity, got '{given}'"
        )
    return _ENCODING_TO_WINDOW_BITS[names[0]]


def _header_length(values: list[bytes]) -> int | None:
    if not values:
        return None
    text = values[0].decode("latin-1")
    if any(value != values[0] for value in values):
        raise InvalidRequestError("Inference-Header-Content-Length is given twice, and differs")
    if not values[0].isdigit() or len(text) > 20:
        raise InvalidRequestError(
            f"Inference-Header-Content-Length: expected a number of bytes, got '{text[:40]}'"
        )
    return int(text)


class BodyReader:
    """Reads request bodies until it is stopped, so that no client holds up the server's end."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._is_stopped = False
        self._reads: set[asyncio.Timeout] = set()

    async def read(self, headers: BodyHeaders, receive: Receive) -> bytes:
        """The whole body, decompressed.

        Never holds more than about `max_bytes` of it, nor of its compressed form. Raises
        PayloadTooLargeError, InvalidRequestError, ClientDisconnectedError and ShuttingDownError.
        """
        max_bytes = self._max_bytes
        if headers.content_length is not None and headers.content_length > max_bytes:
            raise _too_large(max_bytes)
        body = await self._receive_until_stopped(receive)
        if headers.window_bits is None:
            return body
        return await asyncio.to_thread(_decompress, body, headers.window_bits, max_bytes)

    def stop(self) -> None:
        """Ends the reads under way, and refuses new ones, with ShuttingDownError."""
        self._is_stopped = True
        now_s = asyncio.get_running_loop().time()
        for read in self._reads:
            read.reschedule(now_s)

    async def _receive_until_stopped(self, receive: Receive) -> bytes:
        if self._is_stopped:
            raise ShuttingDownError("the server is shutting down")
        try:
            async with asyncio.timeout(None) as read:
                self._reads.add(read)
                return await _receive_all(receive, self._max_bytes)
        except TimeoutError:
            raise ShuttingDownError("the server stopped before it had the whole request") from None
        finally:
            self._reads.discard(read)


async def _receive_all(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        chunk: bytes = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join((*chunks, chunk)) if chunks else chunk
        chunks.append(chunk)


def _decompress(body: bytes, window_bits: int, max_bytes: int) -> bytes:
    """The content of one compressed stream, cut off when it is over the limit."""
    stream = zlib.decompressobj(window_bits)
    try:
        content = stream.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not what Content-Encoding says: {error}") from error
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof:
        raise InvalidRequestError("the compressed body ends too early")
    if stream.unused_data:
        raise InvalidRequestError("the compressed body goes on after the end of its stream")
    return content


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is larger than the limit of {max_bytes} bytes (max_body_bytes)"
    )


def error_body(error: ServerError) -> bytes:
    """The JSON form of every error: one object with the text under `error`."""
    return orjson.dumps({"error": str(error)})


async def send_error(send: Send, error: ServerError) -> None:
    """Answers with the error's status, headers and text."""
    await send_response(send, error.status, (error_body(error),), error.headers())


async def send_response(
    send: Send,
    status: int,
    parts: Iterable[bytes | memoryview],
    headers: Mapping[str, str],
    content_type: bytes = b"application/json",
) -> None:
    """Sends a whole response; small parts are joined, large ones are sent as they are."""
    parts = list(parts)
    num_bytes = sum(map(len, parts))
    if num_bytes <= _JOIN_BELOW_BYTES:
        parts = [b"".join(parts)]
    raw_headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % num_bytes),
        *((name.lower().encode(), value.encode()) for name, value in headers.items()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": raw_headers})
    last = len(parts) - 1
    for number, part in enumerate(parts):
        await send({"type": "http.response.body", "body": part, "more_body": number < last})
