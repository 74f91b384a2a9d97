"""The traces: their reuse, their seeds, and what small tables make of them."""

from __future__ import annotations

import numpy as np
import pytest

from loadtests.workloads import (
    ACCESS_SHARES,
    DEFAULT_NUM_ACCESSES,
    ROW_SHARES,
    WorkloadError,
    ads_counts,
    ads_keys,
    largest_ads_samples,
    make_workload,
    reuse_histogram,
    zipf_keys,
)

NUM_TABLES = 26
TOLERANCE = 0.002  # absolute; the published shares are rounded to 0.001


def test_ten_million_accesses_follow_the_published_histogram() -> None:
    num_samples = DEFAULT_NUM_ACCESSES // NUM_TABLES
    keys = ads_keys([90_000] * NUM_TABLES, num_samples, seed=3)
    assert keys.shape == (num_samples, NUM_TABLES)
    assert keys.min() >= 0
    assert keys.max() < 90_000

    row_shares, access_shares = reuse_histogram(keys)

    assert np.abs(access_shares - ACCESS_SHARES).max() < TOLERANCE
    assert np.abs(row_shares[: len(ROW_SHARES)] - ROW_SHARES).max() < TOLERANCE
    assert row_shares[len(ROW_SHARES) :].max() < 0.001


def test_the_counts_add_up_exactly() -> None:
    counts = ads_counts(1_000_000, max_count=10_000)
    assert counts.sum() == 1_000_000
    assert counts.max() <= 10_000
    assert (np.diff(counts) <= 0).all()


def test_a_seed_repeats_the_trace_and_another_does_not() -> None:
    first, again, other = (ads_keys([500, 800], 1000, seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_hot_rows_are_spread_over_the_table() -> None:
    keys = zipf_keys([10_000], 50_000, 1.1, seed=0)[:, 0]
    rows, counts = np.unique(keys, return_counts=True)
    hottest = rows[np.argsort(counts)[-100:]]
    assert 3000 < hottest.mean() < 7000


def test_zipf_draws_follow_the_exponent() -> None:
    counts = np.sort(np.bincount(zipf_keys([1000], 1_000_000, 1.0, seed=0)[:, 0]))[::-1]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.05)
    assert counts[0] / counts[99] == pytest.approx(100, rel=0.1)


def test_zipf_with_exponent_0_is_uniform() -> None:
    counts = np.bincount(zipf_keys([100], 1_000_000, 0.0, seed=0)[:, 0], minlength=100)
    assert counts.min() > 9_500
    assert counts.max() < 10_500


def test_tables_too_small_for_a_trace_say_how_long_it_can_be() -> None:
    rows = [1000, 400]
    with pytest.raises(WorkloadError, match="the smallest table has 400; the largest possible"):
        ads_keys(rows, 10_000, seed=0)

    largest = largest_ads_samples(rows)

    assert ads_keys(rows, largest, seed=0).shape == (largest, 2)
    with pytest.raises(WorkloadError):
        ads_keys(rows, int(largest * 1.03), seed=0)


def test_a_workload_shrinks_to_small_tables() -> None:
    workload = make_workload([400] * NUM_TABLES, profile="ads", seed=1)
    assert workload.num_samples == largest_ads_samples([400] * NUM_TABLES)
    assert workload.dense.shape == (workload.num_samples, 13)


def test_after_the_last_sample_comes_the_first() -> None:
    workload = make_workload([10, 20], profile="zipf", num_samples=5)
    dense, keys = workload.rows(first=3, count=4)
    assert (keys == workload.keys[[3, 4, 0, 1]]).all()
    assert (dense == workload.dense[[3, 4, 0, 1]]).all()
    assert (workload.rows(first=7, count=2)[1] == workload.keys[2:4]).all()


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(WorkloadError, match="expected ads or zipf, got 'even'"):
        make_workload([10], profile="even")


@pytest.mark.parametrize("exponent", [-1, float("nan"), float("inf")])
def test_an_exponent_that_is_no_number_from_0_up_is_refused(exponent: float) -> None:
    with pytest.raises(WorkloadError, match="zipf exponent: expected a number from 0 up"):
        zipf_keys([10], 10, exponent, seed=0)
