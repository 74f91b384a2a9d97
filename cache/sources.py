"""The bottom tier: row files, read with direct I/O."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError
from cache.jit import c_function, compiled
from cache.table import Table

log = logging.getLogger(__name__)

_NUM_THREADS = 16  # reads in flight; one thread has one
_ROWS_PER_THREAD = 4  # fewer are not worth waking another thread
_BOUNCE_BYTES = 64 * 1024
_BULK_BYTES = 8 * 1024 * 1024
_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000
_DIO_OFFSET_ALIGN = slice(0x9C, 0xA0)  # in struct statx, after stx_dio_mem_align

_pread = c_function("pread", "intp", "int32", "uintp", "uintp", "int64")


class Source(Protocol):
    """Where the rows of a slab come from when no tier has them.

    Rows are numbered through all tables of the slab.
    """

    def read(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], host: NDArray[np.float32]
    ) -> None:
        """Read `rows[i]` into `host[slots[i]]`; blocks until all are there.

        The rows are distinct. Callable from any thread. Raises `SourceError`; then the slots hold
        anything.
        """

    def read_all(self, host: NDArray[np.float32], on_progress: Callable[[int], object]) -> None:
        """Read row r of all into `host[r]`; call `on_progress` with bytes read; blocks."""

    def close(self) -> None:
        """Give back files and threads."""


class FileSource:
    """The row files of the tables of one slab.

    With `is_direct_io` reads bypass the page cache, so that a measurement sees the disk: each row
    costs the aligned blocks around it. Rows are sorted, neighbours share a read, and up to 16 reads
    are in flight. Where the file system refuses direct I/O, it falls back to buffered reads with a
    warning.
    """

    def __init__(self, tables: Sequence[Table], *, is_direct_io: bool = True) -> None:
        self._tables = tables
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="row-reader")
        first_row = np.cumsum([0] + [table.num_rows for table in tables])
        self._first_row: NDArray[np.int64] = first_row.astype(np.int64)
        self._row_bytes = np.array([table.row_bytes for table in tables], dtype=np.int64)
        opened = [_open(table.row_file, is_direct_io) for table in tables]
        self._files = np.array([file for file, _ in opened], dtype=np.int32)
        self._alignments = np.array([alignment for _, alignment in opened], dtype=np.int64)

    def __repr__(self) -> str:
        return f"<FileSource {len(self._tables)} tables, direct I/O {self.is_direct_io}>"

    @property
    def is_direct_io(self) -> bool:
        """Whether every file is read past the page cache."""
        return bool((self._alignments > 1).all())

    def read(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], host: NDArray[np.float32]
    ) -> None:
        """Read rows in parallel; see `Source.read`."""
        order = np.argsort(rows)
        sorted_rows = rows[order]
        sorted_slots = slots[order]
        num_parts = max(1, min(_NUM_THREADS, len(rows) // _ROWS_PER_THREAD))
        edges = np.linspace(0, len(rows), num_parts + 1).astype(np.int64).tolist()

        def read_part(first: int, stop: int) -> None:
            self._read_part(sorted_rows[first:stop], sorted_slots[first:stop], host)

        parts = [self._pool.submit(read_part, first, stop) for first, stop in pairwise(edges[1:])]
        errors: list[BaseException] = []
        try:
            read_part(0, edges[1])
        except BaseException as error:
            errors.append(error)
        # All parts end before this returns: nothing may write into the slots afterwards.
        errors += [fault for part in parts if (fault := part.exception()) is not None]
        if errors:
            raise errors[0]

    def read_all(self, host: NDArray[np.float32], on_progress: Callable[[int], object]) -> None:
        """Read all tables in order; see `Source.read_all`."""
        for table, first_row in zip(self._tables, self._first_row.tolist(), strict=False):
            _read_whole_table(table, host[first_row : first_row + table.num_rows], on_progress)

    def close(self) -> None:
        """Close the files; no read may be running."""
        self._pool.shutdown()
        for file in self._files.tolist():
            os.close(file)
        self._files = self._files[:0]

    def _read_part(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], host: NDArray[np.float32]
    ) -> None:
        bounce = _aligned_bytes(_bounce_bytes(self._row_bytes, self._alignments))
        failed = _read_sorted(
            self._files, self._first_row, self._row_bytes, self._alignments, rows, slots,
            host.view(np.uint8), bounce,
        )  # fmt: skip
        if failed >= 0:
            raise self._error_at(int(rows[failed]))

    def _error_at(self, row: int) -> SourceError:
        """Read the row's block once more, to learn what is wrong."""
        index = int(np.searchsorted(self._first_row, row, side="right")) - 1
        table = self._tables[index]
        key = row - int(self._first_row[index])
        label = f"table {table.name!r}: row {key} of {table.row_file.name}"
        try:
            size = os.fstat(int(self._files[index])).st_size
            if size < (key + 1) * table.row_bytes:
                return SourceError(f"{label}: the file ends at byte {size}, before the row's end")
            with table.row_file.open("rb") as file:
                os.pread(file.fileno(), table.row_bytes, key * table.row_bytes)
        except OSError as error:
            return SourceError(f"{label}: cannot be read: {error.strerror}")
        return SourceError(f"{label}: a read failed")


