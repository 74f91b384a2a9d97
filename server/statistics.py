"""Counters of one model version; `/metrics` and the statistics endpoint read the same snapshot."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

# Why a request failed, the `reason` label of `nv_inference_request_failure`:
#   REJECTED  the queue was full, or the model or the server was closing
#   TIMEOUT   its time-out passed while it was queued
#   CANCELED  the client went away
#   BACKEND   the model, or reading its feature rows, failed
#   OTHER     the request was wrong, or its answer could not be encoded as asked
FailureReason = Literal["REJECTED", "TIMEOUT", "CANCELED", "BACKEND", "OTHER"]
FAILURE_REASONS: tuple[FailureReason, ...] = get_args(FailureReason)

BUCKET_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


HISTOGRAMS = ("request", "queue", "lookup", "compute", "encode")


@dataclass(frozen=True, slots=True)
class BatchTimings:
    """Seconds that one run of a batch took; `lookup_s` is None for a model without features.

    `wait_s` is the time that the batch waited for a frame and for its turn to compute.
    """

    join_s: float
    lookup_s: float | None
    compute_infer_s: float
    compute_output_s: float
    wait_s: float = 0.0

    @property
    def compute_input_s(self) -> float:
        """Joining the requests and looking up their feature rows."""
        return self.join_s + (self.lookup_s or 0.0)


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """What one answered request took: its time in the queue, and the run of its batch.

    `queue_s` includes what its batch waited.
    """

    num_rows: int
    queue_s: float
    batch: BatchTimings


@dataclass(frozen=True, slots=True)
class Duration:
    """How often something took time, and how much in all."""

    count: int = 0
    total_s: float = 0.0

    @property
    def ns(self) -> int:
        """The total in whole nanoseconds."""
        return round(self.total_s * 1e9)

    def to_triton(self) -> dict[str, int]:
        """The pair as Triton's statistics write it."""
        return {"count": self.count, "ns": self.ns}


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`buckets` pairs each upper bound in seconds, the last infinite, with its cumulative count."""

    buckets: tuple[tuple[float, int], ...]
    sum_s: float

    @property
    def count(self) -> int:
        """How many values were observed."""
        return self.buckets[-1][1]


@dataclass(frozen=True, slots=True)
class BatchSizeStatistics:
    """The executions that had one number of rows."""

    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """All counters of one model version at one moment.

    `num_rows` are the rows of successful requests. `num_executions` are the runs of the model that
    succeeded, those of a retried batch included. The durations are those of successful requests;
    `failed` is the time that failed ones took. `batch_sizes` is keyed by rows per execution.
    """

    num_success: int
    reason_to_num_failed: Mapping[FailureReason, int]
    num_rows: int
    num_executions: int
    num_pending: int
    last_inference_ms: int
    request: Duration
    failed: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    batch_sizes: Mapping[int, BatchSizeStatistics]
    histograms: Mapping[str, HistogramSnapshot]  # by the names in HISTOGRAMS

    def to_triton(self, name: str, version: str) -> dict[str, Any]:
        """One element of `model_stats` in Triton's shape."""
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.num_rows,
            "execution_count": self.num_executions,
            "inference_stats": {
                "success": self.request.to_triton(),
                "fail": self.failed.to_triton(),
                "queue": self.queue.to_triton(),
                "compute_input": self.compute_input.to_triton(),
                "compute_infer": self.compute_infer.to_triton(),
                "compute_output": self.compute_output.to_triton(),
                "cache_hit": Duration().to_triton(),
                "cache_miss": Duration().to_triton(),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": num_rows,
                    "compute_input": batch.compute_input.to_triton(),
                    "compute_infer": batch.compute_infer.to_triton(),
                    "compute_output": batch.compute_output.to_triton(),
                }
                for num_rows, batch in sorted(self.batch_sizes.items())
            ],
            "memory_usage": [],
        }


