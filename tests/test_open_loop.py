"""The open-loop plan, and the real locustfile against a server that stalls and fails on purpose."""

from __future__ import annotations

import csv
import heapq
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from loadtests.direct import get
from loadtests.open_loop import OpenLoop, plan_arrivals
from loadtests.samples import (
    Outcome,
    Samples,
    Summary,
    read_columns,
    summarize,
    write_columns,
)
from loadtests.server_process import ROOT, child_environment
from tests.fake_server import Answer, fake_server


def test_uniform_arrivals_keep_equal_gaps() -> None:
    assert plan_arrivals(4, 1, "uniform").tolist() == [0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_the_rate_and_gaps_like_independent_clients() -> None:
    planned = plan_arrivals(1000, 100, "poisson", seed=5)
    assert len(planned) == pytest.approx(100_000, rel=0.02)
    gaps = np.diff(planned)
    assert gaps.min() >= 0
    assert planned[-1] < 100
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
    assert (planned == plan_arrivals(1000, 100, "poisson", seed=5)).all()


@pytest.mark.parametrize("process", ["poisson", "uniform"])
@pytest.mark.parametrize(("rate", "lead_in_s"), [(0.01, 0), (0.01, 50), (3, 5)])
def test_something_is_always_due_in_the_measured_time(
    process: str, rate: float, lead_in_s: float
) -> None:
    for seed in range(50):
        planned = plan_arrivals(rate, 0.3, process, seed, lead_in_s=lead_in_s)
        assert (np.diff(planned) >= 0).all()
        assert -lead_in_s <= planned[0]
        assert 0 <= planned[-1] < 0.3


def test_uniform_arrivals_are_equal_across_the_lead_in() -> None:
    planned = plan_arrivals(4, 0.5, "uniform", lead_in_s=0.6)
    assert planned.tolist() == [-0.5, -0.25, 0, 0.25]


@pytest.mark.parametrize("lead_in_s", [-1, float("nan"), float("inf")])
def test_a_lead_in_that_is_no_length_is_refused(lead_in_s: float) -> None:
    with pytest.raises(ValueError, match="lead-in: expected a number from 0 up"):
        plan_arrivals(1, 1, lead_in_s=lead_in_s)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_is_no_positive_number_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate: expected a number above 0"):
        plan_arrivals(rate, 1)


def simulate(
    planned_s: Sequence[float], num_users: int, answered_at: Callable[[float], float]
) -> Samples:
    """Play the plan on a clock of its own; `answered_at` maps send to answer time."""
    plan = OpenLoop(np.array(planned_s, float))
    free_at = [0.0] * num_users
    while (arrival := plan.take()) is not None:
        index, due_s = arrival
        sent_s = max(heapq.heappop(free_at), due_s)
        plan.sent(index, sent_s)
        done_s = answered_at(sent_s)
        plan.settled(index, done_s, outcome=Outcome.OK, status=200, num_bytes=1)
        heapq.heappush(free_at, done_s)
    assert plan.is_settled
    return plan.samples()


def test_a_free_user_sends_on_time() -> None:
    samples = simulate([0, 1, 2], num_users=1, answered_at=lambda sent: sent + 0.5)
    assert (samples.sent_s - samples.planned_s).tolist() == [0, 0, 0]
    assert (samples.done_s - samples.planned_s).tolist() == [0.5, 0.5, 0.5]


def test_the_lateness_of_a_request_is_part_of_its_latency() -> None:
    samples = simulate([0, 1, 2], num_users=1, answered_at=lambda sent: sent + 2)
    assert samples.sent_s.tolist() == [0, 2, 4]
    assert (samples.done_s - samples.planned_s).tolist() == [2, 3, 4]


@pytest.mark.parametrize("num_users", [1, 8, 64])
def test_a_stall_is_in_the_figures_however_few_users_there_are(num_users: int) -> None:
    def frozen_from_4_to_6(sent_s: float) -> float:
        return (6.0 if 4 <= sent_s < 6 else sent_s) + 0.001

    planned = np.arange(1000) / 100
    summary = summarize(simulate(planned.tolist(), num_users, frozen_from_4_to_6), 10)
    assert summary.p50_ms < 2
    assert summary.p90_ms > 900
    assert summary.p99_ms > 1800


def samples_of(*answers: tuple[float, int, Outcome]) -> Samples:
    """Samples that were sent on time, one each 10 ms."""
    plan = OpenLoop(np.arange(len(answers)) / 100)
    for latency_s, status, outcome in answers:
        arrival = plan.take()
        assert arrival is not None
        index, due_s = arrival
        plan.sent(index, due_s)
        plan.settled(index, due_s + latency_s, outcome=outcome, status=status, num_bytes=0)
    return plan.samples()


def test_failures_never_enter_the_latency_figures() -> None:
    ok, bad = (0.1, 200, Outcome.OK), (0.001, 503, Outcome.BAD_STATUS)
    summary = summarize(samples_of(*[ok, bad] * 50), duration_s=1)
    assert summary.p50_ms == pytest.approx(100)
    assert summary.error_rate == 0.5
    assert summary.num_overload_errors == 50
    assert summary.errors_above(0.01)


def test_one_stall_is_in_the_p99_and_not_in_the_p99_of_most_windows() -> None:
    latencies = [0.002 if index % 50 else 0.004 for index in range(1000)]
    latencies[400:430] = [0.1] * 30
    samples = samples_of(*((latency_s, 200, Outcome.OK) for latency_s in latencies))
    summary = summarize(samples, duration_s=10)
    assert summary.p99_ms == pytest.approx(100)
    assert summary.p99_windows_ms == pytest.approx(4)


def test_a_window_without_a_success_counts_as_the_slowest() -> None:
    ok, bad = (0.002, 200, Outcome.OK), (0.001, 503, Outcome.BAD_STATUS)
    assert summarize(samples_of(*[ok] * 60, *[bad] * 40), 1).p99_windows_ms == pytest.approx(2)
    assert np.isnan(summarize(samples_of(*[ok] * 40, *[bad] * 60), 1).p99_windows_ms)


def test_what_was_not_sent_or_not_answered_is_an_error() -> None:
    plan = OpenLoop(np.array([0.0, 0.1, 0.2, 0.3]))
    for _ in range(2):
        arrival = plan.take()
        assert arrival is not None
        plan.sent(arrival[0], arrival[1])
    plan.settled(0, 0.05, outcome=Outcome.OK, status=200, num_bytes=1)
    summary = summarize(plan.samples(), duration_s=1)
    assert not plan.is_settled
    assert (summary.num_ok, summary.num_errors, summary.num_overload_errors) == (1, 3, 3)
    assert summary.is_overloaded


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_samples_survive_a_file(tmp_path: Path, suffix: str) -> None:
    samples = samples_of((0.1, 200, Outcome.OK), (0.2, 0, Outcome.TIMEOUT))
    samples.sent_s[1] = np.nan
    path = tmp_path / f"samples{suffix}"
    write_columns(path, samples.columns())
    again = Samples.from_columns(read_columns(path))
    assert again.columns()["outcome"] == ["ok", "timeout"]
    assert np.array_equal(again.sent_s, samples.sent_s, equal_nan=True)
    assert again.status.tolist() == [200, 0]


@dataclass(frozen=True)
class LocustRun:
    """What a run of the real locustfile left."""

    exit_code: int
    text: str
    summary: Summary
    samples: Samples


def start_locust(folder: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the locustfile in a process of its own, with one row in a request."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtests" / "locustfile.py")),
            *("--headless", "--only-summary", "--host", url, "--rows-per-request", "1"),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env=child_environment(),
        check=False,
    )


