"""`make gpu-check` on the double, where all of it runs and no time means anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_check
from benchmarks.gpu import batch_tables, correctness, demo, facts, rows, slabs
from benchmarks.gpu.check import QUICK, Check, Scale
from benchmarks.gpu.report import Aim, Figure, PartReport, ResultsFile, summary, table
from tests.cuda_double.machine import MEMORY_ALLOCATION, Machine, MachineConfig
from tests.gpu_check_double import measuring_cupy_of

ALL = gpu_check.MEASURED


class Run:
    """One check of a double's machine, with all parts in this process."""

    def __init__(self, folder: Path, cupy: Any, scale: Scale = QUICK) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self.work = folder / "work"
        self.work.mkdir()
        self._cupy = cupy
        self._scale = scale

    def check(self, results: ResultsFile) -> Check:
        return Check(
            results,
            work=self.work,
            deadline_s=time.monotonic() + 60,
            scale=self._scale,
            cupy=self._cupy,
            torch_device="cpu",
        )

    def run_part(self, name: str, results: ResultsFile, work: Path, limit_s: float) -> str | None:
        return None if gpu_check.measure(name, self.check(results)) == 0 else "failed"

    def run(self, *parts: str) -> tuple[int, dict[str, Any]]:
        """The exit code and the JSON of some parts."""
        reports = gpu_check.run_parts(parts, out=self.out, work=self.work, run_part=self.run_part)
        code = gpu_check.conclude(reports, facts.machine_facts(self._cupy, 0), self.out)
        return code, json.loads((self.out / "gpu-check.json").read_text(encoding="utf-8"))


@pytest.fixture
def machine() -> Machine:
    return Machine(MachineConfig(total_bytes=1 << 31))


@pytest.fixture
def run(tmp_path: Path, machine: Machine) -> Run:
    return Run(tmp_path, measuring_cupy_of(machine))


