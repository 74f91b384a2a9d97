"""Times of device work between two events, of contenders that take turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.check import Check
from cache.cuda import CudaDevice

Enqueue = Callable[[], object]

_MAX_CALLS = 200
_MIN_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Samples:
    """One number a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle."""
        return self.percentile(50)

    def percentile(self, percent: float) -> float:
        """The value that `percent` of the rounds are not above."""
        return float(np.percentile(self.values, percent))

    def over(self, others: Samples) -> float:
        """The median of the ratios, round by round."""
        ratios = np.array(self.values) / np.array(others.values)
        return float(np.median(ratios))


class StreamTimer:
    """Times what is enqueued in the device's compute stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._cuda = device.cupy.cuda

    def time_ms(self, calls: Sequence[Enqueue], num_calls: int) -> float:
        """Milliseconds a call; the calls come in turn and follow each other without a gap."""
        with self._device.calls():
            start, stop = self._cuda.Event(), self._cuda.Event()
            self._device.compute.stream.record(start)
        for number in range(num_calls):
            calls[number % len(calls)]()
        with self._device.calls():
            self._device.compute.stream.record(stop)
            stop.synchronize()
            elapsed_ms = float(self._cuda.get_elapsed_time(start, stop))
        return elapsed_ms / num_calls


def rates(
    check: Check,
    device: CudaDevice,
    contenders: Mapping[str, Sequence[Enqueue]],
    num_bytes: int,
) -> dict[str, Samples]:
    """GB/s (10^9 bytes) of each contender by round, where a call moves `num_bytes`.

    A contender is calls that work on different memory, so that none finds its rows in a cache.
    Every round gives each contender one sample of about `sample_ms`. Warmed up; late checks end
    with fewer rounds.
    """
    timer = StreamTimer(device)
    num_calls = {}
    for name, calls in contenders.items():
        timer.time_ms(calls, 2 * len(calls))
        wanted = check.scale.sample_ms / max(timer.time_ms(calls, 2 * len(calls)), 1e-6)
        num_calls[name] = max(len(calls), min(_MAX_CALLS, math.ceil(wanted)))
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(check.scale.num_rounds):
        if number >= _MIN_ROUNDS and check.is_late:
            break
        for name, calls in contenders.items():
            elapsed_ms = max(timer.time_ms(calls, num_calls[name]), 1e-9)
            values[name].append(num_bytes / elapsed_ms / 1e6)
    return {name: Samples(tuple(rounds)) for name, rounds in values.items()}