def run_locust(folder: Path, url: str, *options: str) -> LocustRun:
    """Run it on a trace of one row; what it measured is read back from its files."""
    np.save(folder / "trace.npy", np.zeros((100, 26), np.int64))
    process = start_locust(
        *(folder, url, "--trace", "trace.npy", "--samples", "samples.csv"),
        *("--summary", "summary.json", *options),
    )
    assert (folder / "summary.json").exists(), process.stderr
    return LocustRun(
        process.returncode,
        process.stdout,
        Summary(**json.loads((folder / "summary.json").read_text())),
        Samples.from_columns(read_columns(folder / "samples.csv")),
    )


def test_figures_are_those_of_the_raw_samples_and_not_rounded(tmp_path: Path) -> None:
    script = [Answer(0.123)] * 50 + [Answer(1.499)] + [Answer(0.123)] * 49
    with fake_server(script) as server:
        run = run_locust(
            tmp_path, server.url, "--rate", "50", "--duration", "2", "--arrivals", "uniform"
        )
    summary = run.summary
    assert run.exit_code == 0
    assert summary.num_ok == 100
    assert 123 <= summary.p50_ms <= summary.p90_ms <= summary.p99_ms <= summary.max_ms
    assert summary.max_ms >= 1499
    latency_ms = np.sort(run.samples.done_s - run.samples.planned_s) * 1000
    assert summary.p50_ms == pytest.approx(latency_ms[49], abs=0.001)
    assert summary.p90_ms == pytest.approx(latency_ms[89], abs=0.001)
    assert summary.p99_ms == pytest.approx(latency_ms[98], abs=0.001)
    assert summary.max_ms == pytest.approx(latency_ms[99], abs=0.001)
    assert f"p99 {summary.p99_ms:.2f}" in run.text
    assert "nearest rank" in run.text


