"""Seeded traces of embedding keys: a Zipf law, and the reuse histogram of real ad requests.

The `ads` profile follows the histogram that Meta published for its 2021 embedding traces: which
share of the distinct rows is accessed once, twice, three to four times and so on, and which share
of all accesses these rows draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MODEL = "dlrm"  # the demo model, which the samples are for
NUM_DENSE = 13
DEFAULT_NUM_ACCESSES = 10_000_000

# Bin i holds the rows with more than BIN_LOWS[i] and at most BIN_LOWS[i + 1] accesses; the last bin
# is open.
BIN_LOWS = (0, *(2**power for power in range(16)))
# The bins after the tenth hold less than one row in a thousand; their shares are not published.
ROW_SHARES = (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001)
ACCESS_SHARES = (
    *(0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052, 0.050),
    *(0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019),
)
DISTINCT_PER_ACCESS = ACCESS_SHARES[0] / ROW_SHARES[0]

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]


class WorkloadError(ValueError):
    """The tables cannot hold the trace that was asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples: `keys` int64 [num_samples, num_tables], `dense` float32 [num_samples, 13]."""

    keys: Keys
    dense: Floats

    @property
    def num_samples(self) -> int:
        """Samples before the trace starts again."""
        return len(self.keys)

    def rows(self, first: int, count: int) -> tuple[Floats, Keys]:
        """`count` samples from sample `first` on; after the last sample comes the first again."""
        first %= self.num_samples
        if first + count <= self.num_samples:
            return self.dense[first : first + count], self.keys[first : first + count]
        index = np.arange(first, first + count) % self.num_samples
        return self.dense[index], self.keys[index]


def dense_features(num_samples: int, seed: int) -> Floats:
    """Normal features, float32 [num_samples, 13]."""
    rng = np.random.default_rng([seed, 13])
    return rng.standard_normal((num_samples, NUM_DENSE), dtype=np.float32)


def zipf_keys(table_rows: Sequence[int], num_samples: int, exponent: float, seed: int) -> Keys:
    """Keys int64 [num_samples, num_tables]; rank r is drawn in proportion to r**-exponent.

    Ranks are permuted per table, so hot rows are spread over the row file.
    """
    if not 0 <= exponent < np.inf:
        raise WorkloadError(f"zipf exponent: expected a number from 0 up, got {exponent}")
    keys = np.empty((num_samples, len(table_rows)), np.int64)
    for table, num_rows in enumerate(table_rows):
        rng = np.random.default_rng([seed, table])
        cumulative = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
        ranks = np.searchsorted(cumulative, rng.random(num_samples) * cumulative[-1], "right")
        keys[:, table] = rng.permutation(num_rows)[np.minimum(ranks, num_rows - 1)]
    return keys


def ads_keys(table_rows: Sequence[int], num_samples: int, seed: int) -> Keys:
    """Keys int64 [num_samples, num_tables] with, over the whole trace, the published histogram.

    The number of accesses of every distinct row is fixed first, exactly; the rows are dealt to the
    tables so that each table has `num_samples` accesses, then the order within a table is shuffled.
    Raises WorkloadError when a table has too few rows for it.
    """
    counts = _counts_per_table(len(table_rows), num_samples)
    if any(len(c) > rows for c, rows in zip(counts, table_rows, strict=True)):
        largest = largest_ads_samples(table_rows)
        raise WorkloadError(
            f"ads trace: {num_samples} samples need up to {max(map(len, counts))} rows in a table, "
            f"the smallest table has {min(table_rows)}; "
            f"the largest possible number of samples is {largest}"
        )
    keys = np.empty((num_samples, len(table_rows)), np.int64)
    for table, num_rows in enumerate(table_rows):
        rng = np.random.default_rng([seed, table])
        rows = rng.permutation(num_rows)[: len(counts[table])]
        keys[:, table] = rng.permutation(np.repeat(rows, counts[table]))
    return keys


def largest_ads_samples(table_rows: Sequence[int]) -> int:
    """The number of samples (to about 1 %) of the longest `ads` trace that fits in these tables."""
    smallest = min(table_rows)
    num_samples = int(smallest / DISTINCT_PER_ACCESS * 1.1)
    while num_samples >= MIN_ADS_SAMPLES:
        counts = _counts_per_table(len(table_rows), num_samples)
        if all(len(c) <= rows for c, rows in zip(counts, table_rows, strict=True)):
            return num_samples
        num_samples = min(num_samples - 1, int(num_samples * 0.99))
    return 0


MIN_ADS_SAMPLES = 64


def ads_counts(num_accesses: int, max_count: int) -> NDArray[np.int64]:
    """Accesses of each distinct row, descending; they sum to `num_accesses`.

    A short trace cannot hold the hottest rows (more than `max_count` accesses); what they would
    draw goes to the next cooler bin.
    """
    shares = np.array(ACCESS_SHARES) / sum(ACCESS_SHARES)
    num_distinct = num_accesses * DISTINCT_PER_ACCESS
    parts: list[NDArray[np.int64]] = []
    carried = 0.0
    is_merged = False
    for bin_index in range(len(BIN_LOWS) - 1, 0, -1):
        low = BIN_LOWS[bin_index]
        accesses = shares[bin_index] * num_accesses + carried
        if low + 1 > max_count or accesses < low + 1:
            carried, is_merged = accesses, True
            continue
        high = min(2 * low, max_count)
        rows = num_distinct * ROW_SHARES[bin_index] if bin_index < len(ROW_SHARES) else 0.0
        # Without a published share of rows, the counts of a bin fall like 1 / count**2.
        mean = accesses / rows if rows and not is_merged else low * 2 * np.log(2)
        mean = float(np.clip(mean, low + 1, high))
        parts.append(_spread(low + 1, high, mean, max(1, round(accesses / mean))))
        carried, is_merged = accesses - float(parts[-1].sum()), False
    counts = np.concatenate(parts) if parts else np.empty(0, np.int64)
    num_singles = num_accesses - int(counts.sum())
    assert num_singles >= 0
    return np.concatenate([np.sort(counts)[::-1], np.ones(num_singles, np.int64)])


def _spread(low: int, high: int, mean: float, num_rows: int) -> NDArray[np.int64]:
    """`num_rows` counts from low to high: quantiles of the power law with that mean."""
    values = np.arange(low, high + 1)
    logs = np.log(values / low)
    steep, flat = -60.0, 60.0
    for _ in range(60):
        power = (steep + flat) / 2
        weights = np.exp(power * logs)
        if (weights @ values) / weights.sum() < mean:
            steep = power
        else:
            flat = power
    cumulative = np.cumsum(weights) / weights.sum()
    quantiles = (np.arange(num_rows) + 0.5) / num_rows
    return values[np.minimum(np.searchsorted(cumulative, quantiles), len(values) - 1)]


def _counts_per_table(num_tables: int, num_samples: int) -> list[NDArray[np.int64]]:
    """Deals the rows to tables so that the counts of each table sum to `num_samples`."""
    if num_samples < MIN_ADS_SAMPLES:
        raise WorkloadError(
            f"ads trace: expected at least {MIN_ADS_SAMPLES} samples, got {num_samples}"
        )
    counts = ads_counts(num_samples * num_tables, max_count=num_samples // 4)
    values, repeats = np.unique(counts, return_counts=True)
    used = np.zeros(num_tables, np.int64)
    dealt: list[tuple[int, NDArray[np.int64]]] = []
    for value, repeat in zip(values[:0:-1].tolist(), repeats[:0:-1].tolist(), strict=True):
        share = np.full(num_tables, repeat // num_tables)
        share[np.argsort(used, kind="stable")[: repeat % num_tables]] += 1
        used += share * value
        dealt.append((value, share))
    singles = num_samples - used  # rows with one access even the tables out
    assert (singles >= 0).all()
    dealt.append((1, singles))
    all_values = np.array([value for value, _ in dealt])
    all_shares = np.array([share for _, share in dealt])
    return [np.repeat(all_values, all_shares[:, table]) for table in range(num_tables)]


def reuse_histogram(keys: Keys) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(share of distinct rows, share of accesses) by the bins of BIN_LOWS, over all tables."""
    counts = np.concatenate(
        [np.unique(keys[:, table], return_counts=True)[1] for table in range(keys.shape[1])]
    )
    bins = np.searchsorted(BIN_LOWS, counts, "left") - 1
    rows = np.bincount(bins, minlength=len(BIN_LOWS)).astype(np.float64)
    accesses = np.bincount(bins, weights=counts, minlength=len(BIN_LOWS))
    return rows / rows.sum(), accesses / accesses.sum()


def make_workload(
    table_rows: Sequence[int],
    *,
    profile: str,
    zipf_exponent: float = 1.0,
    seed: int = 0,
    num_samples: int | None = None,
) -> Workload:
    """A workload of 10 M accesses, or fewer where small tables hold no longer `ads` trace."""
    asked = num_samples or DEFAULT_NUM_ACCESSES // len(table_rows)
    if profile == "zipf":
        keys = zipf_keys(table_rows, asked, zipf_exponent, seed)
    elif profile == "ads":
        if num_samples is None and asked * DISTINCT_PER_ACCESS > 0.95 * min(table_rows):
            asked = min(asked, largest_ads_samples(table_rows))
        keys = ads_keys(table_rows, asked, seed)
    else:
        raise WorkloadError(f"profile: expected ads or zipf, got {profile!r}")
    return Workload(keys, dense_features(len(keys), seed))
