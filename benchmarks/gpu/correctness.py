"""Right results first: the tests on the real GPU, then the kernels under compute-sanitizer."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.report import PartReport

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Files with tests on several devices, of which one is a real GPU.
_OF_GPU = re.compile(r"\bDEVICES\b")
_OF_KERNELS = re.compile(r"test_(kernel|device)")
# What else is installed for pytest is not of this project, and may change what tests do.
_NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_MEMCHECK_ERROR = 86
_LAST_CHARACTERS = 6000


@dataclass(frozen=True, slots=True)
class Finished:
    """How a command ended; `exit_code` is None where it took too long."""

    exit_code: int | None
    output: str

    @property
    def last_output(self) -> str:
        """The end of it."""
        return self.output[-_LAST_CHARACTERS:]


def test_files(folder: Path) -> list[Path]:
    """The files that have tests for a GPU."""
    files = sorted(folder.glob("test_*.py"))
    return [path for path in files if _OF_GPU.search(path.read_text(encoding="utf-8"))]


def run_suites(out: Path, limit_s: float, folder: Path = TESTS) -> PartReport:
    """Run them all, with kernels that check their plans; the output goes to `out`."""
    report = PartReport("tests")
    if importlib.util.find_spec("pytest") is None:
        report.failure = "pytest is not installed, so nothing says that results are right"
        return report
    results = out / "gpu-check-tests.xml"
    finished = run(
        [*_pytest(test_files(folder)), f"--junitxml={results}"],
        limit_s,
        out / "gpu-check-tests.txt",
    )
    counts = _counts(results)
    if finished.exit_code is None:
        report.failure = f"the tests did not end within {limit_s:.0f} s"
    elif finished.exit_code != 0:
        report.failure = f"pytest ended with exit code {finished.exit_code}"
    elif counts["passed"] == 0:
        report.failure = "no test ran on the GPU"
    report.notes.append(", ".join(f"{count} tests {what}" for what, count in counts.items()))
    if report.failure is not None:
        print(finished.last_output, flush=True)
    return report


def run_sanitizer(out: Path, limit_s: float, folder: Path = TESTS) -> PartReport:
    """Run the tests of the kernels under memcheck; skipped where it is missing or too slow."""
    report = PartReport("sanitizer")
    tool = sanitizer()
    if tool is None or importlib.util.find_spec("pytest") is None:
        report.skipped = "there is no compute-sanitizer, or no pytest"
        return report
    files = [path for path in test_files(folder) if _OF_KERNELS.match(path.name)]
    finished = run(
        [
            *(tool, "--tool", "memcheck", "--error-exitcode", str(_MEMCHECK_ERROR)),
            # Some calls of the tests fail on purpose; this is about what kernels touch.
            *("--report-api-errors", "no", "--target-processes", "all", *_pytest(files)),
        ],
        limit_s,
        out / "gpu-check-sanitizer.txt",
    )
    if finished.exit_code is None:
        report.skipped = f"compute-sanitizer did not end within {limit_s:.0f} s"
        return report
    has_run = re.findall(r"\d+ passed[^\n]*", finished.output)
    summaries = re.findall(r"ERROR SUMMARY: [^\n]*", finished.output)
    report.notes += [f"compute-sanitizer memcheck: {line}" for line in (has_run + summaries)[-2:]]
    if finished.exit_code == 0 and has_run and summaries:
        return report
    print(finished.last_output, flush=True)
    if re.search(r"\d+ (passed|failed|errors?)\b", finished.output):
        report.failure = f"compute-sanitizer ended with exit code {finished.exit_code}"
    else:
        report.skipped = "compute-sanitizer could not run the tests here; its output says why"
    return report


def sanitizer() -> str | None:
    """The tool's path."""
    usual = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(usual) if usual.is_file() else None)


def run(command: Sequence[str], limit_s: float, log: Path) -> Finished:
    """Run a command in the project's folder; after `limit_s` it ends with all it has started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment() | _NO_PLUGINS, start_new_session=True,
        )  # fmt: skip
        exit_code = wait(process, limit_s)
    return Finished(exit_code, log.read_text(encoding="utf-8", errors="replace"))


def wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code, or None where the process group had to be killed; it is its own session's."""
    try:
        return process.wait(max(0.0, limit_s))
    except BaseException as error:  # also Ctrl-C, which other sessions do not get
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise


def environment() -> dict[str, str]:
    """That of this process, with the project importable and without its settings."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("HOTSHELF_")}
    paths = filter(None, [str(ROOT), kept.get("PYTHONPATH")])
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _pytest(files: Sequence[Path]) -> list[str]:
    """A command. Other versions of packages than the pinned ones may warn of other things."""
    options = ["-q", "-p", "benchmarks.gpu.pytest_plugin", "-p", "no:cacheprovider"]
    options += ["-W", "default", "-o", "addopts=-ra"]
    return [sys.executable, "-m", "pytest", *options, *map(str, files)]


def _counts(results: Path) -> dict[str, int]:
    """Tests by their ends, from pytest's file; all 0 where it wrote none."""
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    if results.exists():
        for suite in ElementTree.parse(results).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            counts["failed"] += failed
            counts["skipped"] += skipped
            counts["passed"] += int(suite.get("tests", 0)) - failed - skipped
    return counts
