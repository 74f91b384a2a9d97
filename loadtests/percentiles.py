"""Percentiles of raw samples by the nearest-rank method."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

METHOD = (
    "nearest rank: the p-th percentile of n samples is the sample with rank ceil(p/100 * n), "
    "so every figure is a latency that was measured"
)


def nearest_rank(samples: NDArray[np.float64], percents: Sequence[float]) -> list[float]:
    """The percentiles of unsorted samples, one for each of `percents`; NaN without samples."""
    if any(not 0 <= percent <= 100 for percent in percents):
        raise ValueError(f"percents: expected values from 0 to 100, got {list(percents)}")
    if samples.size == 0:
        return [math.nan] * len(percents)
    ordered = np.sort(samples)
    return [float(ordered[_rank(percent, ordered.size) - 1]) for percent in percents]


def _rank(percent: float, num_samples: int) -> int:
    # 99.9 / 100 * 1000 is 999.0000000000001 in floats, whose ceiling would be one rank too high.
    return max(1, math.ceil(round(percent * num_samples / 100, 9)))
