"""Percentiles are samples, by nearest rank."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.percentiles import nearest_rank

FINITE = st.floats(min_value=0, max_value=1e6)


def test_the_ranks_of_one_hundred_samples() -> None:
    samples = np.arange(100.0, 0.0, -1.0)
    assert nearest_rank(samples, (0, 1, 50, 99, 99.1, 100)) == [1, 1, 50, 99, 100, 100]


def test_rounding_of_the_rank_does_not_skip_a_sample() -> None:
    samples = np.arange(1.0, 1001.0)
    # 99.9 / 100 * 1000 is a little above 999 in floating point.
    assert nearest_rank(samples, (99.9,)) == [999]


def test_one_outlier_in_a_hundred_is_the_maximum_and_not_the_p99() -> None:
    samples = np.array([123.0] * 99 + [1499.0])
    assert nearest_rank(samples, (50, 99, 99.9, 100)) == [123, 123, 1499, 1499]


def test_without_samples_there_is_no_figure() -> None:
    assert all(math.isnan(value) for value in nearest_rank(np.empty(0), (50, 99)))


def test_a_percent_outside_0_to_100_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected values from 0 to 100, got \[101\]"):
        nearest_rank(np.ones(3), (101,))


@given(st.lists(FINITE, min_size=1, max_size=200), st.floats(min_value=0, max_value=100))
def test_at_least_that_share_of_the_samples_is_not_above_the_percentile(
    values: list[float], percent: float
) -> None:
    [figure] = nearest_rank(np.array(values), (percent,))
    assert figure in values
    assert sum(value <= figure for value in values) >= percent / 100 * len(values) - 1e-6
    assert sum(value < figure for value in values) <= percent / 100 * len(values) + 1e-6
