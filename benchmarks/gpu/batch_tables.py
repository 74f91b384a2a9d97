"""The 26 tables of a small batch, and keys of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.slabs import rows_at
from cache.table import write_table

NUM_TABLES = 26
NUM_SAMPLES = 64
DIM = 16
ROW_BYTES = 4 * DIM
TABLES = tuple(f"table_{number:02d}" for number in range(NUM_TABLES))
MISS_SHARE = 0.1

Keys = NDArray[np.int64]  # [64, 26]: column j is of table j


def write_tables(root: Path, num_rows: int) -> None:
    """Write all tables, of as many rows each."""
    for number, name in enumerate(TABLES):
        write_table(root / name, [table_rows(number, num_rows, np.arange(num_rows))], dim=DIM)


def table_rows(table: int, num_rows: int, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """What a table of `num_rows` rows holds in these rows; no two tables hold the same."""
    return rows_at(rows + table * num_rows, DIM).view(np.float32)


def random_batches(num_rows: int, count: int, random: np.random.Generator) -> list[Keys]:
    """Keys all over the tables."""
    return [random.integers(0, num_rows, (NUM_SAMPLES, NUM_TABLES)) for _ in range(count)]


def batches_with_misses(
    num_rows: int, num_hot: int, count: int, random: np.random.Generator
) -> list[Keys]:
    """A tenth of the positions of each batch ask for rows that were not asked for lately."""
    num_cold = num_rows - num_hot
    next_cold = np.zeros(NUM_TABLES, dtype=np.int64)
    batches = []
    for _ in range(count):
        keys = random.integers(0, num_hot, (NUM_SAMPLES, NUM_TABLES))
        positions = random.permutation(keys.size)[: int(MISS_SHARE * keys.size)]
        for position in positions.tolist():
            sample, table = divmod(position, NUM_TABLES)
            keys[sample, table] = num_hot + next_cold[table] % num_cold
            next_cold[table] += 1
        batches.append(keys)
    return batches
