"""`hotshelf sweep`: p50 and p99 against cache size, measured with Locust against real servers.

First it measures the noise of the machine alone. Then, for every series and size, it starts a
server, replays the earlier part of the trace until the hit rate is steady, runs the open-loop load
test in a process of its own, and stops the server.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
import textwrap
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from tqdm import tqdm

from cache.errors import CacheError
from cache.table import read_tables
from loadtests.measure import (
    LEAD_IN_S,
    MAX_ROUNDS,
    NUM_CONNECTIONS,
    PROBE_S,
    PROBE_SHARE,
    ROUND_SAMPLES,
    SAMPLES_SUFFIX,
    STEADY_CHANGE,
    PointMeasurer,
    Trace,
)
from loadtests.noise import Noise, measure_noise, write_noise
from loadtests.open_loop import PROCESSES
from loadtests.option_types import (
    fraction,
    number_above_0,
    number_from_0,
    numbers_above_0,
    whole_from_0,
    whole_from_1,
)
from loadtests.report import write_report
from loadtests.results import (
    FAILED,
    SERIES_TO_LABEL,
    Row,
    format_bytes,
    format_table,
    write_summary,
)
from loadtests.samples import write_columns
from loadtests.workloads import MODEL, WorkloadError, make_workload

_PACKAGES = ("locust", "matplotlib")  # of the extra `load`; without pyarrow it writes CSV


class SweepError(Exception):
    """The sweep cannot begin; the text says why."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `hotshelf sweep`."""
    add = parser.add_argument
    add("--repository", type=Path, default=Path("demo"), metavar="DIR",
        help="a repository written by `hotshelf demo init` (default demo)")  # fmt: skip
    add("--points", type=numbers_above_0, default=[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0],
        metavar="P,P,...",
        help="cache sizes in percent of the table bytes (1,2,5,10,20,50,100)")  # fmt: skip
    add("--series", type=_series, default=["none", "host"], metavar="S,S",
        help="none: no host tier; host: all rows in host memory (none,host)")  # fmt: skip
    add("--rate", type=number_above_0, metavar="R",
        help="requests per second; left out: 60 %% of what the first point can do")  # fmt: skip
    add("--rates", type=numbers_above_0, metavar="R,R,...",
        help="several rates at one size, for latency against throughput")  # fmt: skip
    add("--rows-per-request", type=whole_from_1, default=16, metavar="N",
        help="rows in a request (16)")  # fmt: skip
    add("--profile", choices=("ads", "zipf"), default="ads", help="how keys repeat (ads)")
    add("--zipf-exponent", type=number_from_0, default=1.0, metavar="X",
        help="of the zipf profile (1.0)")  # fmt: skip
    add("--arrivals", choices=PROCESSES, default="poisson", help="gaps between requests (poisson)")
    add("--wire-format", choices=("binary", "json"), default="binary", help="tensors on the wire")
    add("--duration", type=number_above_0, default=20.0, metavar="S",
        help="seconds of load at each point (20)")  # fmt: skip
    add("--warm-up", type=number_above_0, default=10.0, metavar="S",
        help="longest warm-up of each point in seconds (10)")  # fmt: skip
    add("--error-threshold", type=fraction, default=0.01, metavar="X",
        help="share of errors above which a point is not valid (0.01)")  # fmt: skip
    add("--seed", type=whole_from_0, default=0, help="seed of the trace and the arrivals (0)")
    add("--out", type=Path, default=Path("out/sweep"), metavar="DIR",
        help="where the folder with the results goes (out/sweep)")  # fmt: skip


def main(args: Namespace) -> int:
    """Run `hotshelf sweep`; return 0, 1 when a point failed, 2 when the sweep cannot begin."""
    try:
        sweep = Sweep(args)
    except (SweepError, WorkloadError, CacheError) as error:
        print(f"hotshelf sweep: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hotshelf sweep: {error}", file=sys.stderr)
        return 1
    try:
        sweep.run()
    except OSError as error:
        print(f"hotshelf sweep: {error}", file=sys.stderr)
        return 1
    finally:
        if sweep.rows:
            print(f"\n{format_table(sweep.rows)}\n\n{textwrap.fill(str(sweep.noise), 100)}\n")
            for path in sweep.pictures:
                print(f"picture: {path}")
            if (report := sweep.out / "report.html").exists():
                print(f"report: {report}")
    return int(any(row.state == FAILED for row in sweep.rows))


