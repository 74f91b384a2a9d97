"""Checks a GPU in one command and under five minutes: make gpu-check, or python -m this.

Right results come first: the tests of the devices and the kernels on the real GPU. Then each figure
is measured beside a ceiling of the same run. Nothing is installed; what is missing is skipped and
named. The exit code is 1 where something failed or a GPU cannot be used, else 0, also where an aim
is missed. With $OUT, gpu-check.json and the output of the tests are written to that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu import correctness, facts
from benchmarks.gpu.report import PartReport, ResultsFile, summary, table

if TYPE_CHECKING:
    from benchmarks.gpu.check import Check

BUDGET_S = 285.0
# Of each part; together more than the budget, as few parts need all of theirs.
PART_TO_LIMIT_S = {
    "tests": 120.0,
    "sanitizer": 60.0,
    "hits": 45.0,
    "misses": 30.0,
    "managed": 20.0,
    "batch": 45.0,
    "demo": 60.0,
}
MEASURED = ("hits", "misses", "managed", "batch", "demo")
_LAST_S = 5.0  # of a part's limit, to come to an end by itself
_MIN_PART_S = 8.0
_NO_FAILURE, _FAILURE = 0, 1

RunPart = Callable[[str, ResultsFile, Path, float], str | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, or one part of it in this process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, default=0, help="the number of the GPU (default 0)")
    parser.add_argument("--only", choices=tuple(PART_TO_LIMIT_S), nargs="+", help="some parts")
    parser.add_argument(
        "--quick", action="store_true", help="so little of all that the figures mean nothing"
    )
    parser.add_argument("--part", choices=MEASURED, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is not None:
        return _run_as_child(options)
    if problem := find_problem(options.index):
        print(f"gpu-check: {problem}", file=sys.stderr)
        return _FAILURE
    wanted = options.only or tuple(PART_TO_LIMIT_S)
    machine = facts.machine_facts(None, options.index) | {"is_quick": options.quick}
    with ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        out = Path(os.environ["OUT"]) if os.environ.get("OUT") else work
        out.mkdir(parents=True, exist_ok=True)
        run_part = in_child(options.index, is_quick=options.quick)
        parts = run_parts(wanted, out=out, work=work, run_part=run_part)
        return conclude(parts, machine, out if out != work else None)


def find_problem(index: int, cupy: Any = None) -> str | None:
    """Why this machine cannot be checked, in one line; None where it can."""
    if missing := facts.missing_packages():
        return f"not installed: {', '.join(missing)}; the check installs nothing"
    from cache.cuda import probe

    report = probe(cupy, index)
    if report.problem is None and index >= len(report.devices):
        return f"there is no GPU {index}; found are {len(report.devices)}"
    return report.problem


def run_parts(
    wanted: Sequence[str],
    *,
    out: Path,
    work: Path,
    run_part: RunPart,
    tests: Path = correctness.TESTS,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartReport]:
    """Run the parts in order; where the tests fail, nothing is measured.

    `run_part` measures one part within a number of seconds and returns what went wrong.
    """
    end_s = clock() + budget_s
    parts = []
    for name, limit_s in PART_TO_LIMIT_S.items():
        if name not in wanted:
            continue
        started_s = clock()
        limit_s = min(limit_s, end_s - started_s)
        print(f"gpu-check: {name} ...", flush=True)
        if limit_s < _MIN_PART_S:
            report = PartReport(name, failure="not run: no time is left")
        elif name == "tests":
            report = correctness.run_suites(out, limit_s, tests)
        elif name == "sanitizer":
            report = correctness.run_sanitizer(out, limit_s, tests)
        else:
            report = PartReport(name)
            results = ResultsFile(work / f"{name}.jsonl")
            failure = run_part(name, results, work, limit_s)
            results.read_into(report)
            report.failure = report.failure or failure
        report.seconds = clock() - started_s
        parts.append(report)
        print(f"gpu-check: {name}: {_outcome(report)}, {report.seconds:.1f} s", flush=True)
        if report.failure is not None and name not in MEASURED:
            break
    return parts


def conclude(parts: Sequence[PartReport], machine: dict[str, Any], out: Path | None) -> int:
    """Print the table, write the JSON where `out` is a folder, and return the exit code."""
    exit_code = _FAILURE if any(part.failure for part in parts) else _NO_FAILURE
    if out is not None:
        content = {
            "machine": machine,
            "exit_code": exit_code,
            "seconds": sum(part.seconds for part in parts),
            "parts": [asdict(part) for part in parts],
        }
        text = json.dumps(content, indent=1) + "\n"
        (out / "gpu-check.json").write_text(text, encoding="utf-8")
    print(facts.headline(machine))
    print(table(parts))
    print(summary(parts))
    return exit_code


def measure(name: str, check: Check) -> int:
    """Run one part in this process; what it finds goes to the check's results."""
    from benchmarks.gpu import batch, demo, rows
    from benchmarks.gpu.check import SkippedError

    part_to_run: dict[str, Callable[[Check], None]] = {
        "hits": rows.run_hits,
        "misses": rows.run_misses,
        "managed": rows.run_managed,
        "batch": batch.run,
        "demo": demo.run,
    }
    try:
        part_to_run[name](check)
    except SkippedError as error:
        check.skip(str(error))
    except Exception as error:
        traceback.print_exc()
        check.fail(f"{type(error).__name__}: {' '.join(str(error).split())}")
        return _FAILURE
    return _NO_FAILURE


def _run_as_child(options: argparse.Namespace) -> int:
    from benchmarks.gpu.check import QUICK, Check, Scale

    check = Check(
        ResultsFile(options.results),
        work=options.work,
        deadline_s=time.monotonic() + options.limit,
        scale=QUICK if options.quick else Scale(),
        index=options.index,
    )
    return measure(options.part, check)


def in_child(index: int, *, is_quick: bool = False) -> RunPart:
    """Parts in processes of their own: what one does to the GPU's context ends with it."""

    def run_part(name: str, results: ResultsFile, work: Path, limit_s: float) -> str | None:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.gpu_check", "--part", name),
                *("--index", str(index), "--results", str(results.path), "--work", str(work)),
                *("--limit", str(limit_s - _LAST_S)),
                *(("--quick",) if is_quick else ()),
            ],
            cwd=correctness.ROOT,
            env=correctness.environment(),
            start_new_session=True,
        )
        exit_code = correctness.wait(process, limit_s)
        if exit_code is None:
            return f"it did not end within {limit_s:.0f} s"
        return None if exit_code == 0 else f"it ended with exit code {exit_code}"

    return run_part


def _outcome(report: PartReport) -> str:
    if report.failure is not None:
        return "FAILED"
    return "skipped" if report.skipped is not None else "done"


if __name__ == "__main__":
    sys.exit(main())
