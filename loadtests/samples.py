"""Raw samples of a load test, one for each planned request, and the figures made from them."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import math
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtests.percentiles import nearest_rank


class Outcome(IntEnum):
    """What became of a planned request; only OK enters the latency figures."""

    NOT_SENT = 0  # the test ended before a user was free for it
    UNFINISHED = 1  # sent, no answer when the test ended
    OK = 2
    BAD_STATUS = 3
    TIMEOUT = 4
    CONNECTION = 5
    INCOMPLETE = 6  # status 200 without the whole answer


# What a server does that is asked for more than it can do; the rest means that something is broken.
OVERLOAD = (Outcome.NOT_SENT, Outcome.UNFINISHED, Outcome.TIMEOUT)
UNAVAILABLE = 503

NUM_WINDOWS = 5


@dataclass(frozen=True, slots=True)
class Samples:
    """Parallel arrays; times are seconds from the measured start, NaN where there is none."""

    planned_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    done_s: NDArray[np.float64]
    status: NDArray[np.int16]
    num_bytes: NDArray[np.int64]
    outcome: NDArray[np.int8]

    @classmethod
    def planned(cls, planned_s: NDArray[np.float64]) -> Samples:
        """Samples of requests that were not sent yet."""
        size = len(planned_s)
        return cls(
            planned_s=planned_s,
            sent_s=np.full(size, np.nan),
            done_s=np.full(size, np.nan),
            status=np.zeros(size, np.int16),
            num_bytes=np.zeros(size, np.int64),
            outcome=np.full(size, Outcome.NOT_SENT, np.int8),
        )

    def __len__(self) -> int:
        return len(self.planned_s)

    def measured(self) -> Samples:
        """The samples without those of the lead-in, which were planned before 0."""
        part = slice(int(np.searchsorted(self.planned_s, 0)), None)
        return Samples(*(getattr(self, field.name)[part] for field in dataclasses.fields(self)))

    def columns(self) -> dict[str, list[Any]]:
        """The samples as columns of plain values; the outcome by name."""
        return {
            "planned_s": self.planned_s.tolist(),
            "sent_s": self.sent_s.tolist(),
            "done_s": self.done_s.tolist(),
            "status": self.status.tolist(),
            "num_bytes": self.num_bytes.tolist(),
            "outcome": [Outcome(value).name.lower() for value in self.outcome.tolist()],
        }

    @classmethod
    def from_columns(cls, columns: dict[str, list[Any]]) -> Samples:
        """The inverse of `columns`; values may be strings, as CSV has them."""
        return cls(
            planned_s=np.array(columns["planned_s"], np.float64),
            sent_s=np.array(columns["sent_s"], np.float64),
            done_s=np.array(columns["done_s"], np.float64),
            status=np.array(columns["status"], np.int16),
            num_bytes=np.array(columns["num_bytes"], np.int64),
            outcome=np.array([Outcome[name.upper()] for name in columns["outcome"]], np.int8),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; latencies in ms, from the planned send time, over successes only."""

    planned_rate: float
    achieved_rate: float
    num_planned: int
    num_ok: int
    num_errors: int
    num_overload_errors: int
    error_rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p99_windows_ms: float
    p99_9_ms: float
    max_ms: float
    lateness_p99_ms: float

    def errors_above(self, threshold: float) -> bool:
        """More than that share of the planned requests failed."""
        return self.error_rate > threshold

    @property
    def is_overloaded(self) -> bool:
        """The server answered less than 95 % of the planned rate."""
        return self.achieved_rate < 0.95 * self.planned_rate


def summarize(samples: Samples, duration_s: float) -> Summary:
    """Figures of the requests that were planned from 0 to `duration_s`, without the lead-in.

    The achieved rate counts the successes that were there when the planned duration was over, so
    that one late answer at the end does not look like overload, and a growing queue does.
    """
    samples = samples.measured()
    is_ok = samples.outcome == Outcome.OK
    planned_s = samples.planned_s[is_ok]
    latency_ms = (samples.done_s[is_ok] - planned_s) * 1000
    p50, p90, p99, p99_9, highest = nearest_rank(latency_ms, (50, 90, 99, 99.9, 100))
    lateness_ms = (samples.sent_s - samples.planned_s)[~np.isnan(samples.sent_s)] * 1000
    num_ok = int(is_ok.sum())
    num_in_time = int((samples.done_s[is_ok] <= duration_s).sum())
    is_overload = np.isin(samples.outcome, OVERLOAD) | (samples.status == UNAVAILABLE)
    return Summary(
        planned_rate=len(samples) / duration_s,
        achieved_rate=num_in_time / duration_s,
        num_planned=len(samples),
        num_ok=num_ok,
        num_errors=len(samples) - num_ok,
        num_overload_errors=int(is_overload.sum()),
        error_rate=1 - num_ok / len(samples),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        p99_windows_ms=_median_p99(latency_ms, planned_s, duration_s),
        p99_9_ms=p99_9,
        max_ms=highest,
        lateness_p99_ms=nearest_rank(lateness_ms, (99,))[0],
    )


def _median_p99(
    latency_ms: NDArray[np.float64], planned_s: NDArray[np.float64], duration_s: float
) -> float:
    """The median of the p99 of NUM_WINDOWS equal windows of planned time.

    One stall changes the p99 of one or two windows. A window without a success counts as the
    slowest.
    """
    window = np.floor(planned_s / duration_s * NUM_WINDOWS)
    p99s = [nearest_rank(latency_ms[window == number], (99,))[0] for number in range(NUM_WINDOWS)]
    return nearest_rank(np.array(p99s), (50,))[0]  # NaN sorts last


def can_write_parquet() -> bool:
    """Whether pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def write_columns(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write parallel columns as parquet or CSV, by the suffix of `path`."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in zip(*columns.values(), strict=True):
            writer.writerow("" if _is_nan(value) else value for value in row)


def read_columns(path: Path) -> dict[str, list[Any]]:
    """Columns that `write_columns` wrote; CSV gives strings, "nan" where a value is absent."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        columns: dict[str, list[Any]] = pyarrow.parquet.read_table(path).to_pydict()
        return columns
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return {name: [row[i] or "nan" for row in rows] for i, name in enumerate(header)}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)
