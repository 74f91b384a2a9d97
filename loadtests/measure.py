"""Measures one point of a sweep: starts a server, warms it, loads it with Locust, stops it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.closed_loop import Replayed, ReplayError, replay
from loadtests.preload import preload, recent_rows
from loadtests.results import FAILED, Row
from loadtests.samples import Summary, can_write_parquet, read_columns
from loadtests.server_process import (
    ServerFailedError,
    ServerProcess,
    child_environment,
    log_tail,
)
from loadtests.workloads import MODEL, Workload

WARM_UP_ROWS = 64  # rows in a request of the warm-up
ROUND_SAMPLES = 1024  # of the warm-up; 26 k positions give the hit rate to about 0.3 %
MAX_ROUNDS = 8
NUM_CONNECTIONS = 8
STEADY_CHANGE = 0.01  # of the hit rate, from one round to the next
PROBE_S = 3.0
PROBE_SHARE = 0.6
LEAD_IN_S = 1.0
DRAIN_S = 5.0
EXTRA_BYTES = 2**30  # of memory for models and staging, on top of the rows

SAMPLES_SUFFIX = ".parquet" if can_write_parquet() else ".csv"

Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Trace:
    """The tables of the repository and the trace over them.

    The load replays it from sample `first_measured` on; what comes before is there to warm up.
    """

    table_names: list[str]
    table_rows: list[int]
    slot_bytes: int
    workload: Workload

    @property
    def first_measured(self) -> int:
        """The first sample of the last quarter."""
        return self.workload.num_samples * 3 // 4

    @property
    def table_bytes(self) -> int:
        """Bytes of a device tier that holds every row."""
        return sum(self.table_rows) * self.slot_bytes


class PointMeasurer:
    """Measures points on one trace; use it as a context manager.

    `rows` and `sample_columns` have what was measured so far. Logs go to `out`/logs.
    """

    def __init__(self, args: Namespace, trace: Trace, out: Path) -> None:
        self._args = args
        self._trace = trace
        self._logs = out / "logs"
        self.rows: list[Row] = []
        self.sample_columns: Columns = {}

    def __enter__(self) -> PointMeasurer:
        """Make the folder of the logs, and one for the files that Locust reads and writes."""
        self._logs.mkdir(parents=True)
        self._folder = tempfile.TemporaryDirectory()
        self._scratch = Path(self._folder.name)
        np.save(self._scratch / "trace.npy", self._trace.workload.keys)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def measure(
        self, series: str, share: float, rates: Sequence[float], on_stage: Callable[[str], None]
    ) -> None:
        """Add a row for each rate; without rates, for one that a probe of this server finds.

        When the server fails, the last row says so.
        """
        cache_bytes = round(self._trace.table_bytes * share / 100)
        row = Row(series, share, cache_bytes, rate=rates[0] if rates else 0.0)
        log = self._logs / f"server-{series}-{share:g}.log"
        try:
            on_stage("start")
            with ServerProcess(self._server_arguments(series, cache_bytes), log) as server:
                on_stage("warm-up")
                row = self._warm_up(server, row)
                if not rates:
                    on_stage("probe")
                    rates = [self._probe(server)]
                first_sample = self._trace.first_measured
                for rate in rates:
                    on_stage(f"{rate:g} requests/s")
                    row = dataclasses.replace(row, rate=rate)
                    self.rows.append(self._load(server, row, first_sample))
                    num_sent = self.rows[-1].num_planned + math.ceil(rate * LEAD_IN_S)
                    first_sample += num_sent * self._args.rows_per_request
        except (ServerFailedError, ReplayError) as error:
            self.rows.append(dataclasses.replace(row, state=FAILED, note=str(error)))

    def _server_arguments(self, series: str, cache_bytes: int) -> list[str]:
        table_bytes = self._trace.table_bytes
        host_bytes = table_bytes * 5 // 4 + EXTRA_BYTES if series == "host" else 0
        return [
            *("--repository", str(self._args.repository)),
            *("--table-memory", str(cache_bytes)),
            *("--device-memory", str(table_bytes * 2 + EXTRA_BYTES)),
            *("--host-memory", str(host_bytes)),
        ]

    def _warm_up(self, server: ServerProcess, row: Row) -> Row:
        """Bring the cache to where the trace up to the measured part leaves it.

        Rows are preloaded by recency, then the last samples are replayed round by round, until the
        hit rate is steady, the measured part is reached or the time is up.
        """
        start_s = time.monotonic()
        trace = self._trace
        first = max(0, trace.first_measured - ROUND_SAMPLES * MAX_ROUNDS)
        steps = recent_rows(trace.workload.keys[:first], row.cache_bytes // trace.slot_bytes)
        preload(server.port, trace.table_names, steps)
        hit_rates: list[float] = []
        while first < trace.first_measured and not is_steady(hit_rates):
            if time.monotonic() - start_s > self._args.warm_up and hit_rates:
                break
            before = server.counters()
            last = min(first + ROUND_SAMPLES, trace.first_measured)
            self._replay(server, first, last, WARM_UP_ROWS, _wait_briefly)
            hit_rates.append(server.counters().since(before).hit_rate("device"))
            first = last
        elapsed_s = time.monotonic() - start_s
        return dataclasses.replace(row, warm_up_s=elapsed_s, is_steady=is_steady(hit_rates))

    def _probe(self, server: ServerProcess) -> float:
        """A rate that this server can sustain, from the throughput of a short closed loop."""
        deadline = time.monotonic() + PROBE_S
        # The end of the trace: the load does not get that far in a default sweep.
        num_samples = self._trace.workload.num_samples
        first = num_samples * 31 // 32
        replayed = self._replay(
            server,
            first,
            first + num_samples,
            self._args.rows_per_request,
            lambda: _wait_briefly() or time.monotonic() >= deadline,
        )
        rate = PROBE_SHARE * replayed.num_requests / replayed.elapsed_s
        return float(f"{max(rate, 1):.2g}")

    def _replay(
        self, server: ServerProcess, first: int, last: int, rows: int, watch: Callable[[], bool]
    ) -> Replayed:
        return replay(
            server.port,
            MODEL,
            self._trace.workload,
            first_sample=first,
            last_sample=last,
            rows_per_request=rows,
            num_connections=NUM_CONNECTIONS,
            watch=watch,
        )

    def _load(self, server: ServerProcess, row: Row, first_sample: int) -> Row:
        """Run Locust once; returns the row with its figures."""
        samples = self._scratch / f"samples{SAMPLES_SUFFIX}"
        summary_file = self._scratch / "summary.json"
        summary_file.unlink(missing_ok=True)
        command = self._locust_command(server, row.rate, first_sample)
        command += ["--samples", str(samples), "--summary", str(summary_file)]
        log = self._logs / f"locust-{row.series}-{row.share_percent:g}-{row.rate:g}.log"
        limit_s = LEAD_IN_S + self._args.duration + DRAIN_S + 60
        before = server.counters()
        with log.open("wb") as output:
            try:
                subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # select waits to the microsecond, epoll in steps of 1 ms: requests go out
                    # closer to their planned time.
                    env={"GEVENT_BACKEND": "select", **child_environment()},
                    timeout=limit_s,
                    check=False,  # it also exits with 1 when the server is overloaded
                )
            except subprocess.TimeoutExpired:
                return dataclasses.replace(row, note=f"Locust did not end within {limit_s:g} s")
        if not summary_file.exists():
            return dataclasses.replace(row, note=f"Locust failed; {log} ends: {log_tail(log)}")
        counters = server.counters().since(before)
        summary = Summary(**json.loads(summary_file.read_text("utf-8")))
        self._keep_samples(row, read_columns(samples))
        return row.measured(summary, counters, self._args.error_threshold)

    def _locust_command(self, server: ServerProcess, rate: float, first_sample: int) -> list[str]:
        args = self._args
        return [
            *(sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py"))),
            *("--headless", "--only-summary", "--host", server.url, "--model", MODEL),
            *("--trace", str(self._scratch / "trace.npy"), "--first-sample", str(first_sample)),
            *("--rate", str(rate), "--duration", str(args.duration)),
            *("--lead-in", str(LEAD_IN_S), "--drain", str(DRAIN_S)),
            *("--rows-per-request", str(args.rows_per_request), "--arrivals", args.arrivals),
            *("--wire-format", args.wire_format, "--seed", str(args.seed)),
            *("--error-threshold", str(args.error_threshold)),
        ]

    def _keep_samples(self, row: Row, columns: Columns) -> None:
        count = len(columns["planned_s"])
        run = {"series": row.series, "share_percent": row.share_percent, "rate": row.rate}
        for name, values in {**{k: [v] * count for k, v in run.items()}, **columns}.items():
            self.sample_columns.setdefault(name, []).extend(values)


def is_steady(hit_rates: Sequence[float]) -> bool:
    """The last change from round to round is small."""
    return len(hit_rates) >= 2 and abs(hit_rates[-1] - hit_rates[-2]) < STEADY_CHANGE


def _wait_briefly() -> bool:
    time.sleep(0.02)
    return False