@compiled
def _read_sorted(
    files: NDArray[np.int32],
    first_row: NDArray[np.int64],
    row_bytes: NDArray[np.int64],
    alignments: NDArray[np.int64],
    rows: NDArray[np.int64],
    slots: NDArray[np.int64],
    host: NDArray[np.uint8],
    bounce: NDArray[np.uint8],
) -> int:
    """Read ascending rows into their slots; return the index of one that failed, or -1."""
    index = 0
    while index < len(rows):
        table = np.searchsorted(first_row, rows[index], side="right") - 1
        size = row_bytes[table]
        alignment = alignments[table]
        first_byte = (rows[index] - first_row[table]) * size
        block = first_byte // alignment * alignment
        last_byte = first_byte + size
        stop = index + 1
        # A row joins the read when it starts in, or right behind, the blocks read so far.
        while stop < len(rows) and rows[stop] < first_row[table + 1]:
            next_byte = (rows[stop] - first_row[table]) * size
            block_end = (last_byte + alignment - 1) // alignment * alignment
            next_end = (next_byte + size + alignment - 1) // alignment * alignment
            if next_byte > block_end or next_end - block > len(bounce):
                break
            last_byte = next_byte + size
            stop += 1
        block_end = (last_byte + alignment - 1) // alignment * alignment
        got = _pread(files[table], bounce.ctypes.data, block_end - block, block)
        if got < last_byte - block:
            return index
        for entry in range(index, stop):
            offset = (rows[entry] - first_row[table]) * size - block
            for byte in range(size):
                host[slots[entry], byte] = bounce[offset + byte]
        index = stop
    return -1


def _open(path: Path, is_direct_io: bool) -> tuple[int, int]:
    """Return a file descriptor and the alignment of its reads in bytes; 1 where it is buffered."""
    alignment = _direct_io_alignment(path) if is_direct_io else 1
    if alignment > 1:
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            alignment = 1
        else:
            if _can_read(file, alignment):
                return file, alignment
            os.close(file)
    if is_direct_io:
        log.warning("%s: the file system refuses direct I/O; reads go through the page cache", path)
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1
    except OSError as error:
        raise SourceError(f"{path}: cannot be opened: {error.strerror}") from error


def _direct_io_alignment(path: Path) -> int:
    """The alignment that statx reports; 4096 where it reports none, 1 where direct I/O is off."""
    libc = ctypes.CDLL(None)
    answer = ctypes.create_string_buffer(256)
    if not hasattr(libc, "statx") or libc.statx(
        _AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, answer
    ):
        return mmap.PAGESIZE
    mask = int.from_bytes(answer.raw[0:4], "little")
    if not mask & _STATX_DIOALIGN:
        return mmap.PAGESIZE
    return max(1, int.from_bytes(answer.raw[_DIO_OFFSET_ALIGN], "little"))


def _can_read(file: int, alignment: int) -> bool:
    try:
        os.preadv(file, [memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:alignment]], 0)
    except OSError:
        return False
    return True


def _bounce_bytes(row_bytes: NDArray[np.int64], alignments: NDArray[np.int64]) -> int:
    return max(_BOUNCE_BYTES, int((row_bytes + 2 * alignments).max(initial=0)))


def _aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """A buffer that starts at a page, as direct I/O needs."""
    buffer = np.empty(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -buffer.ctypes.data % mmap.PAGESIZE
    return buffer[start : start + num_bytes]


def _read_whole_table(
    table: Table, slots: NDArray[np.float32], on_progress: Callable[[int], object]
) -> None:
    rows_per_read = max(1, _BULK_BYTES // table.row_bytes)
    label = f"table {table.name!r}: {table.row_file.name}"
    try:
        with table.row_file.open("rb", buffering=0) as file:
            for first in range(0, table.num_rows, rows_per_read):
                part = slots[first : first + rows_per_read]
                block = np.fromfile(file, dtype="<f4", count=len(part) * table.dim)
                if len(block) != len(part) * table.dim:
                    raise SourceError(f"{label}: the file ends early, in row {first} or later")
                part[:, : table.dim] = block.reshape(len(part), table.dim)
                on_progress(block.nbytes)
            # The rows are in the host tier now; the page cache need not keep them too.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise SourceError(f"{label}: cannot be read: {error.strerror}") from error