class _Histogram:
    """Counts of values in fixed buckets, with their sum; its user holds the lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKET_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKET_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def snapshot(self) -> HistogramSnapshot:
        bounds = (*BUCKET_BOUNDS_S, float("inf"))
        return HistogramSnapshot(
            tuple(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s
        )

    def duration(self) -> Duration:
        return Duration(sum(self._counts), self._sum_s)


@dataclass(slots=True)
class _ComputeSums:
    """Sums over executions, or over requests, of the three compute stages."""

    count: int = 0
    input_s: float = 0.0
    infer_s: float = 0.0
    output_s: float = 0.0

    def add(self, timings: BatchTimings) -> None:
        self.count += 1
        self.input_s += timings.compute_input_s
        self.infer_s += timings.compute_infer_s
        self.output_s += timings.compute_output_s

    def snapshot(self) -> BatchSizeStatistics:
        return BatchSizeStatistics(
            Duration(self.count, self.input_s),
            Duration(self.count, self.infer_s),
            Duration(self.count, self.output_s),
        )


class ModelStatistics:
    """Thread-safe counters of one model version.

    Every request that reached the model ends in exactly one `record_success` or `record_failure`,
    so successes and failures add up to the requests. Failed ones never enter the success sums.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason_to_num_failed: dict[FailureReason, int] = dict.fromkeys(FAILURE_REASONS, 0)
        self._failed_s = 0.0
        self._num_rows = 0
        self._num_executions = 0
        self._num_pending = 0
        self._last_inference_ms = 0
        self._requests = _ComputeSums()
        self._rows_to_executions: dict[int, _ComputeSums] = {}
        self._histograms = {name: _Histogram() for name in HISTOGRAMS}

    def record_success(
        self, timings: RequestTimings, *, request_s: float, encode_s: float, now_ms: int
    ) -> None:
        """Counts one answered request; `now_ms` is the time since the epoch."""
        batch, histograms = timings.batch, self._histograms
        with self._lock:
            self._num_rows += timings.num_rows
            self._last_inference_ms = now_ms
            self._requests.add(batch)
            histograms["request"].observe(request_s)
            histograms["queue"].observe(timings.queue_s)
            histograms["compute"].observe(batch.compute_infer_s)
            histograms["encode"].observe(encode_s)
            if batch.lookup_s is not None:
                histograms["lookup"].observe(batch.lookup_s)

    def record_failure(self, reason: FailureReason, request_s: float = 0.0) -> None:
        """Counts one failed request, which took `request_s`."""
        with self._lock:
            self._reason_to_num_failed[reason] += 1
            self._failed_s += request_s

    def record_execution(self, num_rows: int, timings: BatchTimings) -> None:
        """Counts one successful run of the model with a batch of `num_rows`."""
        with self._lock:
            self._num_executions += 1
            self._rows_to_executions.setdefault(num_rows, _ComputeSums()).add(timings)

    def add_pending(self, num_requests: int) -> None:
        """Moves the gauge of queued requests; negative when they leave the queue."""
        with self._lock:
            self._num_pending += num_requests
            assert self._num_pending >= 0

    def snapshot(self) -> StatisticsSnapshot:
        """Every counter at one moment."""
        with self._lock:
            compute, histograms = self._requests.snapshot(), self._histograms
            num_failed = dict(self._reason_to_num_failed)
            return StatisticsSnapshot(
                num_success=self._requests.count,
                reason_to_num_failed=num_failed,
                num_rows=self._num_rows,
                num_executions=self._num_executions,
                num_pending=self._num_pending,
                last_inference_ms=self._last_inference_ms,
                request=histograms["request"].duration(),
                failed=Duration(sum(num_failed.values()), self._failed_s),
                queue=histograms["queue"].duration(),
                compute_input=compute.compute_input,
                compute_infer=compute.compute_infer,
                compute_output=compute.compute_output,
                batch_sizes={n: e.snapshot() for n, e in self._rows_to_executions.items()},
                histograms={name: h.snapshot() for name, h in histograms.items()},
            )

    def to_triton(self, name: str, version: str) -> dict[str, Any]:
        """One element of `model_stats` in Triton's shape."""
        return self.snapshot().to_triton(name, version)
