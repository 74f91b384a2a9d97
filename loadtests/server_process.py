"""Starts the server as a subprocess, watches it from outside, and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from loadtests.direct import get

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("device", "host", "source", "absent")


class ServerFailedError(Exception):
    """The server did not start, died or did not end well; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of the server at one moment; the difference of two tells what happened between."""

    tier_to_lookups: dict[str, int]
    rows: int
    executions: int
    minor_faults: int | None
    major_faults: int | None

    def since(self, earlier: Counters) -> Counters:
        """What was counted after `earlier`."""
        return Counters(
            {tier: n - earlier.tier_to_lookups[tier] for tier, n in self.tier_to_lookups.items()},
            self.rows - earlier.rows,
            self.executions - earlier.executions,
            _difference(self.minor_faults, earlier.minor_faults),
            _difference(self.major_faults, earlier.major_faults),
        )

    def hit_rate(self, tier: str) -> float:
        """Share of the looked-up positions that came from `tier`; NaN when there were none."""
        total = sum(self.tier_to_lookups.values())
        return self.tier_to_lookups[tier] / total if total else float("nan")

    @property
    def mean_batch_rows(self) -> float:
        """Rows in a run of the model, on average; NaN when there was none."""
        return self.rows / self.executions if self.executions else float("nan")


class ServerProcess:
    """A server on a free port of 127.0.0.1; use it as a context manager."""

    def __init__(
        self, arguments: Sequence[str], log: Path, *, ready_timeout_s: float = 120
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "server", "serve", *arguments),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        self._log = log
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=child_environment()
            )
        try:
            self._wait_ready()
        except BaseException:  # whatever it was, the process must not be left behind
            self._process.kill()
            self._process.wait()
            raise
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        """Stop it by SIGTERM; raise ServerFailedError where it does not end with 0."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            exit_code = self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            raise self._failure("did not stop within 60 s") from None
        finally:
            self._process.kill()  # does nothing once it has ended
            self._process.wait()
        if exit_code != 0 and error is None:
            raise self._failure(f"ended with exit code {exit_code}")

    def counters(self) -> Counters:
        """The counters now; raises ServerFailedError where the server does not answer."""
        assert self._process is not None
        try:
            text = get(f"{self.url}/metrics", timeout_s=30).decode()
        except OSError as error:
            raise self._failure(f"does not answer /metrics ({error})") from error
        minor, major = page_faults(self._process.pid)
        lookups = dict.fromkeys(TIERS, 0)
        totals = {"nv_inference_count": 0, "nv_inference_exec_count": 0}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name == "hotshelf_table_lookups":
                    lookups[sample.labels["tier"]] += int(sample.value)
                elif name in totals:
                    totals[name] += int(sample.value)
        rows, executions = totals.values()
        return Counters(lookups, rows, executions, minor, major)

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._ready_timeout_s
        while self._process.poll() is None:
            try:
                get(f"{self.url}/v2/health/ready", timeout_s=5)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise self._failure(f"is not ready after {self._ready_timeout_s:g} s") from None
                time.sleep(0.05)
        raise self._failure(f"ended with exit code {self._process.returncode} before it was ready")

    def _failure(self, what: str) -> ServerFailedError:
        return ServerFailedError(f"the server {what}; its log ends with:\n{log_tail(self._log)}")


def child_environment() -> dict[str, str]:
    """The environment of this process with the project importable.

    It has none of the server's settings: a measured server has those of its command alone.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOTSHELF_")}
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def page_faults(pid: int) -> tuple[int | None, int | None]:
    """(minor, major) page faults of a process since its start; None where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None, None
    fields = text.rpartition(")")[2].split()  # the command in parentheses may hold spaces
    return int(fields[7]), int(fields[9])


def log_tail(log: Path, num_lines: int = 15) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier
