"""uvicorn with our ideas of the end of a server's life and of error bodies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.errors import InvalidRequestError
from server.http_body import error_body

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CANCEL_S = 0.5


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 by httptools; what is not HTTP is answered with the same error body as the rest."""

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
