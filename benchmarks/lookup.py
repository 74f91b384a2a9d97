"""Lookups that all hit, against NumPy and torch on resident rows: python -m benchmarks.lookup.

One process, one thread each; the three take turns, so that they see the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cache import FeatureCache, Lookup, open_device
from cache.table import write_table

NUM_KEYS = 26 * 64
NUM_BATCHES = 64


def main() -> None:
    """Print one line a dimension: median times, and the ratios of a lookup to the others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{NUM_KEYS} Zipf keys of {arguments.rows} rows, float32, all in the device tier; us")
    print("dim  numpy.take  torch embedding  lookup  lookup/numpy  lookup/torch")
    for dim in (16, 64):
        take, embedding, lookup = measure(dim, arguments.rows, arguments.repeats)
        print(
            f"{dim:3}  {take:10.1f}  {embedding:15.1f}  {lookup:6.1f}  "
            f"{lookup / take:12.2f}  {lookup / embedding:12.2f}"
        )


def measure(dim: int, num_rows: int, repeats: int) -> list[float]:
    """Median times in us of `numpy.take`, torch's `embedding`, and a lookup with its frame."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((num_rows, dim), dtype=np.float32)
    hot_first = random.permutation(num_rows)
    batches = [hot_first[random.zipf(1.1, NUM_KEYS) % num_rows] for _ in range(NUM_BATCHES)]
    tensor = torch.from_numpy(rows)
    out = np.zeros((NUM_KEYS, dim), dtype=np.float32)
    with tempfile.TemporaryDirectory() as folder:
        cache = _open_cache(Path(folder), rows)
        for batch in batches:
            _look_up(cache, batch, out)
            np.testing.assert_array_equal(out, rows[batch])
        times: list[list[float]] = [[], [], []]
        for repeat in range(repeats):
            keys = batches[repeat % NUM_BATCHES]
            contenders: list[Callable[[], object]] = [
                partial(np.take, rows, keys, axis=0, out=out, mode="clip"),
                partial(torch.nn.functional.embedding, torch.from_numpy(keys), tensor),
                partial(_look_up, cache, keys, out),
            ]
            for contender, seconds in zip(contenders, times, strict=True):
                started = time.perf_counter()
                contender()
                seconds.append(time.perf_counter() - started)
        cache.close()
    return [statistics.median(seconds) * 1e6 for seconds in times]


def _open_cache(folder: Path, rows: NDArray[np.float32]) -> FeatureCache:
    """A cache of one table whose rows are all in the device tier."""
    num_rows, dim = rows.shape
    write_table(folder / "rows", [rows], dim=dim)
    device = open_device("cpu", max_bytes=2 * rows.nbytes, max_host_bytes=2 * rows.nbytes)
    cache = FeatureCache.open(
        folder, device, table_memory_bytes=rows.nbytes, host_memory_bytes=rows.nbytes
    )
    out = np.zeros((8192, dim), dtype=np.float32)
    for first in range(0, num_rows, 8192):
        keys = np.arange(first, min(first + 8192, num_rows))
        _look_up(cache, keys, out[: len(keys)])
    return cache


def _look_up(cache: FeatureCache, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    with cache.frame() as frame:
        frame.lookup([Lookup(("rows",), keys, out)])


if __name__ == "__main__":
    main()
