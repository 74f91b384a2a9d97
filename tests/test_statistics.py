"""The counters of one model version."""

from __future__ import annotations

import threading

import pytest

from server.statistics import BatchTimings, ModelStatistics, RequestTimings

RUN = BatchTimings(join_s=1.0, lookup_s=2.0, compute_infer_s=4.0, compute_output_s=8.0)


def succeed(statistics: ModelStatistics, num_rows: int = 1, batch: BatchTimings = RUN) -> None:
    timings = RequestTimings(num_rows, queue_s=16.0, batch=batch)
    statistics.record_success(timings, request_s=64.0, encode_s=32.0, now_ms=1700)


def test_successes_count_requests_rows_and_every_duration() -> None:
    statistics = ModelStatistics()
    succeed(statistics, num_rows=2)
    succeed(statistics, num_rows=3)

    snapshot = statistics.snapshot()
    assert (snapshot.num_success, snapshot.num_rows, snapshot.failed.count) == (2, 5, 0)
    assert snapshot.last_inference_ms == 1700
    sums = [snapshot.queue, snapshot.compute_input, snapshot.compute_infer, snapshot.compute_output]
    assert [duration.total_s for duration in sums] == [32.0, 6.0, 8.0, 16.0]
    histograms = [snapshot.histograms[name] for name in ("lookup", "encode")]
    assert [(histogram.count, histogram.sum_s) for histogram in histograms] == [(2, 4.0), (2, 64.0)]
    assert {duration.count for duration in sums} == {2}


def test_failures_are_counted_by_reason_and_stay_out_of_the_success_sums() -> None:
    statistics = ModelStatistics()
    succeed(statistics)
    statistics.record_failure("TIMEOUT", 100.0)
    statistics.record_failure("TIMEOUT", 100.0)
    statistics.record_failure("OTHER")

    snapshot = statistics.snapshot()
    assert snapshot.reason_to_num_failed == {
        "REJECTED": 0,
        "TIMEOUT": 2,
        "CANCELED": 0,
        "BACKEND": 0,
        "OTHER": 1,
    }
    assert (snapshot.failed.count, snapshot.failed.total_s) == (3, 200.0)
    assert (snapshot.request.count, snapshot.request.total_s) == (1, 64.0)
    assert snapshot.histograms["request"].count == 1


def test_a_model_without_features_has_an_empty_lookup_histogram() -> None:
    statistics = ModelStatistics()
    succeed(statistics, batch=BatchTimings(1.0, None, 4.0, 8.0))

    snapshot = statistics.snapshot()
    assert snapshot.compute_input.total_s == 1.0
    assert snapshot.histograms["lookup"].count == 0


@pytest.mark.parametrize(
    ("seconds", "bound"), [(0.0, 0.0001), (0.001, 0.001), (0.0011, 0.0025), (11.0, float("inf"))]
)
def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed(
    seconds: float, bound: float
) -> None:
    statistics = ModelStatistics()
    timings = RequestTimings(1, seconds, RUN)
    statistics.record_success(timings, request_s=1.0, encode_s=1.0, now_ms=0)

    histogram = statistics.snapshot().histograms["queue"]
    assert next(upper for upper, count in histogram.buckets if count) == bound
    assert histogram.buckets[-1] == (float("inf"), 1)
    assert histogram.sum_s == seconds


def test_executions_are_counted_by_their_rows() -> None:
    statistics = ModelStatistics()
    for num_rows in (8, 8, 2):
        statistics.record_execution(num_rows, RUN)

    snapshot = statistics.snapshot()
    assert snapshot.num_executions == 3
    assert {n: batch.compute_infer.count for n, batch in snapshot.batch_sizes.items()} == {
        8: 2,
        2: 1,
    }
    assert snapshot.batch_sizes[8].compute_input.total_s == 6.0


def test_the_pending_gauge_rises_and_falls() -> None:
    statistics = ModelStatistics()
    statistics.add_pending(3)
    statistics.add_pending(-2)
    assert statistics.snapshot().num_pending == 1


def test_triton_sees_its_own_shape() -> None:
    statistics = ModelStatistics()
    succeed(statistics, num_rows=2)
    statistics.record_execution(2, RUN)
    statistics.record_failure("BACKEND", 1.0)

    def pair(count: int, seconds: int) -> dict[str, int]:
        return {"count": count, "ns": seconds * 1_000_000_000}

    compute = {
        "compute_input": pair(1, 3),
        "compute_infer": pair(1, 4),
        "compute_output": pair(1, 8),
    }
    assert statistics.to_triton("add1", "2") == {
        "name": "add1",
        "version": "2",
        "last_inference": 1700,
        "inference_count": 2,
        "execution_count": 1,
        "inference_stats": {
            "success": pair(1, 64),
            "fail": pair(1, 1),
            "queue": pair(1, 16),
            "cache_hit": pair(0, 0),
            "cache_miss": pair(0, 0),
        }
        | compute,
        "response_stats": {},
        "batch_stats": [{"batch_size": 2} | compute],
        "memory_usage": [],
    }


def test_threads_lose_no_count() -> None:
    statistics = ModelStatistics()

    def work() -> None:
        for _ in range(500):
            succeed(statistics)
            statistics.record_failure("OTHER")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = statistics.snapshot()
    assert (snapshot.num_success, snapshot.failed.count, snapshot.request.count) == (
        2000,
        2000,
        2000,
    )
