"""Memory whose addresses never change: a reserved range with pages that come and go."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cache.budget import Budget
from cache.errors import OutOfMemoryError

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python 3.11
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena(Protocol):
    """A reserved range of `max_bytes` bytes; only committed pages may be touched.

    Offsets are multiples of `page_bytes`; so are sizes, or they reach to the end. Addresses stay
    the same over decommit and commit; contents do not. An arena of one page, as those of a GPU
    are, may come back at another address.
    """

    max_bytes: int
    page_bytes: int

    @property
    def committed_bytes(self) -> int:
        """Bytes of the committed pages; they are charged to the budget."""

    def commit(self, offset: int, num_bytes: int) -> None:
        """Back the range with memory; committed pages in it are left as they are.

        Blocks until the pages are there. Raises `OutOfMemoryError` and then changes nothing.
        """

    def decommit(self, offset: int, num_bytes: int) -> None:
        """Give the range's pages back. Nothing may be reading them."""

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A view of the range; it is valid as long as its pages are committed."""

    def close(self) -> None:
        """Decommit everything."""


class CpuArena:
    """Anonymous memory at a reserved address, faulted in at `commit` and dropped at `decommit`."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, owner: str, max_bytes: int, budget: Budget) -> None:
        self.max_bytes = max_bytes
        self._owner = owner
        self._budget = budget
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        num_pages = max(1, -(-max_bytes // self.page_bytes))
        try:
            self._memory = mmap.mmap(-1, num_pages * self.page_bytes, flags=flags)
        except OSError as error:
            raise OutOfMemoryError(
                f"{owner}: the machine refuses {max_bytes} bytes of addresses: {error.strerror}"
            ) from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        self._is_committed = np.zeros(num_pages, dtype=np.bool_)
        # The last page is charged for the part that is in the range: budgets are exact.
        self._page_sizes = np.full(num_pages, self.page_bytes, dtype=np.int64)
        self._page_sizes[-1] = max_bytes - (num_pages - 1) * self.page_bytes
        self._memory.madvise(mmap.MADV_HUGEPAGE)

    def __repr__(self) -> str:
        return f"<CpuArena {self._owner!r} {self.committed_bytes} of {self.max_bytes} bytes>"

    @property
    def committed_bytes(self) -> int:
        """Bytes of the committed pages."""
        return int(self._page_sizes[self._is_committed].sum())

    def commit(self, offset: int, num_bytes: int) -> None:
        """Charge and fault in the pages of the range that are not there yet."""
        pages = self._pages(offset, num_bytes)
        new_bytes = int(self._page_sizes[pages][~self._is_committed[pages]].sum())
        self._budget.charge(self._owner, new_bytes)
        try:
            self._populate(offset, num_bytes)
        except OutOfMemoryError:
            self._budget.discharge(self._owner, new_bytes)
            raise
        self._is_committed[pages] = True

    def decommit(self, offset: int, num_bytes: int) -> None:
        """Drop the pages of the range and take them off the budget."""
        pages = self._pages(offset, num_bytes)
        freed_bytes = int(self._page_sizes[pages][self._is_committed[pages]].sum())
        if freed_bytes:
            self._advise(offset, num_bytes, mmap.MADV_DONTNEED)
            self._is_committed[pages] = False
            self._budget.discharge(self._owner, freed_bytes)

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A view of the range as `dtype`."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert offset + num_bytes <= self.max_bytes, "view leaves the arena"
        return self._bytes[offset : offset + num_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Decommit everything; the addresses go when the last view is gone."""
        self.decommit(0, self.max_bytes)

    def _pages(self, offset: int, num_bytes: int) -> slice:
        assert offset % self.page_bytes == 0, "offset is not a multiple of the page size"
        assert 0 <= offset <= self.max_bytes - num_bytes, "range leaves the arena"
        stop = offset + num_bytes
        assert stop % self.page_bytes == 0 or stop == self.max_bytes, "range ends inside a page"
        return slice(offset // self.page_bytes, -(-stop // self.page_bytes))

    def _populate(self, offset: int, num_bytes: int) -> None:
        try:
            self._advise(offset, num_bytes, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno == 22:  # an older kernel: pages are faulted in at first touch
                return
            raise OutOfMemoryError(
                f"{self._owner}: the machine has no {num_bytes} bytes: {error.strerror}"
            ) from error

    def _advise(self, offset: int, num_bytes: int, advice: int) -> None:
        # Through ctypes because `mmap.madvise` holds the GIL for as long as it takes.
        if num_bytes == 0:
            return
        if _libc.madvise(self._bytes.ctypes.data + offset, num_bytes, advice) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"madvise({advice}) failed with errno {number}")
