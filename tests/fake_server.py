"""A tiny HTTP server in its own process that answers infer requests after chosen delays.

Request k gets answer k of the script (again from the start when the script is at its end). A GET
gets an empty list of tables and counts for nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

NO_TABLES = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"tables":[]}'
REASONS = {200: "OK", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Answer:
    """One answer: after `delay_s`, with `status`; a 200 holds `rows` scores."""

    delay_s: float
    status: int = 200
    rows: int = 1


class FakeServer:
    """The server process as the test sees it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.pid = process.pid
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    def wait_for_first_request(self) -> None:
        """Block until the load has begun."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "first request\n"

    def freeze(self) -> None:
        """Stop the process in the middle of whatever it does."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def fake_server(script: Sequence[Answer]) -> Iterator[FakeServer]:
    """Run the server in a process of its own until the block ends."""
    command = [sys.executable, "-m", "tests.fake_server", json.dumps([asdict(a) for a in script])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield FakeServer(process, int(process.stdout.readline()))
        finally:
            process.kill()


def _response(answer: Answer, *, is_binary: bool) -> bytes:
    reason, headers = REASONS[answer.status], "Content-Type: application/json\r\n"
    if answer.status != 200:
        body = b'{"error": "as the script says"}'
    elif is_binary:
        head = b'{"outputs":[]}'
        headers = f"Inference-Header-Content-Length: {len(head)}\r\n"
        body = head + bytes(4 * answer.rows)
    else:
        body = json.dumps({"outputs": [{"name": "score", "data": [0.5] * answer.rows}]}).encode()
    start = f"HTTP/1.1 {answer.status} {reason}\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return start.encode() + body


async def _serve(script: Sequence[Answer]) -> None:
    answers = enumerate(itertools.cycle(script))

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _read_head(reader):
            if head[":method"] == "GET":
                writer.write(NO_TABLES)
                continue
            number, answer = next(answers)
            if number == 0:
                print("first request", flush=True)
            await asyncio.sleep(answer.delay_s)
            is_binary = "inference-header-content-length" in head
            writer.write(_response(answer, is_binary=is_binary))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _read_head(reader: asyncio.StreamReader) -> dict[str, str] | None:
    """The method and headers of the next request, its body read; None when the client has gone."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {":method": first.partition(" ")[0]}
    headers |= {k.lower(): v for k, _, v in (line.partition(": ") for line in lines if line)}
    await reader.readexactly(int(headers.get("content-length", "0")))
    return headers


if __name__ == "__main__":
    asyncio.run(_serve([Answer(**fields) for fields in json.loads(sys.argv[1])]))
