"""When the next batch is closed while one computes: predictions, and runs in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from server.batch_queue import BatchQueue, Queued
from server.pacing import Pace
from server.statistics import BatchTimings


def new_pace(*batches: tuple[int, float, float]) -> Pace:
    pace = Pace()
    for num_rows, prepare_s, compute_s in batches:
        pace.record(num_rows, new_timings(prepare_s, compute_s))
    return pace


def new_timings(prepare_s: float, compute_s: float) -> BatchTimings:
    """Timings of stages that take so long, of a batch that also waited long."""
    quarter_s = compute_s / 4
    return BatchTimings(prepare_s / 2, prepare_s / 2, compute_s - quarter_s, quarter_s, wait_s=1e6)


def test_a_batch_is_closed_one_prepare_before_the_end_of_the_other() -> None:
    pace = new_pace((8, 2, 10))
    assert pace.close_at_s(100, num_rows=8, num_next_rows=8) == 100 + 10 - 2


def test_without_data_nothing_is_closed_before_the_end() -> None:
    assert new_pace().close_at_s(100, 8, 8) == math.inf
    assert new_pace((8, 2, 10)).close_at_s(100, 8, 64) == math.inf
    assert new_pace((8, 2, 10)).close_at_s(100, 64, 8) == math.inf


def test_batches_of_about_the_same_rows_predict_each_other() -> None:
    pace = new_pace((1, 1, 4), (64, 16, 40))
    assert pace.close_at_s(0, num_rows=64, num_next_rows=1) == 40 - 1
    assert pace.close_at_s(0, num_rows=1, num_next_rows=100) == 4 - 16
    assert pace.close_at_s(0, num_rows=127, num_next_rows=64) == 40 - 16


def test_one_slow_batch_moves_nothing_and_a_change_is_learned() -> None:
    pace = new_pace(*[(8, 2, 10)] * 5, (8, 50, 500))
    assert pace.close_at_s(0, 8, 8) == 10 - 2
    pace = new_pace(*[(8, 2, 10)] * 5, *[(8, 3, 20)] * 3)
    assert pace.close_at_s(0, 8, 8) == 20 - 3


# Whole runs: arrivals in, batches out.

MAX_BATCH_SIZE = 64
Duration = Callable[[int], float]


@dataclass
class Batch:
    rows: int
    closed_s: float
    ready_s: float
    begun_s: float = math.inf
    ended_s: float = math.inf
    arrived_s: list[float] = field(default_factory=list)


class Simulation:
    """The batcher's two stages in simulated time."""

    def __init__(self, prepare_s: Duration, compute_s: Duration, is_overlapped: bool) -> None:
        self.prepare_s = prepare_s
        self.compute_s = compute_s
        self.is_overlapped = is_overlapped
        self.queue: BatchQueue[Queued] = BatchQueue(MAX_BATCH_SIZE, 10**6)
        self.pace = Pace()
        self.ahead: Batch | None = None
        self.computing: Batch | None = None
        self.done: list[Batch] = []

    def run(self, arrivals: Sequence[float]) -> list[Batch]:
        arrivals = list(arrivals)
        now_s = 0.0
        while arrivals or len(self.queue) or self.ahead or self.computing:
            next_s = self.step(now_s)
            now_s = min(next_s, arrivals[0] if arrivals else math.inf)
            while arrivals and arrivals[0] <= now_s:
                self.queue.add(Queued(1, "k", arrivals.pop(0)))
        return self.done

    def step(self, now_s: float) -> float:
        """Do all that is due, and return when something is due again."""
        if self.computing and self.computing.ended_s <= now_s:
            batch, self.computing = self.computing, None
            self.done.append(batch)
            timings = new_timings(self.prepare_s(batch.rows), self.compute_s(batch.rows))
            self.pace.record(batch.rows, timings)
        if self.ahead and self.ahead.ready_s <= now_s and not self.computing:
            self.computing, self.ahead = self.ahead, None
            self.computing.begun_s = now_s
            self.computing.ended_s = now_s + self.compute_s(self.computing.rows)
        wait_s = math.inf
        if not self.ahead and (self.is_overlapped or not self.computing):
            take = self.queue.take(now_s, not_before_s=self.close_at_s)
            if take.batch:
                rows = len(take.batch)
                self.ahead = Batch(rows, now_s, now_s + self.prepare_s(rows))
                self.ahead.arrived_s = [item.arrived_s for item in take.batch]
            elif take.wait_s is not None:
                wait_s = take.wait_s
        times = [now_s + wait_s]
        times += [self.computing.ended_s] if self.computing else []
        times += [self.ahead.ready_s] if self.ahead and self.ahead.ready_s > now_s else []
        return min(times)

    def close_at_s(self, num_rows: int) -> float:
        if not self.computing:
            return -math.inf
        return self.pace.close_at_s(self.computing.begun_s, self.computing.rows, num_rows)


def prepare_s(rows: int) -> float:
    return 1.0 + 0.0625 * rows


def compute_s(rows: int) -> float:
    return 4.0 + 0.0625 * rows


def run_both(rate: float, num_requests: int = 2000) -> tuple[list[Batch], list[Batch]]:
    """The same arrivals without overlap and with it; what has begun after a tenth of them."""
    arrivals = [i / rate for i in range(num_requests)]
    runs = [
        Simulation(prepare_s, compute_s, is_overlapped).run(arrivals)
        for is_overlapped in (False, True)
    ]
    without, with_overlap = (
        [batch for batch in run if arrivals[num_requests // 10] < batch.begun_s < arrivals[-1]]
        for run in runs
    )
    return without, with_overlap


def mean_wait_s(batches: Sequence[Batch]) -> float:
    waits = [batch.ended_s - at_s for batch in batches for at_s in batch.arrived_s]
    return sum(waits) / len(waits)


def test_under_overload_batches_stay_full_and_the_model_is_never_idle() -> None:
    without, with_overlap = run_both(rate=16)
    assert {batch.rows for batch in (*without, *with_overlap)} == {MAX_BATCH_SIZE}
    assert {later.begun_s - batch.ended_s for batch, later in pairwise(with_overlap)} == {0.0}
    assert len(with_overlap) >= 1.4 * len(without)


@pytest.mark.parametrize("rate", [0.5, 1, 2, 4, 5])
def test_below_it_a_batch_takes_what_arrives_in_one_run_and_is_ready_just_in_time(
    rate: float,
) -> None:
    without, with_overlap = run_both(rate)
    for batch, later in pairwise(with_overlap):
        # All that came until one prepare before the end, give or take a size class.
        assert later.rows >= rate * (later.closed_s - batch.closed_s) - 1
        assert later.begun_s - later.ready_s <= 1.0
    assert mean_wait_s(with_overlap) <= mean_wait_s(without)


def test_the_first_batches_are_those_of_a_batcher_without_overlap() -> None:
    arrivals = [i / 2 for i in range(12)]
    first = [Simulation(prepare_s, compute_s, o).run(arrivals)[:2] for o in (False, True)]
    assert first[0] == first[1]
