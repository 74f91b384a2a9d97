"""The sweep: its warm-up, its judgements, its report, and one small real sweep."""

from __future__ import annotations

import csv
import dataclasses
import html
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loadtests.demo import write_demo
from loadtests.measure import PointMeasurer, Trace, is_steady
from loadtests.noise import Noise, measure_noise, write_noise
from loadtests.preload import preload, recent_rows
from loadtests.report import write_report
from loadtests.results import FAILED, Row, format_bytes, format_table, judge, write_summary
from loadtests.samples import Summary
from loadtests.server_process import (
    Counters,
    ServerFailedError,
    ServerProcess,
    child_environment,
    page_faults,
)
from loadtests.sweep import add_arguments, main
from loadtests.workloads import Workload

GOOD = Summary(
    planned_rate=100,
    achieved_rate=100,
    num_planned=1000,
    num_ok=1000,
    num_errors=0,
    num_overload_errors=0,
    error_rate=0.0,
    p50_ms=2.0,
    p90_ms=4.0,
    p99_ms=9.0,
    p99_windows_ms=8.0,
    p99_9_ms=12.0,
    max_ms=15.0,
    lateness_p99_ms=0.2,
)

NOISE = Noise(num_tasks=800, p50_ms=1.0, p99_ms=8.0, max_ms=12.5)


def run_cli(*arguments: str) -> int:
    """Run the command with these arguments."""
    parser = ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(arguments))


@given(
    arrays(np.int64, st.tuples(st.integers(1, 30), st.integers(1, 3)), elements=st.integers(0, 9))
)
def test_the_preload_is_what_a_replay_leaves_in_an_lru_cache(keys: np.ndarray) -> None:
    for size in (1, 4, 100):
        cache: OrderedDict[tuple[int, int], None] = OrderedDict()
        for sample in keys.tolist():
            for entry in enumerate(sample):
                cache[entry] = None
                cache.move_to_end(entry)
                if len(cache) > size:
                    cache.popitem(last=False)
        steps = recent_rows(keys, size)
        asked = {(t, row) for step in steps for t, rows in enumerate(step) for row in rows.tolist()}
        # Within one sample the order of the tables is open.
        if size >= keys.shape[1]:
            last = {entry: age for age, s in enumerate(keys.tolist()) for entry in enumerate(s)}
            assert sorted(last[e] for e in asked) == sorted(last[e] for e in cache)
        assert len(asked) == len(cache)


def test_the_preload_ends_with_the_newest_rows() -> None:
    keys = np.array([[5, 7], [1, 2], [3, 2], [1, 9]])
    older, newer = recent_rows(keys, 4)
    assert [rows.tolist() for rows in newer] == [[1], [9]]
    assert [rows.tolist() for rows in older] == [[3], [2]]


def test_steady_is_when_the_last_round_changed_little() -> None:
    assert not is_steady([])
    assert not is_steady([0.5])
    assert not is_steady([0.5, 0.6])
    assert is_steady([0.1, 0.600, 0.605])


def test_a_good_run_is_ok() -> None:
    assert judge(GOOD, 0.01) == ("ok", "")


def test_less_than_95_percent_of_the_planned_rate_is_overload() -> None:
    assert judge(dataclasses.replace(GOOD, achieved_rate=95.0), 0.01)[0] == "ok"
    slow = dataclasses.replace(GOOD, achieved_rate=94.9)
    assert judge(slow, 0.01) == ("overloaded", "95% of the planned rate")


def test_time_outs_and_503_are_overload_and_other_errors_a_failure() -> None:
    busy = dataclasses.replace(GOOD, num_errors=50, num_overload_errors=50, error_rate=0.05)
    assert judge(busy, 0.01) == ("overloaded", "error rate 5.0%")
    broken = dataclasses.replace(busy, num_overload_errors=20)
    assert judge(broken, 0.01) == ("failed", "30 of 1000 requests failed")
    assert judge(broken, 0.05)[0] == "ok"


def test_counters_give_rates_of_what_happened_between() -> None:
    before = Counters({"device": 10, "host": 0, "source": 10, "absent": 0}, 100, 10, 5, 0)
    after = Counters({"device": 40, "host": 0, "source": 20, "absent": 0}, 140, 20, 8, None)
    change = after.since(before)
    assert change.hit_rate("device") == 0.75
    assert change.mean_batch_rows == 4
    assert (change.minor_faults, change.major_faults) == (3, None)
    assert math.isnan(after.since(after).hit_rate("device"))


