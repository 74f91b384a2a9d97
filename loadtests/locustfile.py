"""Open-loop load test of the demo model with Locust.

Run it with `locust -f loadtests/locustfile.py --headless --host http://127.0.0.1:8000 --rate 200`;
`hotshelf sweep` does so for every point. The users take requests from one plan (`open_loop`), so
the rate does not fall when the server gets slower. Locust's own statistics count from the real send
time and round; the summary printed at the end is made from the raw samples and is the one to
believe.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from argparse import ArgumentParser
from http.client import HTTPException
from pathlib import Path
from typing import Any

import gevent
import numpy as np
from gevent.event import Event
from geventhttpclient.client import HTTPClientPool
from locust import FastHttpUser, task
from locust import events as locust_events
from locust.env import Environment
from locust.exception import StopUser

from loadtests.direct import get
from loadtests.encoding import HEADER_LENGTH, Encoder
from loadtests.open_loop import PROCESSES, OpenLoop, plan_arrivals
from loadtests.option_types import (
    fraction,
    number_above_0,
    number_from_0,
    whole_from_0,
    whole_from_1,
)
from loadtests.percentiles import METHOD
from loadtests.samples import Outcome, Summary, summarize, write_columns
from loadtests.workloads import (
    NUM_DENSE,
    Workload,
    WorkloadError,
    dense_features,
    make_workload,
)

DEFAULT_USERS = 64
MAX_CONNECTIONS = 4096


def _add_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("Hotshelf", "The open-loop plan and its requests.")
    add = group.add_argument
    add("--rate", type=number_above_0, default=100.0, help="requests planned per second (100)")
    add("--duration", type=number_above_0, default=10.0, help="seconds of planned requests (10)")
    add(
        "--lead-in",
        type=number_from_0,
        default=0.0,
        help="seconds of load before that (0)",
    )
    add("--arrivals", choices=PROCESSES, default="poisson", help="gaps between requests (poisson)")
    add("--rows-per-request", type=whole_from_1, default=16, help="rows in each request (16)")
    add("--wire-format", choices=("binary", "json"), default="binary", help="tensors on the wire")
    add("--model", default="dlrm", help="name of the model (dlrm)")
    add("--trace-profile", choices=("ads", "zipf"), default="ads", help="how keys repeat (ads)")
    add("--zipf-exponent", type=number_from_0, default=1.0, help="of the zipf profile (1.0)")
    add("--trace", default="", help="a .npy file of keys int64 [n, tables] instead of a profile")
    add("--first-sample", type=whole_from_0, default=0, help="where in the trace to begin (0)")
    add("--seed", type=whole_from_0, default=0, help="seed of the plan and of the trace (0)")
    add("--request-timeout", type=number_above_0, default=30.0, help="seconds without a byte (30)")
    add("--drain", type=number_from_0, default=5.0, help="seconds to wait after the plan's end (5)")
    add("--error-threshold", type=fraction, default=0.01, help="share of errors for exit 1 (0.01)")
    add("--samples", default="", help="write the raw samples to this .csv or .parquet file")
    add("--summary", default="", help="write the summary to this .json file")
    parser.set_defaults(num_users=DEFAULT_USERS, spawn_rate=DEFAULT_USERS)


class Run:
    """One run of the plan: what the users share, and its end."""

    def __init__(self, options: Any, workload: Workload) -> None:
        self.options = options
        self.workload = workload
        self.encoder = Encoder(
            rows=options.rows_per_request,
            num_tables=workload.keys.shape[1],
            num_dense=NUM_DENSE,
            is_binary=options.wire_format == "binary",
        )
        self.plan = OpenLoop(
            plan_arrivals(
                options.rate,
                options.duration,
                options.arrivals,
                options.seed,
                lead_in_s=options.lead_in,
            )
        )
        # One pool for all users hands out the connection used last, so that few go idle.
        self.pool = HTTPClientPool(
            concurrency=MAX_CONNECTIONS,
            network_timeout=options.request_timeout,
            connection_timeout=options.request_timeout,
        )
        self.has_started = Event()
        self.is_over = Event()
        self._start_s = 0.0

    def start(self) -> None:
        """Begin the plan's clock, at `-lead_in`; every user is waiting."""
        # A full collection over all that Locust imports takes tens of ms, in which nothing is sent.
        gc.collect()
        gc.freeze()
        self._start_s = time.perf_counter() + self.options.lead_in
        self.has_started.set()

    def now_s(self) -> float:
        """Seconds since the start of the measured time."""
        return time.perf_counter() - self._start_s

    def wait_until(self, planned_s: float) -> None:
        """Yield until an arrival is due; return at once when it is late."""
        wait_s = planned_s - self.now_s()
        if wait_s > 0:
            gevent.sleep(wait_s)

    def body(self, index: int) -> bytes:
        """The body of arrival `index`."""
        rows = self.encoder.rows
        return self.encoder.body(
            *self.workload.rows(self.options.first_sample + index * rows, rows)
        )

    def settle(
        self, index: int, outcome: Outcome, status: int, num_bytes: int, now_s: float
    ) -> None:
        """Record what became of arrival `index`."""
        self.plan.settled(index, now_s, outcome=outcome, status=status, num_bytes=num_bytes)
        if self.plan.is_settled:
            self.is_over.set()

    def summary(self) -> Summary:
        """The figures so far."""
        return summarize(self.plan.samples(), self.options.duration)


class Runs:
    """The run that this process performs now; Locust makes the users, so they find it here."""

    current: Run | None = None


