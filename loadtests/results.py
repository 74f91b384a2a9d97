"""The rows of a sweep's summary: one for each run of the load test."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.samples import Summary
from loadtests.server_process import Counters

OK = "ok"
OVERLOADED = "overloaded"  # the figures are those of a growing queue
FAILED = "failed"

SERIES_TO_LABEL = {"none": "no host tier (misses read the disk)", "host": "all rows in host memory"}


@dataclass(frozen=True, slots=True)
class Row:
    """One run: what was set, what was measured. Figures that do not exist are NaN."""

    series: str
    share_percent: float
    cache_bytes: int
    rate: float
    state: str = FAILED
    note: str = ""
    planned_rate: float = math.nan
    achieved_rate: float = math.nan
    num_planned: int = 0
    num_ok: int = 0
    errors: int = 0
    error_rate: float = math.nan
    p50_ms: float = math.nan
    p90_ms: float = math.nan
    p99_ms: float = math.nan
    p99_9_ms: float = math.nan
    max_ms: float = math.nan
    lateness_p99_ms: float = math.nan
    hit_rate_device: float = math.nan
    hit_rate_host: float = math.nan
    rate_source: float = math.nan
    rate_absent: float = math.nan
    mean_batch_rows: float = math.nan
    minor_page_faults: int | None = None
    major_page_faults: int | None = None
    warm_up_s: float = math.nan
    is_steady: bool = False

    @property
    def is_valid(self) -> bool:
        """The figures say something about the server at that rate."""
        return self.state == OK

    def measured(self, summary: Summary, counters: Counters, error_threshold: float) -> Row:
        """Return this row with the figures of a run."""
        state, note = judge(summary, error_threshold)
        return dataclasses.replace(
            self,
            state=state,
            note=note,
            planned_rate=summary.planned_rate,
            achieved_rate=summary.achieved_rate,
            num_planned=summary.num_planned,
            num_ok=summary.num_ok,
            errors=summary.num_errors,
            error_rate=summary.error_rate,
            p50_ms=summary.p50_ms,
            p90_ms=summary.p90_ms,
            p99_ms=summary.p99_ms,
            p99_9_ms=summary.p99_9_ms,
            max_ms=summary.max_ms,
            lateness_p99_ms=summary.lateness_p99_ms,
            hit_rate_device=counters.hit_rate("device"),
            hit_rate_host=counters.hit_rate("host"),
            rate_source=counters.hit_rate("source"),
            rate_absent=counters.hit_rate("absent"),
            mean_batch_rows=counters.mean_batch_rows,
            minor_page_faults=counters.minor_faults,
            major_page_faults=counters.major_faults,
        )


def judge(summary: Summary, error_threshold: float) -> tuple[str, str]:
    """(state, note) of a run: errors that overload does not explain are a failure."""
    broken = summary.num_errors - summary.num_overload_errors
    if broken > error_threshold * summary.num_planned:
        return FAILED, f"{broken} of {summary.num_planned} requests failed"
    if summary.errors_above(error_threshold):
        return OVERLOADED, f"error rate {summary.error_rate:.1%}"
    if summary.is_overloaded:
        return OVERLOADED, f"{summary.achieved_rate / summary.planned_rate:.0%} of the planned rate"
    return OK, ""


def write_summary(path: Path, rows: Sequence[Row]) -> None:
    """Write summary.csv; a figure that does not exist is an empty field."""
    names = [field.name for field in dataclasses.fields(Row)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            values = (getattr(row, name) for name in names)
            writer.writerow("" if _is_missing(value) else value for value in values)


HEADINGS = (
    *("series", "cache", "bytes", "rate/s", "achieved/s", "p50 ms", "p90 ms", "p99 ms"),
    *(
        "p99.9 ms",
        "max ms",
        "errors",
        "hit device",
        "hit host",
        "source",
        "batch",
        "faults maj/min",
    ),
    "state",
)


def table_cells(row: Row) -> list[str]:
    """The cells of one row under HEADINGS, as text."""
    latencies = (row.p50_ms, row.p90_ms, row.p99_ms, row.p99_9_ms, row.max_ms)
    shares = (row.hit_rate_device, row.hit_rate_host, row.rate_source)
    return [
        row.series,
        f"{row.share_percent:g} %",
        format_bytes(row.cache_bytes),
        f"{row.planned_rate:.1f}",
        f"{row.achieved_rate:.1f}",
        *(f"{latency:.2f}" for latency in latencies),
        f"{row.error_rate:.2%}",
        *(f"{share:.1%}" for share in shares),
        f"{row.mean_batch_rows:.1f}",
        f"{_or_dash(row.major_page_faults)}/{_or_dash(row.minor_page_faults)}",
        f"{row.state}: {row.note}" if row.note else row.state,
    ]


# What fits a terminal.
PRINTED = (
    *("series", "cache", "bytes", "rate/s", "achieved/s", "p50 ms", "p99 ms", "max ms"),
    *("errors", "hit device", "state"),
)


def format_table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, with the columns in PRINTED."""
    columns = [HEADINGS.index(heading) for heading in PRINTED]
    lines = [list(HEADINGS), *(table_cells(row) for row in rows)]
    lines = [[line[column] for column in columns] for line in lines]
    lines = [["-" if cell.startswith("nan") else cell for cell in line] for line in lines]
    # The note of a failed run may have many lines; the table shows the first.
    lines = [[cell.partition("\n")[0] for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(PRINTED))]
    last = len(PRINTED) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
