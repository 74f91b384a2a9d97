"""The rows of a sweep's summary: one for each run of the load test."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Sequence
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
    p99_windows_ms: float = math.nan
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
        figures = dataclasses.asdict(summary)
        del figures["num_overload_errors"]
        return dataclasses.replace(
            self,
            state=state,
            note=note,
            errors=figures.pop("num_errors"),
            **figures,
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


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table for readers; the terminal has room for some of them only."""

    heading: str
    text: Callable[[Row], str]
    is_printed: bool = True


def _figure(name: str, spec: str) -> Callable[[Row], str]:
    """The text of a figure, a dash where it does not exist."""

    def text(row: Row) -> str:
        value = getattr(row, name)
        return "-" if _is_missing(value) else format(value, spec)

    return text


COLUMNS = (
    Column("series", lambda row: row.series),
    Column("cache", lambda row: f"{row.share_percent:g} %"),
    Column("bytes", lambda row: format_bytes(row.cache_bytes)),
    Column("rate/s", _figure("planned_rate", ".1f")),
    Column("achieved/s", _figure("achieved_rate", ".1f")),
    Column("p50 ms", _figure("p50_ms", ".2f")),
    Column("p90 ms", _figure("p90_ms", ".2f"), is_printed=False),
    Column("p99 ms", _figure("p99_ms", ".2f")),
    Column("p99 ms, windows", _figure("p99_windows_ms", ".2f"), is_printed=False),
    Column("p99.9 ms", _figure("p99_9_ms", ".2f"), is_printed=False),
    Column("max ms", _figure("max_ms", ".2f")),
    Column("errors", _figure("error_rate", ".2%")),
    Column("hit device", _figure("hit_rate_device", ".1%")),
    Column("hit host", _figure("hit_rate_host", ".1%"), is_printed=False),
    Column("source", _figure("rate_source", ".1%"), is_printed=False),
    Column("batch", _figure("mean_batch_rows", ".1f"), is_printed=False),
    Column("major faults", _figure("major_page_faults", "d"), is_printed=False),
    Column("minor faults", _figure("minor_page_faults", "d"), is_printed=False),
    Column("state", lambda row: row.state),
)


def format_table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, with the columns that are printed and the note's first line."""
    columns = [column for column in COLUMNS if column.is_printed]
    lines = [[column.heading for column in columns]]
    lines += [[column.text(row) for column in columns] for row in rows]
    notes = ["", *(row.note.partition("\n")[0] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)),
                line[-1].ljust(widths[-1]),
                note,
            ]
        ).rstrip()
        for line, note in zip(lines, notes, strict=True)
    )


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit and three digits."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