class OpenLoopUser(FastHttpUser):
    """Takes the next planned request, waits until it is due, sends it, records it."""

    def __init__(self, environment: Environment) -> None:
        assert Runs.current is not None
        self._run = Runs.current
        self.client_pool = self._run.pool
        self.host = (environment.host or "").rstrip("/")
        super().__init__(environment)
        self._path = f"/v2/models/{self._run.options.model}/infer"

    @task
    def infer(self) -> None:
        """One request of the plan; stops the user when none is left."""
        run = self._run
        run.has_started.wait()
        arrival = run.plan.take()
        if arrival is None:
            raise StopUser
        index, planned_s = arrival
        body = run.body(index)
        run.wait_until(planned_s)
        run.plan.sent(index, run.now_s())
        client: Any = self.client  # Locust's hints do not know bodies of bytes
        with client.post(
            self._path, data=body, headers=run.encoder.headers, name="infer", catch_response=True
        ) as response:
            now_s = run.now_s()
            content = response.content or b""
            outcome = _outcome(run.encoder, response, content)
            if outcome == Outcome.INCOMPLETE:
                response.failure("the answer does not hold a score for every row")
            run.settle(index, outcome, response.status_code, len(content), now_s)


def _outcome(encoder: Encoder, response: Any, content: bytes) -> Outcome:
    if response.status_code == 0:
        # The client wraps what it would try again; it tries each request once.
        cause = getattr(response.error, "original", response.error)
        is_timeout = isinstance(cause, (TimeoutError, gevent.Timeout))
        return Outcome.TIMEOUT if is_timeout else Outcome.CONNECTION
    if response.status_code != 200:
        return Outcome.BAD_STATUS
    is_complete = encoder.is_complete(response.headers.get(HEADER_LENGTH), content)
    return Outcome.OK if is_complete else Outcome.INCOMPLETE


def _prepare(environment: Environment, **_: Any) -> None:
    options: Any = environment.parsed_options
    if options.master or options.worker or options.processes:
        sys.exit("the open-loop plan needs one Locust process: leave out --master and --processes")
    if not environment.host:
        sys.exit("name the server with --host, for example --host http://127.0.0.1:8000")
    try:
        Runs.current = Run(options, _workload(environment.host, options))
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        # Locust logs other exceptions of a listener and waits for a run that never starts.
        sys.exit(f"the load test cannot begin: {error}")


def _begin_with_all_users(environment: Environment, **_: Any) -> None:
    def begin(**_: Any) -> None:
        run = Runs.current
        if run is not None and not run.has_started.is_set():
            run.start()
            gevent.spawn(_stop_at_end, environment, run)

    spawning_complete: Any = environment.events.spawning_complete
    spawning_complete.add_listener(begin)


def _stop_at_end(environment: Environment, run: Run) -> None:
    options = run.options
    run.is_over.wait(options.lead_in + options.duration + options.drain)
    runner = environment.runner
    assert runner is not None
    if options.headless or options.autoquit >= 0:
        runner.quit()
    else:
        runner.stop()


def _finish(environment: Environment, **_: Any) -> None:
    run = Runs.current
    if run is None:  # it could not begin
        return
    options = run.options
    summary = run.summary()
    print(format_summary(summary, options), flush=True)
    if options.samples:
        write_columns(Path(options.samples), run.plan.samples().columns())
    if options.summary:
        Path(options.summary).write_text(json.dumps(dataclasses.asdict(summary)), "utf-8")
    environment.process_exit_code = int(summary.errors_above(options.error_threshold))


def format_summary(summary: Summary, options: Any) -> str:
    """The summary as lines of text."""
    s = summary
    return "\n".join(
        [
            "",
            f"open loop, {options.arrivals} arrivals, latency from the planned send time",
            f"rate       planned {s.planned_rate:.1f}/s, achieved {s.achieved_rate:.1f}/s",
            f"latency    p50 {s.p50_ms:.2f}  p90 {s.p90_ms:.2f}  p99 {s.p99_ms:.2f}  "
            f"p99.9 {s.p99_9_ms:.2f}  max {s.max_ms:.2f} ms (over {s.num_ok} successes)",
            f"errors     {s.num_errors} of {s.num_planned} ({s.error_rate:.2%}), "
            f"allowed {options.error_threshold:.2%}; they are not in the latency figures",
            f"sent late  p99 {s.lateness_p99_ms:.2f} ms after the planned time",
            f"method     {METHOD}",
            "",
        ]
    )


def _workload(host: str, options: Any) -> Workload:
    if options.trace:
        keys = np.load(options.trace, mmap_mode="r")
        if keys.dtype != np.int64 or keys.ndim != 2 or keys.size == 0:
            raise WorkloadError(
                f"{options.trace}: expected int64 [samples, tables], got {keys.dtype} {keys.shape}"
            )
        return Workload(keys, dense_features(len(keys), options.seed))
    return make_workload(
        read_table_rows(host),
        profile=options.trace_profile,
        zipf_exponent=options.zipf_exponent,
        seed=options.seed,
    )


def read_table_rows(host: str) -> list[int]:
    """Rows of each table of the server, by table name."""
    url = f"{host.rstrip('/')}/v2/tables"
    try:
        tables = json.loads(get(url, timeout_s=30))["tables"]
    except OSError as error:
        raise OSError(f"{url}: {error}") from error
    if not tables:
        raise WorkloadError(f"{url}: the server has no tables")
    return [table["num_rows"] for table in sorted(tables, key=lambda table: str(table["name"]))]


events: Any = locust_events
events.init_command_line_parser.add_listener(_add_options)
events.init.add_listener(_begin_with_all_users)
events.test_start.add_listener(_prepare)
events.test_stop.add_listener(_finish)
