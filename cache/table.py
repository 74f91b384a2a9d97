"""A table on disk: `table.yaml` and a flat file of rows."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cache.config import ConfigError, load_yaml
from cache.errors import TableError

SLOT_ALIGNMENT = 16  # one 128-bit access of a device
TABLE_FILE = "table.yaml"
ROW_FILE = "rows.bin"

log = logging.getLogger(__name__)


class TableConfig(BaseModel):
    """The fields of `table.yaml`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    num_rows: int = Field(ge=0, le=2**31 - 1)
    dim: int = Field(ge=1, le=65536)
    datatype: Literal["FP32"] = "FP32"
    default_value: float = 0.0
    absent: Literal["default", "error"] = "default"

    @field_validator("default_value")
    @classmethod
    def _is_finite_float32(cls, value: float) -> float:
        if not abs(value) <= float(np.finfo(np.float32).max):  # also refuses NaN
            raise ValueError("expected a finite float32")
        return value


@dataclass(frozen=True, slots=True)
class Table:
    """One table: rows 0..num_rows-1 of `dim` float32 values, row-major in `row_file`.

    The key of a row is its number. A key outside the table is absent: it gives a row of
    `default_value`, or with `is_strict` an `AbsentKeyError`.
    """

    name: str
    num_rows: int
    dim: int
    default_value: float
    is_strict: bool
    row_file: Path
    datatype: str = "FP32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.dim * 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in a tier: a row, padded to `SLOT_ALIGNMENT`."""
        return -(-self.row_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def read_table(folder: Path) -> Table:
    """Return the table in `folder`; raise `TableError` that names the file and the fault."""
    name = folder.name
    label = f"tables/{name}/{TABLE_FILE}"
    if not (folder / TABLE_FILE).is_file():
        raise TableError(f"{label}: no such file")
    try:
        config = load_yaml(folder / TABLE_FILE, TableConfig, name=label)
    except ConfigError as error:
        raise TableError(str(error)) from error
    table = Table(
        name=name,
        num_rows=config.num_rows,
        dim=config.dim,
        default_value=config.default_value,
        is_strict=config.absent == "error",
        row_file=folder / ROW_FILE,
        datatype=config.datatype,
    )
    _check_row_file(table)
    return table


def read_tables(root: Path) -> list[Table]:
    """Return the tables in the folders of `root`, by name; none where `root` does not exist."""
    if not root.is_dir():
        return []
    folders = sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    return [read_table(folder) for folder in folders if _is_table(folder)]


def _is_table(folder: Path) -> bool:
    """Whether the folder has a `table.yaml`; a file system may keep folders of its own here."""
    try:
        is_table = (folder / TABLE_FILE).is_file()
        reason = f"it has no {TABLE_FILE}"
    except OSError as error:
        is_table, reason = False, str(error.strerror)
    if not is_table:
        log.warning("tables/%s is not a table: %s", folder.name, reason)
    return is_table


def write_table(
    folder: Path,
    rows: Iterable[NDArray[np.float32]],
    *,
    dim: int,
    default_value: float = 0.0,
    absent: Literal["default", "error"] = "default",
) -> None:
    """Write a table from blocks of rows, each float32 [n, dim].

    The table is written to a folder beside and renamed, so that `folder` is never half there.
    Raises `TableError` where a block does not fit or `folder` exists.
    """
    if folder.exists():
        raise TableError(f"{folder}: exists already")
    try:
        config = TableConfig(num_rows=0, dim=dim, default_value=default_value, absent=absent)
    except ValidationError as error:
        raise TableError(
            f"{folder}: {error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as scratch:
        partial = Path(scratch) / folder.name
        partial.mkdir()
        num_rows = _write_rows(partial / ROW_FILE, rows, dim)
        text = yaml.safe_dump(config.model_dump() | {"num_rows": num_rows}, sort_keys=False)
        (partial / TABLE_FILE).write_text(text, encoding="utf-8")
        os.rename(partial, folder)


def _write_rows(path: Path, blocks: Iterable[NDArray[np.float32]], dim: int) -> int:
    num_rows = 0
    with path.open("wb") as file:
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != dim or block.dtype != np.float32:
                raise TableError(
                    f"rows from {num_rows} on: expected float32 [n, {dim}], "
                    f"got {block.dtype} {list(block.shape)}"
                )
            file.write(np.ascontiguousarray(block, dtype="<f4").data)
            num_rows += len(block)
    return num_rows


def _check_row_file(table: Table) -> None:
    label = f"tables/{table.name}/{ROW_FILE}"
    try:
        size = table.row_file.stat().st_size
    except OSError as error:
        raise TableError(f"{label}: {error.strerror}") from error
    expected = table.num_rows * table.row_bytes
    if size != expected:
        raise TableError(
            f"{label}: expected {expected} bytes "
            f"({table.num_rows} rows of {table.row_bytes}), got {size}"
        )
