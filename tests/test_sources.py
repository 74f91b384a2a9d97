"""The row files: any row, any order, direct or buffered, and what happens when they are short."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache import sources
from cache.errors import SourceError
from cache.sources import FileSource
from cache.table import Table, read_table, write_table
from tests.cache_fixtures import rows_of

DIMS = (4, 7, 16, 300)  # 7: rows that cross blocks and are smaller than their slot
NUM_ROWS = 2000


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    root = tmp_path_factory.mktemp("tables")
    for dim in DIMS:
        write_table(root / f"dim{dim}", [rows_of(np.arange(NUM_ROWS), dim)], dim=dim)
    return [read_table(root / f"dim{dim}") for dim in DIMS]


def expected(tables: list[Table], rows: list[int]) -> list[NDArray[np.float32]]:
    return [rows_of(row % NUM_ROWS, tables[row // NUM_ROWS].dim)[0] for row in rows]


@pytest.mark.parametrize("is_direct_io", [True, False])
@given(rows=st.lists(st.integers(0, NUM_ROWS * len(DIMS) - 1), unique=True, max_size=200))
@settings(deadline=None, max_examples=50)
def test_every_row_lands_in_its_slot(
    tables: list[Table], is_direct_io: bool, rows: list[int]
) -> None:
    source = FileSource(tables, is_direct_io=is_direct_io)
    host = np.full((len(rows) + 1, 304), np.nan, dtype=np.float32)
    slots = np.arange(len(rows), 0, -1)
    source.read(np.array(rows, dtype=np.int64), slots, host)
    for slot, row in zip(slots, expected(tables, rows), strict=True):
        np.testing.assert_array_equal(host[slot, : len(row)], row)
        assert np.isnan(host[slot, len(row) :]).all()
    assert np.isnan(host[0]).all()
    source.close()


def test_neighbours_and_far_rows_of_one_read(tables: list[Table]) -> None:
    source = FileSource(tables)
    rows = [*range(500), NUM_ROWS - 1, NUM_ROWS, 2 * NUM_ROWS - 1, 4 * NUM_ROWS - 1]
    host = np.zeros((len(rows), 304), dtype=np.float32)
    source.read(np.array(rows, dtype=np.int64), np.arange(len(rows)), host)
    for got, row in zip(host, expected(tables, rows), strict=True):
        np.testing.assert_array_equal(got[: len(row)], row)
    source.close()


def test_all_rows_are_read_into_slots_of_their_number(tables: list[Table]) -> None:
    for table in tables:
        source = FileSource([table])
        host = np.zeros((NUM_ROWS, table.slot_bytes // 4), dtype=np.float32)
        progress: list[int] = []
        source.read_all(host, progress.append)
        np.testing.assert_array_equal(host[:, : table.dim], rows_of(range(NUM_ROWS), table.dim))
        assert sum(progress) == NUM_ROWS * table.row_bytes
        source.close()


@pytest.mark.parametrize("is_direct_io", [True, False])
def test_a_file_that_became_short_is_named_with_the_row(tmp_path: Path, is_direct_io: bool) -> None:
    write_table(tmp_path / "feat", [rows_of(range(1000))], dim=4)
    source = FileSource([read_table(tmp_path / "feat")], is_direct_io=is_direct_io)
    os.truncate(tmp_path / "feat" / "rows.bin", 16 * 700 + 3)
    host = np.zeros((100, 4), dtype=np.float32)
    source.read(np.arange(600, 700), np.arange(100), host)
    np.testing.assert_array_equal(host, rows_of(range(600, 700)))
    with pytest.raises(
        SourceError, match=r"'feat': row 7\d\d of rows.bin: the file ends at byte 11203"
    ):
        source.read(np.arange(650, 750), np.arange(100), host)
    with pytest.raises(SourceError, match="the file ends early"):
        source.read_all(np.zeros((1000, 4), dtype=np.float32), lambda num_bytes: None)
    source.close()


def test_a_file_system_without_direct_io_is_read_through_the_page_cache(
    tables: list[Table], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "_can_read", lambda file, alignment: False)
    source = FileSource(tables[:1])
    assert not source.is_direct_io
    assert "refuses direct I/O" in caplog.text
    host = np.zeros((1, 4), dtype=np.float32)
    source.read(np.array([1234]), np.array([0]), host)
    np.testing.assert_array_equal(host, rows_of([1234]))
    source.close()
