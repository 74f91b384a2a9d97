"""When to close the next batch while one computes."""

from __future__ import annotations

import math
from collections import deque

from server.statistics import BatchTimings

NUM_KEPT = 5


def size_class(num_rows: int) -> int:
    """Batches of one class take about the same time: those of one power of two of the rows."""
    return num_rows.bit_length()


class Pace:
    """Predicts from the last batches how long the next ones take; has no clock and no lock.

    Durations are kept by `size_class`, since both stages take longer for more rows. A prediction is
    the median of the last `NUM_KEPT`, so that one slow read or run does not move it.
    """

    def __init__(self) -> None:
        self._size_to_prepare_s: dict[int, deque[float]] = {}
        self._size_to_compute_s: dict[int, deque[float]] = {}

    def record(self, num_rows: int, timings: BatchTimings) -> None:
        """Notes how long a batch of `num_rows` took, without what it waited for."""
        size = size_class(num_rows)
        for durations, seconds in (
            (self._size_to_prepare_s, timings.compute_input_s),
            (self._size_to_compute_s, timings.compute_infer_s + timings.compute_output_s),
        ):
            durations.setdefault(size, deque(maxlen=NUM_KEPT)).append(seconds)

    def close_at_s(self, started_s: float, num_rows: int, num_next_rows: int) -> float:
        """When to close a batch that has `num_next_rows` so far, to be ready in time.

        That is one predicted time to prepare it before the predicted end of the batch of `num_rows`
        that has computed since `started_s`. Infinite where a batch of either size is new: then it
        is closed when the other ends.
        """
        compute_s = _median(self._size_to_compute_s.get(size_class(num_rows)))
        prepare_s = _median(self._size_to_prepare_s.get(size_class(num_next_rows)))
        if compute_s is None or prepare_s is None:
            return math.inf
        return started_s + compute_s - prepare_s


def _median(durations: deque[float] | None) -> float | None:
    return sorted(durations)[len(durations) // 2] if durations else None
