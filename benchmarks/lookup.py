"""Lookups that all hit, against `numpy.take` of the same rows: python -m benchmarks.lookup."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cache import FeatureCache, Lookup, open_device
from cache.table import write_table

NUM_KEYS = 26 * 64


def main() -> None:
    """Print one line a dimension: medians of interleaved repeats, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{NUM_KEYS} Zipf keys of {arguments.rows} rows, float32, all in the device tier")
    print("dim   numpy.take us   lookup us   ratio")
    for dim in (16, 64):
        take_us, lookup_us = measure(dim, arguments.rows, arguments.repeats)
        print(f"{dim:3}   {take_us:13.1f}   {lookup_us:9.1f}   {lookup_us / take_us:5.2f}")


def measure(dim: int, num_rows: int, repeats: int) -> tuple[float, float]:
    """Median times of `numpy.take` and of a lookup in microseconds."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((num_rows, dim), dtype=np.float32)
    permutation = random.permutation(num_rows)
    batches = [permutation[random.zipf(1.1, NUM_KEYS) % num_rows] for _ in range(64)]
    out = np.zeros((NUM_KEYS, dim), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "rows", [rows], dim=dim)
        num_bytes = rows.nbytes
        device = open_device("cpu", max_bytes=2 * num_bytes, max_host_bytes=2 * num_bytes)
        cache = FeatureCache.open(
            Path(folder), device, table_memory_bytes=num_bytes, host_memory_bytes=num_bytes
        )
        for first in range(0, num_rows, 8192):
            _look_up(cache, np.arange(first, min(first + 8192, num_rows)))
        for batch in batches:
            np.testing.assert_array_equal(_look_up(cache, batch), rows[batch])
        take_s, lookup_s = [], []
        with cache.frame() as frame:
            for repeat in range(repeats):
                keys = batches[repeat % len(batches)]
                take_s.append(_time(lambda keys=keys: np.take(rows, keys, axis=0, out=out)))  # type: ignore[misc]
                lookup = [Lookup(("rows",), keys, out)]
                lookup_s.append(_time(lambda lookup=lookup: frame.lookup(lookup)))  # type: ignore[misc]
        cache.close()
    return statistics.median(take_s) * 1e6, statistics.median(lookup_s) * 1e6


def _look_up(cache: FeatureCache, keys: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    dim = cache.tables["rows"].dim
    out = np.zeros((len(keys), dim), dtype=np.float32)
    with cache.frame() as frame:
        frame.lookup([Lookup(("rows",), keys, out)])
    return out


def _time(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