class Sweep:
    """One sweep over one repository; its results go to a folder of its own."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        if args.rates and len(args.points) > 1:
            raise SweepError("--rates needs one size: give --points one number")
        if args.rates and args.rate:
            raise SweepError("give --rate or --rates, not both")
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise SweepError(
                f"not installed: {', '.join(missing)}; in Hotshelf's folder: "
                "pip install -c constraints.txt -e '.[load]'"
            )
        self._trace = _read_trace(args)
        self._rates: list[float] = args.rates or ([args.rate] if args.rate else [])
        self.out: Path = args.out / time.strftime("%Y-%m-%d_%H-%M-%S")
        self.noise: Noise | None = None
        self._measurer = PointMeasurer(args, self._trace, self.out)
        self._is_complete = False
        self.pictures: list[Path] = []

    @property
    def rows(self) -> list[Row]:
        """The rows of the summary so far."""
        return self._measurer.rows

    def run(self) -> None:
        """Measure every point and write the results, also those of a sweep that is interrupted."""
        try:
            self._measure()
            self._is_complete = True
        finally:
            if self.noise and self.rows:
                self._write(self.noise)

    def _measure(self) -> None:
        points = [(s, share) for s in self._args.series for share in sorted(self._args.points)]
        with self._measurer, tqdm(points, unit="point") as bar:
            bar.set_description("noise of the machine")
            self.noise = measure_noise()
            for series, share in bar:
                label = f"{series} {share:g} %"

                def show(stage: str, label: str = label) -> None:
                    bar.set_description(f"{label}: {stage}")

                self._measurer.measure(series, share, self._rates, on_stage=show)
                row = self.rows[-1]
                if row.state == FAILED:
                    bar.write(f"{label}: {row.note}", file=sys.stderr)
                if not self._rates and row.rate:
                    self._rates = [row.rate]

    def _write(self, noise: Noise) -> None:
        write_noise(self.out / "noise.csv", noise)
        write_summary(self.out / "summary.csv", self.rows)
        if self._measurer.sample_columns:
            write_columns(self.out / f"samples{SAMPLES_SUFFIX}", self._measurer.sample_columns)
        self.pictures = write_report(
            self.out, self.rows, noise, self._args.repository, self._method()
        )

    def _method(self) -> dict[str, str]:
        """What a reader must know to judge the figures or to repeat them."""
        args, trace = self._args, self._trace
        num_samples, first = trace.workload.num_samples, trace.first_measured
        how = "given"
        if not (args.rate or args.rates):
            how = (
                f"chosen: {PROBE_SHARE:.0%} of what {NUM_CONNECTIONS} connections in a closed loop "
                f"reached in {PROBE_S:g} s at the smallest cache of the first series"
            )
        longest = max((row.num_planned * args.rows_per_request for row in self.rows), default=0)
        wraps = (
            " This is more than it has; it starts again." if longest > num_samples - first else ""
        )
        profile = f"zipf, exponent {args.zipf_exponent:g}" if args.profile == "zipf" else "ads"
        interrupted = {"interrupted": "before all points were measured"}
        return {
            "command": shlex.join(sys.argv),
            **({} if self._is_complete else interrupted),
            "tables": f"{len(trace.table_rows)} tables, {sum(trace.table_rows):,} rows, "
            f"{format_bytes(trace.table_bytes)}",
            "rate": ", ".join(f"{rate:g}" for rate in self._rates) + f" requests/s ({how})",
            "request": f"{args.rows_per_request} rows, {args.wire_format} tensors",
            "load": f"open loop, {args.arrivals} arrivals planned for {args.duration:g} s with "
            f"seed {args.seed}, after a lead-in of {LEAD_IN_S:g} s that is not in the figures; the "
            "same arrivals and keys at every size",
            "trace": f"{profile}, {num_samples:,} samples = "
            f"{num_samples * len(trace.table_rows):,} accesses. A run replays only a part of it, "
            f"up to {longest:,} samples from sample {first:,} on.{wraps}",
            "warm-up": "of the trace before that part, the distinct rows that were asked for last "
            "are looked up, as many as fit the device tier, which is what a replay of the whole "
            f"leaves in an LRU cache; then rounds of {ROUND_SAMPLES} samples are replayed in a "
            f"closed loop until the device hit rate changes by less than {STEADY_CHANGE:.0%} from "
            f"one to the next, at most {MAX_ROUNDS} rounds or {args.warm_up:g} s. A row that the "
            "trace never asked for before is a miss at every size",
        }


def _read_trace(args: Namespace) -> Trace:
    if not (args.repository / "models" / MODEL).is_dir():
        raise SweepError(
            f"{args.repository} has no model {MODEL}; "
            f"write it with: hotshelf demo init {args.repository}"
        )
    tables = read_tables(args.repository / "tables")
    if len({table.slot_bytes for table in tables}) != 1:
        raise SweepError(f"{args.repository}: expected tables of one row size")
    table_rows = [table.num_rows for table in tables]
    workload = make_workload(
        table_rows, profile=args.profile, zipf_exponent=args.zipf_exponent, seed=args.seed
    )
    return Trace([table.name for table in tables], table_rows, tables[0].slot_bytes, workload)


def _series(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SERIES_TO_LABEL]:
        allowed = ", ".join(SERIES_TO_LABEL)
        raise ArgumentTypeError(f"expected some of {allowed}, got {unknown[0]!r}")
    return names