def test_page_faults_of_this_process_grow() -> None:
    minor, major = page_faults(os.getpid())
    assert minor is not None
    assert major is not None
    array = np.ones(2**22)
    later, _ = page_faults(os.getpid())
    assert later is not None
    assert later > minor
    assert array.sum() == 2**22


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (3_200_000, "3.05 MiB"), (320_000_000, "305 MiB")],
)
def test_bytes_are_readable(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


class FakeMachine:
    """A clock, and a task that takes 1 us for each unit of work, longer where it is disturbed."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """The time, which only work and sleep move."""
        return self._now_s

    def sleep(self, delay_s: float) -> None:
        """Do nothing for a while."""
        self._now_s += delay_s

    def task(self, count: int) -> None:
        """Work: eight times slower in 30 ms of each second, and once, at 2.5 s, stopped."""
        is_stopped = 2.501 < self._now_s < 2.507
        is_slow = 0.301 < self._now_s % 1 < 0.331
        self._now_s += count * 1e-6 * (50 if is_stopped else 8 if is_slow else 1)


def test_the_noise_is_how_much_longer_the_same_task_takes() -> None:
    machine = FakeMachine()
    noise = measure_noise(machine.task, now_s=machine.now_s, sleep=machine.sleep)
    assert noise.num_tasks == 800
    assert noise.p50_ms == pytest.approx(1.0, rel=0.01)
    assert noise.p99_ms == pytest.approx(8.0, rel=0.01)
    assert noise.max_ms == pytest.approx(50.0, rel=0.01)
    assert (noise.p99_stretch, noise.max_stretch) == pytest.approx((8, 50), rel=0.01)
    assert machine.now_s() == pytest.approx(4.0, abs=0.1)


def test_the_noise_survives_as_a_file_and_as_a_sentence(tmp_path: Path) -> None:
    write_noise(tmp_path / "noise.csv", NOISE)
    with (tmp_path / "noise.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert {name: float(value) for name, value in row.items()} == {
        **{"num_tasks": 800, "p50_ms": 1, "p99_ms": 8, "max_ms": 12.5},
        **{"p99_stretch": 8, "max_stretch": 12.5},
    }
    assert "a task of 1.0 ms took up to 8.0 ms at p99 on this machine (8.0 times" in str(NOISE)
    assert "p99 figures below about 8.0 ms, and differences of that size, are the" in str(NOISE)


def rows_of_a_sweep() -> list[Row]:
    """Two series of three sizes; one point is overloaded, one has failed."""
    lookups = {"device": 60, "host": 0, "source": 40, "absent": 0}
    counters = Counters(lookups, 1000, 100, 7, 0)
    rows = [
        Row(series, share, round(share * 1000), rate=100).measured(GOOD, counters, 0.01)
        for series in ("none", "host")
        for share in (1, 10, 100)
    ]
    slow = dataclasses.replace(GOOD, achieved_rate=50.0, p99_ms=900.0)
    rows[0] = Row("none", 1, 1000, rate=100).measured(slow, counters, 0.01)
    rows[5] = Row("host", 100, 100_000, rate=100, note="the server <ended>\nits log")
    return rows


def test_the_report_is_one_file_and_says_how_it_was_measured(tmp_path: Path) -> None:
    method = {"command": "hotshelf sweep --points 1"}
    write_report(tmp_path, rows_of_a_sweep(), NOISE, tmp_path, method)
    page = (tmp_path / "report.html").read_text()
    assert (tmp_path / "p99_vs_cache.png").stat().st_size > 10_000
    assert re.findall(r'src="(.{22})', page) == ["data:image/png;base64,"]
    assert "http" not in page
    assert "hotshelf sweep --points 1" in page
    for fact in ("open loop", "nearest rank", "processor", "cores", "memory", "repository on"):
        assert fact in page
    assert page.count('<tr class="overloaded">') == 1
    assert page.count('<tr class="failed">') == 1
    assert "overloaded: 50% of the planned rate" in page
    assert "the server &lt;ended&gt;" in page
    assert "nan" not in page
    assert html.escape(str(NOISE)) in page


def test_several_rates_draw_latency_against_throughput(tmp_path: Path) -> None:
    rows = [dataclasses.replace(row, rate=10 * i) for i, row in enumerate(rows_of_a_sweep(), 1)]
    write_report(tmp_path, rows, NOISE, tmp_path, {})
    assert [path.name for path in tmp_path.glob("*.png")] == ["p99_vs_rate.png"]


def test_a_failed_point_has_no_part_in_the_title(tmp_path: Path) -> None:
    rows = [dataclasses.replace(row, rate=140) for row in rows_of_a_sweep()]
    rows[5] = dataclasses.replace(rows[5], rate=0)
    write_report(tmp_path, rows, NOISE, tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    assert "Latency against cache size at 140 requests/s" in page
    assert "Latency against throughput" not in page


def test_a_sweep_in_which_nothing_worked_still_has_a_report(tmp_path: Path) -> None:
    rows = [Row("none", 1, 1000, rate=0, note="no server")]
    write_report(tmp_path, rows, NOISE, tmp_path, {})
    assert "failed: no server" in (tmp_path / "report.html").read_text()


def test_the_summary_leaves_unknown_figures_empty(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.csv", rows_of_a_sweep())
    with (tmp_path / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["state"] == "overloaded"
    assert float(rows[1]["p99_ms"]) == 9.0
    assert float(rows[1]["p99_windows_ms"]) == 8.0
    assert rows[5]["p99_ms"] == ""
    assert rows[5]["note"] == "the server <ended>\nits log"


def test_the_table_has_one_line_for_each_run() -> None:
    lines = format_table(rows_of_a_sweep()).splitlines()
    assert len(lines) == 7
    assert "p99 ms" in lines[0]
    assert lines[6].endswith("  failed      the server <ended>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rates", "10,20"), "--rates needs one size: give --points one number"),
        (("--rates", "1", "--rate", "2", "--points", "5"), "give --rate or --rates, not both"),
        ((), "has no model dlrm; write it with: hotshelf demo init"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run_cli("--repository", str(tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "locust" else find(name)
    )
    assert run_cli("--repository", str(tmp_path)) == 2
    assert "not installed: locust; in Hotshelf's folder: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--points", "1,x"), "expected a number above 0, got 'x'"),
        (("--points", "0"), "expected a number above 0, got '0'"),
        (("--series", "none,disk"), "expected some of none, host, got 'disk'"),
        (("--rows-per-request", "0"), "expected a whole number from 1 up, got 0"),
        (("--zipf-exponent", "nan"), "expected a number from 0 up, got 'nan'"),
        (("--zipf-exponent", "inf"), "expected a number from 0 up, got 'inf'"),
        (("--error-threshold", "nan"), "expected a number from 0 to 1, got 'nan'"),
        (("--error-threshold=-1",), "expected a number from 0 to 1, got '-1'"),
        (("--error-threshold", "2"), "expected a number from 0 to 1, got '2'"),
    ],
)
def test_a_bad_option_says_what_is_allowed(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_cli(*arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_sweep_of_real_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_demo(tmp_path / "demo", num_rows=20_000)
    exit_code = run_cli(
        *("--repository", str(tmp_path / "demo"), "--points", "1,100", "--series", "none"),
        *("--duration", "1", "--warm-up", "1", "--rows-per-request", "4", "--rate", "40"),
        *("--error-threshold", "0.1", "--out", str(tmp_path / "out")),
    )
    printed = capsys.readouterr().out
    assert exit_code == 0, printed
    [out] = (tmp_path / "out").iterdir()
    names = {path.name for path in out.iterdir()}
    assert {"p99_vs_cache.png", "report.html", "noise.csv"} <= names
    assert {"summary.csv", "samples.parquet"} <= names
    with (out / "summary.csv").open(newline="") as file:
        small, large = csv.DictReader(file)
    assert float(small["hit_rate_device"]) < 0.6
    assert float(large["hit_rate_device"]) > 0.8
    for row in (small, large):
        tiers = ("hit_rate_device", "hit_rate_host", "rate_source", "rate_absent")
        assert sum(float(row[tier]) for tier in tiers) == pytest.approx(1)
        assert float(row["hit_rate_host"]) == 0
        assert int(row["num_ok"]) > 20
        assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"]) <= float(row["max_ms"])
        assert float(row["mean_batch_rows"]) >= 4
    assert "100 %" in printed
    assert "With no server running, a task of" in printed
    assert f"picture: {out / 'p99_vs_cache.png'}\nreport: {out / 'report.html'}\n" in printed


@pytest.mark.slow
def test_an_interrupted_sweep_stops_what_it_started_and_keeps_what_it_measured(
    tmp_path: Path,
) -> None:
    write_demo(tmp_path / "demo", num_rows=20_000)
    command = [
        *(sys.executable, "-m", "server", "sweep", "--repository", str(tmp_path / "demo")),
        *("--points", "10", "--series", "none", "--rates", "30,40", "--duration", "2"),
        *("--warm-up", "1", "--error-threshold", "0.1", "--out", str(tmp_path / "out")),
    ]
    # In a process group of its own, as a shell starts it.
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, process_group=0
    ) as sweep:
        try:
            second_run = "*/logs/locust-none-10-40.log"
            children: list[psutil.Process] = []
            while len(children) < 2 or not list((tmp_path / "out").glob(second_run)):
                assert sweep.poll() is None
                time.sleep(0.05)
                children = psutil.Process(sweep.pid).children(recursive=True)
            os.killpg(sweep.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
            printed, _ = sweep.communicate(timeout=60)
        finally:
            sweep.kill()
    assert sweep.returncode == 130
    assert len(children) == 2  # the server and Locust
    assert not any(child.is_running() for child in children)
    [out] = (tmp_path / "out").iterdir()
    with (out / "summary.csv").open(newline="") as file:
        [row] = csv.DictReader(file)
    assert row["rate"] == "30.0"
    assert int(row["num_ok"]) > 20
    assert "interrupted" in (out / "report.html").read_text()
    assert str(out / "report.html") in printed


def test_a_server_that_does_not_start_is_a_failed_point_at_the_rate_of_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> ServerProcess:
        raise ServerFailedError("the server did not start")

    monkeypatch.setattr("loadtests.measure.ServerProcess", fail)
    keys, dense = np.zeros((8, 1), np.int64), np.zeros((8, 13), np.float32)
    trace = Trace(["t"], [10], 64, Workload(keys, dense))
    with PointMeasurer(Namespace(repository=tmp_path), trace, tmp_path / "out") as measurer:
        measurer.measure("none", 10, [140.0], on_stage=lambda _: None)
        measurer.measure("none", 20, [], on_stage=lambda _: None)
    assert [(row.rate, row.state) for row in measurer.rows] == [(140, FAILED), (0, FAILED)]


def test_the_settings_of_the_shell_do_not_reach_a_measured_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOTSHELF_IO", "buffered")
    monkeypatch.setenv("LANG", "C")
    environment = child_environment()
    assert environment["LANG"] == "C"
    assert not [name for name in environment if name.startswith("HOTSHELF_")]


def test_the_preload_asks_for_all_rows_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[np.ndarray]] = {"a": [], "b": [], "c": []}
    monkeypatch.setattr(
        "loadtests.preload._look_up", lambda port, table, keys: asked[table].append(keys)
    )
    preload(0, ["a", "b", "c"], [[np.arange(20_000), np.arange(3), np.arange(0)]])
    assert sorted(map(len, asked["a"])) == [3616, 8192, 8192]
    assert sorted(np.concatenate(asked["a"]).tolist()) == list(range(20_000))
    assert [keys.tolist() for keys in asked["b"]] == [[0, 1, 2]]
    assert asked["c"] == []


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path / "demo", num_rows=2000)
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / "file" / "out"
    assert run_cli("--repository", str(tmp_path / "demo"), "--out", str(out)) == 1
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("hotshelf sweep: ")
    assert "Not a directory" in line


def test_a_table_that_is_broken_is_named_before_the_sweep_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path / "demo", num_rows=2000)
    (tmp_path / "demo" / "tables" / "category_03" / "rows.bin").write_bytes(b"short")
    assert run_cli("--repository", str(tmp_path / "demo")) == 2
    assert "category_03" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_does_not_serve_the_model_is_a_failed_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path / "demo", num_rows=20_000)
    (tmp_path / "demo" / "models" / "dlrm" / "1" / "model.onnx").write_bytes(b"no model")
    exit_code = run_cli(
        *("--repository", str(tmp_path / "demo"), "--points", "10", "--series", "none"),
        *("--rate", "10", "--out", str(tmp_path / "out")),
    )
    assert exit_code == 1
    captured = capsys.readouterr()
    assert "model.onnx" in captured.err
    assert "failed" in captured.out
    [out] = (tmp_path / "out").iterdir()
    assert "failed" in (out / "report.html").read_text()
