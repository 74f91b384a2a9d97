"""`table.yaml` and its row file: what is written is read, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cache.errors import TableError
from cache.table import TableConfig, read_table, read_tables, write_table
from tests.cache_fixtures import rows_of


def make(folder: Path, text: str, num_bytes: int = 160) -> Path:
    folder.mkdir()
    (folder / "table.yaml").write_text(text)
    (folder / "rows.bin").write_bytes(bytes(num_bytes))
    return folder


def test_what_is_written_in_blocks_is_read(tmp_path: Path) -> None:
    blocks = [rows_of(range(3), 5), rows_of(range(3, 10), 5)]
    write_table(tmp_path / "t" / "items", blocks, dim=5, default_value=-1.0, absent="error")
    table = read_table(tmp_path / "t" / "items")
    assert (table.name, table.num_rows, table.dim) == ("items", 10, 5)
    assert (table.row_bytes, table.slot_bytes) == (20, 32)
    assert (table.default_value, table.is_strict) == (-1.0, True)
    stored = np.fromfile(table.row_file, dtype="<f4").reshape(10, 5)
    np.testing.assert_array_equal(stored, rows_of(range(10), 5))
    assert [table.name for table in read_tables(tmp_path / "t")] == ["items"]
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["items"]


def test_a_block_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        TableError, match=r"rows from 2 on: expected float32 \[n, 4\], got float32 \[1, 5\]"
    ):
        write_table(tmp_path / "items", [rows_of(range(2)), rows_of([2], 5)], dim=4)
    assert list(tmp_path.iterdir()) == []


def test_a_dim_that_is_too_large_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="dim: Input should be less than or equal to 65536"):
        write_table(tmp_path / "items", [rows_of(range(2))], dim=70_000)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_table_is_not_overwritten(tmp_path: Path) -> None:
    write_table(tmp_path / "items", [rows_of(range(2))], dim=4)
    with pytest.raises(TableError, match="exists already"):
        write_table(tmp_path / "items", [rows_of(range(3))], dim=4)
    assert read_table(tmp_path / "items").num_rows == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_rows: 10\ndim: 5", "rows.bin: expected 200 bytes (10 rows of 20), got 160"),
        ("num_row: 10\ndim: 4", "unknown field 'num_row', did you mean 'num_rows'?"),
        ("num_rows: 10", "field 'dim' is missing"),
        ("num_rows: ten\ndim: 4", "num_rows: Input should be a valid integer, got 'ten'"),
        ("num_rows: -1\ndim: 4", "num_rows: Input should be greater than or equal to 0, got -1"),
        ("num_rows: 10\ndim: 4\ndatatype: FP8", "datatype: Input should be 'FP32', got 'FP8'"),
        ("num_rows: 10\ndim: 4\nabsent: skip", "absent: Input should be 'default' or 'error'"),
        ("num_rows: 10\ndim: 4\ndefault_value: .nan", "default_value: expected a finite float32"),
        (
            "num_rows: 10\ndim: 4\ndefault_value: 1.0e+39",
            "default_value: expected a finite float32",
        ),
        ("[1, 2]", "expected fields, got list"),
        ("num_rows: [", "is not YAML"),
        ("num_rows: 2024-13-45", "is not YAML: month must be in 1..12"),
        ("[" * 3000, "is not YAML"),
    ],
)
def test_a_wrong_table_is_named_with_the_fault(tmp_path: Path, text: str, message: str) -> None:
    folder = make(tmp_path / "items", text)
    with pytest.raises(TableError) as caught:
        read_table(folder)
    assert message in str(caught.value)
    assert "tables/items/" in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "items", "num_rows: 10\ndim: 4")
    (folder / "rows.bin").unlink()
    with pytest.raises(TableError, match=r"tables/items/rows.bin: No such file"):
        read_table(folder)
    (folder / "table.yaml").unlink()
    with pytest.raises(TableError, match=r"tables/items/table.yaml: no such file"):
        read_table(folder)
    assert read_tables(tmp_path / "nowhere") == []


def test_a_folder_that_is_no_table_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "items", [rows_of(range(2))], dim=4)
    (tmp_path / "lost+found").mkdir()
    assert [table.name for table in read_tables(tmp_path)] == ["items"]
    assert "tables/lost+found is not a table: it has no table.yaml" in caplog.text


def test_every_field_is_documented_and_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[1] / "docs" / "model-repository.md").read_text()
    section = text.split("## Feature tables")[1]
    for field in TableConfig.model_fields:
        assert f"| `{field}` |" in section
    monkeypatch.chdir(tmp_path)
    exec(section.split("```python")[1].split("```")[0], {})
    (table,) = read_tables(tmp_path / "repository" / "tables")
    assert (table.name, table.num_rows, table.dim) == ("items", 1000, 16)
