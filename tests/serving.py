"""Starts the real server as a process, for tests that speak HTTP."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from loadtests.direct import get

ROOT = Path(__file__).resolve().parents[1]
SERVER = "server"
SERVER_ON_DOUBLE = "tests.cuda_double.serve"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class RunningServer:
    """A server process; `log_file` has what it wrote."""

    port: int
    process: subprocess.Popen[bytes]
    log_file: Path
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def log(self) -> str:
        """Everything that it wrote so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def get_json(self, path: str) -> Any:
        """The JSON answer to a GET that succeeds."""
        return orjson.loads(get(self.url + path, timeout_s=30))

    def is_ready(self) -> bool:
        """Whether it says that it is ready."""
        try:
            get(f"{self.url}/v2/health/ready", timeout_s=5)
        except OSError:
            return False
        return True

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(timeout_s)


@contextmanager
def running_server(
    repository: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    module: str = SERVER,
) -> Iterator[RunningServer]:
    """A server of a repository, or of one model file, that is ready.

    `module` is `SERVER`, or `SERVER_ON_DOUBLE` for `--device cuda:0` without a GPU.
    It is stopped by SIGTERM in the end, and must then end with exit code 0, unless the test has
    ended it before.
    """
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        server = start_server(repository, *arguments, log_file=log_file, env=env, module=module)
        try:
            _wait_until_ready(server)
            yield server
        except BaseException:  # whatever it was, the process must not be left behind
            server.process.kill()
            server.process.wait()
            print(server.log(), file=sys.stderr)
            raise
        if server.process.poll() is None:
            server.terminate()
            try:
                exit_code = server.wait()
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
                raise AssertionError(f"the server did not end:\n{server.log()}") from None
            assert exit_code == 0, server.log()


def start_server(
    repository: Path,
    *arguments: str,
    log_file: Path,
    env: Mapping[str, str] | None = None,
    module: str = SERVER,
) -> RunningServer:
    """A server process that has just begun to start."""
    port = free_port()
    what = (str(repository),) if repository.is_file() else ("--repository", str(repository))
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", *what, "--port", str(port), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=server_environment() | dict(env or {}),
        )
    return RunningServer(port, process, log_file)


def server_environment() -> dict[str, str]:
    """The environment of this process without the server's settings."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOTSHELF_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_log(server: RunningServer, text: str) -> None:
    """Until the server has written the text."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while text not in server.log():
        assert time.monotonic() < deadline_s, f"no {text!r} in:\n{server.log()}"
        time.sleep(0.05)


def _wait_until_ready(server: RunningServer) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not server.is_ready():
        exit_code = server.process.poll()
        assert exit_code is None, f"the server ended with {exit_code}:\n{server.log()}"
        assert time.monotonic() < deadline_s, f"the server is not ready:\n{server.log()}"
        time.sleep(0.05)
