"""uvicorn with our ideas of the end of a server's life and of error bodies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import InvalidRequestError
from server.http_body import error_body

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CANCEL_S = 0.5
_NOT_HTTP = "Invalid HTTP request received."


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 by httptools; what is not HTTP is answered with the same error body as the rest.

    The wish of a request for another protocol is passed over, as HTTP allows: it is answered in
    HTTP/1.1, and its body belongs to it.
    """

    def data_received(self, data: bytes) -> None:
        """Parses what has come."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    # The parser takes what follows such a head for the other protocol, and after
                    # that for a new request. One that has not seen the wish reads the body.
                    rest = rest[upgrade.args[0] :]
                    self._parse_head_again()
        except httptools.HttpParserError:
            self.logger.warning(_NOT_HTTP)
            self.send_400_response(_NOT_HTTP)

    def on_headers_complete(self) -> None:
        """Begins the request, unless its head is parsed again."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Ends the body, unless the head is parsed again."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _parse_head_again(self) -> None:
        """Parses the head without the wish; raises HttpParserError for CONNECT, which is one."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError
        headers = [header for header in self.headers if header[0] != b"upgrade"]
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in headers]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"\r\n".join((*lines, b"", b"")))

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not an HTTP request, and closes the connection."""
        body = error_body(InvalidRequestError(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves until a signal comes and `drain` is done; a second signal ends the process at once.

    While it drains it still answers, so that health checks and late requests see why. Then idle
    connections are closed, and those with an answer under way get `last_words_s` to finish.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[float]]) -> None:
        """`drain` finishes the accepted requests and returns `last_words_s`."""
        super().__init__(config)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Begins to drain."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain_and_exit())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles the signals on the event loop while the server runs."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self._draining is not None:
            os._exit(128 + number)
        self.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes what is open; requests that are cancelled have a moment to answer."""
        await super().shutdown(sockets)
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=_CANCEL_S)

    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self.server_state.tasks

    async def _drain_and_exit(self) -> None:
        try:
            # uvicorn reads it when the shutdown begins, and takes fractions too.
            last_words_s: Any = await self._drain()
            self.config.timeout_graceful_shutdown = last_words_s
        finally:
            self.should_exit = True