def figures_of(content: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    [found] = [one for one in content["parts"] if one["name"] == part]
    return {figure["what"]: figure for figure in found["figures"]}


def notes_of(content: dict[str, Any], part: str) -> str:
    [found] = [one for one in content["parts"] if one["name"] == part]
    return "\n".join(found["notes"])


def test_all_parts_give_figures_with_their_ceilings(
    run: Run, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    code, content = run.run(*ALL)
    machine.run_everything()
    machine.check()
    assert code == content["exit_code"] == 0
    assert content["machine"]["is_double"]
    hits = figures_of(content, "hits")
    assert len(hits) == 2 * len(rows.ROW_BYTES)
    judged = [what for what, figure in hits.items() if figure["aim"]]
    assert judged == [f"hits, rows of {size} B: kernel" for size in (512, 1024, 2048)]
    misses = figures_of(content, "misses")
    assert misses["misses, rows of 528 B (not 128-byte aligned): kernel"]["verdict"] == "reported"
    assert misses["misses, rows of 512 B: kernel"]["ceiling_is"] == "pinned copy"
    assert len(figures_of(content, "managed")) == 2
    batch = figures_of(content, "batch")
    assert batch["26 x 64 keys, all hits: end to end, p50"]["aim"] == "<= 1.00"
    assert batch["26 x 64 keys, 10 % misses: end to end, p50"]["aim"] is None
    assert {"planning", "enqueuing", "waiting", "on device"} <= {
        what.removeprefix("26 x 64 keys, all hits: ") for what in batch
    }
    assert "all hits: 100.0 % were in the device tier" in notes_of(content, "batch")
    assert len(figures_of(content, "demo")) == 3 * len(demo.TABLE_SHARES)
    assert "the ONNX Runtime CUDA path was not run" in notes_of(content, "demo")
    shown = capsys.readouterr().out
    assert "NOT A GPU: the device object is a double" in shown
    assert "failed parts: none" in shown
    for part in ALL:
        assert all(what in shown for what in figures_of(content, part))


def test_a_tenth_of_the_keys_misses(tmp_path: Path) -> None:
    batches = batch_tables.batches_with_misses(1000, 100, 30, np.random.default_rng(0))
    assert {int((keys >= 100).sum()) for keys in batches} == {166}
    assert max(int(keys.max()) for keys in batches) < 1000


def test_slots_are_distinct_and_all_over_the_slab() -> None:
    slots = slabs.distinct_slots(np.random.default_rng(0), 1000, 99)
    assert len(set(slots.tolist())) == 99
    assert sorted(slots // 10) == list(range(99))


def test_words_tell_where_they_are() -> None:
    words = slabs.words_at(0, 64)
    assert len(set(words.tolist())) == 64
    assert slabs.rows_at(np.array([3, 1]), 8).tolist() == words.reshape(8, 8)[[3, 1]].tolist()
    assert ((words.view(np.float32) >= 1) & (words.view(np.float32) < 2)).all()


# What fails, and what is left out


def test_a_part_that_fails_is_named_and_the_others_are_run(
    run: Run, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.fail("runtime.hostRegister", MEMORY_ALLOCATION, 1)
    code, content = run.run("hits", "misses")
    assert code == content["exit_code"] == 1
    failures = {part["name"]: part["failure"] for part in content["parts"]}
    assert failures["hits"].startswith("OutOfMemoryError: ")
    assert failures["misses"] is None
    assert figures_of(content, "misses")
    captured = capsys.readouterr()
    assert "FAILED (hits): OutOfMemoryError" in captured.out
    assert "failed parts: hits" in captured.out
    assert "Traceback" in captured.err


def test_wrong_rows_are_no_figures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "fill_host", lambda memory: memory.fill(0))
    code, content = run.run("misses")
    assert code == 1
    assert figures_of(content, "misses") == {}
    [part] = content["parts"]
    assert part["failure"].startswith("WrongResultError: rows of 64 bytes from position 0 on")


@pytest.mark.parametrize(
    ("scale", "has_managed_memory", "reason"),
    [
        (
            replace(QUICK, min_free_for_managed_bytes=1 << 40),
            True,
            "expected at least 1099511627776",
        ),
        (QUICK, False, "the GPU cannot use managed memory while the CPU does"),
    ],
)
def test_managed_memory_is_left_alone_where_it_is_not_safe(
    tmp_path: Path, machine: Machine, scale: Scale, has_managed_memory: bool, reason: str
) -> None:
    cupy = measuring_cupy_of(machine, has_managed_memory=has_managed_memory)
    cupy.cuda.malloc_managed = None
    code, content = Run(tmp_path, cupy, scale).run("managed")
    assert code == 0
    [part] = content["parts"]
    assert reason in part["skipped"]


def test_a_late_part_measures_a_few_rounds_only(run: Run, tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "results")
    check = Check(
        results, work=run.work, deadline_s=0, scale=replace(QUICK, num_rounds=1000),
        cupy=measuring_cupy_of(Machine(MachineConfig())), clock=lambda: 1,
    )  # fmt: skip
    rows.run_misses(check)
    report = PartReport("misses")
    results.read_into(report)
    assert {figure["details"]["num_rounds"] for figure in report.figures} == {3}


def test_parts_for_which_no_time_is_left_are_failures(tmp_path: Path) -> None:
    now_s = [0.0]

    def run_part(name: str, results: ResultsFile, work: Path, limit_s: float) -> str | None:
        now_s[0] += 40
        return None

    parts = gpu_check.run_parts(
        ["hits", "misses"], out=tmp_path, work=tmp_path, run_part=run_part, budget_s=45,
        clock=lambda: now_s[0],
    )  # fmt: skip
    assert [part.failure for part in parts] == [None, "not run: no time is left"]


# The command


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments],
        cwd=correctness.ROOT, capture_output=True, text=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip


CUPY = """
import sys
from tests.cuda_double.machine import Machine, MachineConfig
from tests.gpu_check_double import measuring_cupy_of

sys.modules[__name__] = measuring_cupy_of(Machine(MachineConfig()))
"""


def test_the_command_runs_parts_in_processes_and_writes_to_out(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(CUPY, encoding="utf-8")
    out = tmp_path / "new" / "out"
    ended = command(
        "--quick", "--only", "managed", "misses",
        PYTHONPATH=f"{tmp_path}:{correctness.ROOT}", OUT=str(out),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    content = json.loads((out / "gpu-check.json").read_text(encoding="utf-8"))
    assert content["exit_code"] == 0
    assert [part["name"] for part in content["parts"]] == ["misses", "managed"]
    assert len(figures_of(content, "misses")) == 2 * (len(rows.ROW_BYTES) + 1)
    assert "misses, rows of 2048 B: kernel that fills" in ended.stdout
    assert "failed parts: none" in ended.stdout


def has_gpu() -> bool:
    return gpu_check.find_problem(0) is None


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    ended = command()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"gpu-check: {gpu_check.find_problem(0)}\n"


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_a_part_in_a_process_of_its_own_leaves_its_failure(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "results")
    failure = gpu_check.in_child(0)("misses", results, tmp_path, 60)
    report = PartReport("misses")
    results.read_into(report)
    assert failure == "it ended with exit code 1"
    assert report.failure is not None
    assert report.failure.startswith("DeviceError: device 'cuda:0' cannot be used: ")


def test_a_part_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "results")
    assert gpu_check.in_child(0)("hits", results, tmp_path, 0) == "it did not end within 0 s"


@pytest.mark.parametrize(
    ("config", "index", "problem"),
    [
        (MachineConfig(driver_version=0), 0, "there is no NVIDIA driver"),
        (MachineConfig(num_devices=2), 2, "there is no GPU 2; found are 2"),
        (MachineConfig(), 0, None),
    ],
)
def test_what_is_wrong_with_the_machine_is_said(
    config: MachineConfig, index: int, problem: str | None
) -> None:
    found = gpu_check.find_problem(index, measuring_cupy_of(Machine(config)))
    assert found == problem or (problem and found and found.startswith(problem))


def test_missing_packages_are_named() -> None:
    assert facts.missing_packages(("numpy", "no_such_package")) == ["no_such_package"]


# Right results


SUITE = """
import pytest
DEVICES = ("cpu", "cuda-double", "cuda")

@pytest.fixture(params=DEVICES)
def device(request):
    return request.param

def test_of_devices(device):
    assert {body}

def test_of_the_cpu():
    assert False, "not of a GPU"
"""


def suite(folder: Path, body: str) -> Path:
    tests = folder / "suite"
    tests.mkdir()
    (tests / "test_device.py").write_text(SUITE.format(body=body), encoding="utf-8")
    (tests / "test_other.py").write_text("raise SystemExit  # has no test of a GPU\n")
    (tests / "test_http.py").write_text("import no_such_package  # and DEVICES\n")
    return tests


def test_only_tests_of_the_gpu_are_run(tmp_path: Path) -> None:
    tests = suite(tmp_path, "device == 'cuda'")
    report = correctness.run_suites(tmp_path, 60, tests)
    assert (report.failure, report.notes) == (
        None,
        ["1 tests passed, 1 tests skipped, 0 tests failed"],
    )
    output = (tmp_path / "gpu-check-tests.txt").read_text(encoding="utf-8")
    assert "no_such_package is not installed" in output


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("device == 'cpu'", "pytest ended with exit code 1"),
        ("pytest.skip('no GPU')", "no test ran on the GPU"),
    ],
)
def test_nothing_is_measured_unless_the_tests_pass(
    tmp_path: Path, body: str, failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(name: str, results: ResultsFile, work: Path, limit_s: float) -> str | None:
        raise AssertionError("measured in spite of it")

    parts = gpu_check.run_parts(
        ["tests", "hits"], out=tmp_path, work=tmp_path, run_part=run_part,
        tests=suite(tmp_path, body),
    )  # fmt: skip
    assert [(part.name, part.failure) for part in parts] == [("tests", failure)]
    assert "test_device.py" in capsys.readouterr().out


SANITIZER = """#!/bin/sh
while [ "$1" != "{python}" ]; do shift; done
{command}
"""


@pytest.mark.parametrize(
    ("script", "failure", "skipped", "notes"),
    [
        (
            'case "$*" in *test_device.py*) echo 1 passed; echo ERROR SUMMARY: 0 errors ;; esac',
            None, None, ["1 passed", "ERROR SUMMARY: 0 errors"],
        ),
        (
            "echo 1 passed; echo ERROR SUMMARY: 3 errors; exit 86",
            "compute-sanitizer ended with exit code 86", None,
            ["1 passed", "ERROR SUMMARY: 3 errors"],
        ),
        ("echo 1 failed; exit 1", "compute-sanitizer ended with exit code 1", None, []),
        ("echo Error: device not supported", None, "compute-sanitizer could not run the", []),
        ("sleep 60", None, "compute-sanitizer did not end within 0 s", []),
    ],
)  # fmt: skip
def test_compute_sanitizer_runs_the_tests_of_the_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    failure: str | None,
    skipped: str | None,
    notes: list[str],
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER.format(python=sys.executable, command=script), encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    limit_s = 0.3 if "sleep" in script else 60
    report = correctness.run_sanitizer(tmp_path, limit_s, suite(tmp_path, "device == 'cuda'"))
    assert report.failure == failure
    assert report.notes == [f"compute-sanitizer memcheck: {note}" for note in notes]
    assert (report.skipped or "").startswith(skipped or "")


def test_without_compute_sanitizer_its_part_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    report = correctness.run_sanitizer(tmp_path, 60, tmp_path)
    assert report.skipped == "there is no compute-sanitizer, or no pytest"


# The demo


def test_a_torch_model_gives_the_demo_s_scores_over_http(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    results = ResultsFile(tmp_path / "results")
    check = Check(results, work=tmp_path, deadline_s=time.monotonic() + 60, scale=QUICK)
    model = demo.Demo(check, "torch")
    model.write()
    model.over_http(0.1, "cpu")
    report = PartReport("demo")
    results.read_into(report)
    latency, hits, rate = report.figures
    assert latency["what"] == "demo, 10% of the rows on the GPU: HTTP, request of 64, p50"
    assert latency["details"]["max_score_error"] < 1e-5
    assert 0 < hits["value"] < 100
    assert rate["value"] > 0


# The report


def test_an_aim_is_met_or_missed_and_a_missed_one_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_least, at_most = Aim(is_at_least=True, ratio=0.85), Aim(is_at_least=False, ratio=1.0)
    figures = [
        Figure("gather", 90.0, "GB/s", ceiling=100, ceiling_is="copy", ratio=0.9, aim=at_least),
        Figure("misses", 40.0, "GB/s", ceiling=50, ceiling_is="copy", ratio=0.8, aim=at_least),
        Figure("batch", 120.0, "us", ceiling=110, ceiling_is="torch", ratio=1.09, aim=at_most),
        Figure("demo", 1234.0, "us", low=1200.0, high=1300.0),
    ]
    assert [figure.verdict for figure in figures] == ["met", "missed", "missed", "reported"]
    part = PartReport("all", [figure.as_json() for figure in figures], ["a note"])
    assert table([part]).splitlines() == [
        "what    figure   p10 to p90    ceiling      ratio  aim      verdict",
        "------  -------  ------------  -----------  -----  -------  --------",
        "gather  90 GB/s                100 (copy)   0.90   >= 0.85  met",
        "misses  40 GB/s                50 (copy)    0.80   >= 0.85  missed",
        "batch   120 us                 110 (torch)  1.09   <= 1.00  missed",
        "demo    1234 us  1200 to 1300                               reported",
        "note (all): a note",
    ]
    assert summary([part]) == "aims: 1 met, 2 missed; failed parts: none"
    machine = facts.machine_facts(measuring_cupy_of(Machine(MachineConfig())), 0)
    assert gpu_check.conclude([part], machine, None) == 0


def test_what_a_stopped_part_has_written_is_kept(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "results")
    results.add("note", "first")
    with results.path.open("a", encoding="utf-8") as file:
        file.write('{"figure": {"what"')
    report = PartReport("hits")
    results.read_into(report)
    assert (report.notes, report.figures) == (["first"], [])