@pytest.mark.parametrize("wire_format", ["binary", "json"])
def test_fast_errors_do_not_improve_the_figures(tmp_path: Path, wire_format: str) -> None:
    with fake_server([Answer(0.001, status=503), Answer(0.1)]) as server:
        run = run_locust(
            *(tmp_path, server.url, "--rate", "60", "--duration", "2"),
            *("--wire-format", wire_format),
        )
    assert run.exit_code == 1
    assert run.summary.error_rate == pytest.approx(0.5, abs=0.01)
    is_ok = run.samples.status == 200
    latency_ms = np.sort((run.samples.done_s - run.samples.planned_s)[is_ok]) * 1000
    assert latency_ms[0] >= 100
    rank = math.ceil(0.99 * is_ok.sum())
    assert run.summary.p99_ms == pytest.approx(latency_ms[rank - 1], abs=0.001)
    assert "(50.00%), allowed 1.00%" in run.text
    with (tmp_path / "samples.csv").open() as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert set(statuses) == {"200", "503"}


def test_errors_below_the_threshold_are_allowed(tmp_path: Path) -> None:
    with fake_server([Answer(0.001, status=503), *[Answer(0.001)] * 9]) as server:
        options = ("--rate", "100", "--duration", "1", "--error-threshold", "0.2")
        run = run_locust(tmp_path, server.url, *options)
    assert run.exit_code == 0
    assert 0.05 < run.summary.error_rate < 0.15


def test_an_answer_that_lacks_scores_is_an_error(tmp_path: Path) -> None:
    with fake_server([Answer(0.001, rows=0)]) as server:
        run = run_locust(tmp_path, server.url, "--rate", "50", "--duration", "0.5")
    assert run.exit_code == 1
    assert run.summary.num_ok == 0
    assert set(run.samples.columns()["outcome"]) == {"incomplete"}


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with fake_server([Answer(0)]) as server:
        url = server.url
    run = run_locust(tmp_path, url, "--rate", "50", "--duration", "0.5")
    assert run.exit_code == 1
    assert set(run.samples.columns()["outcome"]) == {"connection"}


def test_without_a_trace_a_server_that_is_not_there_ends_the_run(tmp_path: Path) -> None:
    with fake_server([Answer(0)]) as server:
        url = server.url
    process = start_locust(tmp_path, url)
    assert process.returncode == 1
    assert f"the load test cannot begin: {url}/v2/tables: " in process.stderr
    assert "Traceback" not in process.stderr


def test_a_server_without_tables_ends_the_run(tmp_path: Path) -> None:
    with fake_server([Answer(0)]) as server:
        process = start_locust(tmp_path, server.url)
        message = f"the load test cannot begin: {server.url}/v2/tables: the server has no tables"
    assert process.returncode == 1
    assert message in process.stderr
    assert "Traceback" not in process.stderr


def test_a_trace_of_the_wrong_shape_ends_the_run(tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", np.zeros(100))
    process = start_locust(tmp_path, "http://127.0.0.1:9", "--trace", "trace.npy")
    assert process.returncode == 1
    assert "trace.npy: expected int64 [samples, tables], got float64 (100,)" in process.stderr


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--zipf-exponent", "nan", "expected a number from 0 up, got 'nan'"),
        ("--error-threshold", "2", "expected a number from 0 to 1, got '2'"),
        ("--rate", "0", "expected a number above 0, got '0'"),
        ("--rows-per-request", "0", "expected a whole number from 1 up, got 0"),
    ],
)
def test_a_bad_option_ends_the_run(tmp_path: Path, option: str, text: str, message: str) -> None:
    process = start_locust(tmp_path, "http://127.0.0.1:9", option, text)
    assert process.returncode == 2
    assert message in process.stderr


def test_no_request_goes_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with fake_server([Answer(0)]) as server:
        assert get(f"{server.url}/v2/tables", timeout_s=30) == b'{"tables":[]}'
        process = start_locust(tmp_path, server.url)
    assert "the server has no tables" in process.stderr


def test_time_outs_are_errors(tmp_path: Path) -> None:
    with fake_server([Answer(0.001), Answer(30)]) as server:
        options = ("--rate", "20", "--duration", "0.5", "--request-timeout", "2")
        run = run_locust(tmp_path, server.url, *options, "--arrivals", "uniform")
    assert run.exit_code == 1
    assert sorted(run.samples.columns()["outcome"]) == ["ok"] * 5 + ["timeout"] * 5
    is_ok = run.samples.outcome == Outcome.OK
    latency_ms = (run.samples.done_s - run.samples.planned_s)[is_ok] * 1000
    assert run.summary.max_ms == pytest.approx(latency_ms.max(), abs=0.001)


def test_a_frozen_server_shows_in_p90_and_p99(tmp_path: Path) -> None:
    with fake_server([Answer(0.002)]) as server:

        def freeze() -> None:
            server.wait_for_first_request()
            time.sleep(1)
            server.freeze()
            time.sleep(2)
            server.thaw()

        freezer = threading.Thread(target=freeze)
        freezer.start()
        run = run_locust(tmp_path, server.url, "--rate", "100", "--duration", "6")
        freezer.join()
    assert run.exit_code == 0
    assert run.summary.p99_ms >= 1800
    assert run.summary.p90_ms > 100
    assert "open loop" in run.text
    assert f"planned {run.summary.planned_rate:.1f}/s, achieved" in run.text
