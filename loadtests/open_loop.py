"""The plan of an open-loop load test: when each request is due, and what became of it.

Arrivals are planned before the test, whatever the server does. A bounded set of users takes them in
order; when all users are busy, an arrival is sent late. Latency counts from the planned time, so
the wait for a stalled server is in the figures of every request that was due meanwhile.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from loadtests.samples import Outcome, Samples

PROCESSES = ("poisson", "uniform")


def plan_arrivals(
    rate: float,
    duration_s: float,
    process: str = "poisson",
    seed: int = 0,
    *,
    lead_in_s: float = 0.0,
) -> NDArray[np.float64]:
    """Seconds from the start of the measured time at which requests are due, ascending.

    They reach from `-lead_in_s` to `duration_s`; requests before 0 are sent and not measured. At
    least one is due at or after 0.
    `poisson` draws exponential gaps (independent clients), `uniform` keeps them equal.
    """
    for name, value in (("rate", rate), ("duration", duration_s)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    if not 0 <= lead_in_s < np.inf:
        raise ValueError(f"lead-in: expected a number from 0 up, got {lead_in_s}")
    if process == "uniform":
        # Rounded, since 0.1 * 3 requests are a little more than 0.3 in floats.
        first = -math.floor(round(rate * lead_in_s, 9))
        end = max(1, math.ceil(round(rate * duration_s, 9)))
        return np.arange(first, end) / rate
    if process != "poisson":
        raise ValueError(f"arrivals: expected poisson or uniform, got {process!r}")
    rng = np.random.default_rng(seed)
    # A Poisson process has a Poisson number of arrivals, and given it they are uniform draws.
    length_s = lead_in_s + duration_s
    draws = np.sort(rng.random(int(rng.poisson(rate * length_s))))
    planned_s = draws * length_s - lead_in_s
    if not (planned_s >= 0).any():
        planned_s = np.append(planned_s, rng.random() * duration_s)
    return planned_s


class OpenLoop:
    """Hands out arrivals in order and keeps one raw sample of each.

    It has no clock: times are seconds from the start of the measured time. It is not safe for
    threads; greenlets may share it, because no method yields.
    """

    def __init__(self, planned_s: NDArray[np.float64]) -> None:
        self._samples = Samples.planned(planned_s)
        self._num_taken = 0
        self._num_settled = 0

    def take(self) -> tuple[int, float] | None:
        """The next arrival as (index, planned time), or None when all are taken."""
        if self._num_taken == len(self._samples):
            return None
        index = self._num_taken
        self._num_taken += 1
        return index, float(self._samples.planned_s[index])

    def sent(self, index: int, now_s: float) -> None:
        """Arrival `index` went out; until it is settled it counts as unfinished."""
        self._samples.sent_s[index] = now_s
        self._samples.outcome[index] = Outcome.UNFINISHED

    def settled(
        self, index: int, now_s: float, *, outcome: Outcome, status: int, num_bytes: int
    ) -> None:
        """Arrival `index` has its answer, or has failed."""
        self._samples.done_s[index] = now_s
        self._samples.outcome[index] = outcome
        self._samples.status[index] = status
        self._samples.num_bytes[index] = num_bytes
        self._num_settled += 1

    @property
    def is_settled(self) -> bool:
        """Every arrival has an answer or has failed."""
        return self._num_settled == len(self._samples)

    def samples(self) -> Samples:
        """The raw samples so far, one for each planned arrival."""
        return self._samples
