"""How much this machine stretches a task by itself, measured with no server running.

A virtual machine or a busy neighbour makes any work slower now and then. A p99 below what that does
to a task of fixed work says more about the machine than about the server.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtests.percentiles import nearest_rank

TASK_S = 0.001
INTERVAL_S = 0.005  # from the start of one task to the next
DURATION_S = 4.0


@dataclass(frozen=True, slots=True)
class Noise:
    """How long the same task took, run after run; a stretch is a multiple of its median."""

    num_tasks: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @property
    def p99_stretch(self) -> float:
        """The p99 as a multiple of the median."""
        return self.p99_ms / self.p50_ms

    @property
    def max_stretch(self) -> float:
        """The longest as a multiple of the median."""
        return self.max_ms / self.p50_ms

    def __str__(self) -> str:
        """What it means for a reader of the figures."""
        return (
            f"With no server running, a task of {self.p50_ms:.1f} ms took up to {self.p99_ms:.1f} "
            f"ms at p99 on this machine ({self.p99_stretch:.1f} times its median; the longest of "
            f"{self.num_tasks} took {self.max_ms:.1f} ms): p99 figures below about "
            f"{self.p99_ms:.1f} ms, and differences of that size, are the machine's. "
            "Longer work can be stretched by the same factor."
        )


def measure_noise(
    task: Callable[[int], object] = lambda count: sum(range(count)),
    *,
    now_s: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Noise:
    """Run the task at fixed intervals; blocks for about DURATION_S seconds.

    `task` does an amount of work in proportion to the number that it gets.
    """
    count = _calibrate(task, now_s)
    durations_ms = []
    start_s = now_s()
    for number in range(round(DURATION_S / INTERVAL_S)):
        sleep(max(0.0, start_s + number * INTERVAL_S - now_s()))
        durations_ms.append(_time(task, count, now_s) * 1000)
    figures = nearest_rank(np.array(durations_ms), (50, 99, 100))
    return Noise(len(durations_ms), *figures)


def _calibrate(task: Callable[[int], object], now_s: Callable[[], float]) -> int:
    """The number with which the undisturbed task takes about TASK_S."""
    count = 1000
    while (best_s := min(_time(task, count, now_s) for _ in range(5))) < TASK_S:
        count *= 2
    return round(count * TASK_S / best_s)


def _time(task: Callable[[int], object], count: int, now_s: Callable[[], float]) -> float:
    start_s = now_s()
    task(count)
    return now_s() - start_s


def write_noise(path: Path, noise: Noise) -> None:
    """Write the figures as a CSV file of one line."""
    names = ("num_tasks", "p50_ms", "p99_ms", "max_ms", "p99_stretch", "max_stretch")
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, [getattr(noise, name) for name in names]])
