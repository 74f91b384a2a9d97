"""The memory of the double: guarded, poisoned when new and after it is freed."""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

POISON = 0xFF  # as float32 not a number, as int64 -1
GUARD = 0xA5
_GUARD_BYTES = 64
_ALIGNMENT = 512  # as CuPy's pool
_MAX_QUARANTINE_BYTES = 64 << 20


class MisuseError(AssertionError):
    """Our code did what CUDA does not forbid, or not always, and what must never be done."""


@dataclass(order=True, slots=True)
class Range:
    """`num_bytes` bytes from address `start` on, of a device or registered host memory."""

    start: int
    num_bytes: int = field(compare=False)
    device: int | None = field(compare=False)  # None of host memory
    memory: NDArray[np.uint8] | None = field(compare=False, default=None)  # with its guards

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.start + self.num_bytes

    def __str__(self) -> str:
        kind = "host memory" if self.device is None else f"memory of device {self.device}"
        return f"{kind} {self.start:#x}+{self.num_bytes}"


class RangeMap:
    """Ranges that do not overlap, by address."""

    def __init__(self) -> None:
        self._ranges: list[Range] = []

    def __iter__(self) -> Iterator[Range]:
        return iter(list(self._ranges))

    def add(self, new: Range) -> None:
        """Add a range that overlaps no other."""
        insort(self._ranges, new)

    def overlaps(self, start: int, num_bytes: int) -> bool:
        """Whether a byte of it is in some range."""
        index = bisect_right(self._ranges, start + num_bytes - 1, key=lambda r: r.start)
        return index > 0 and self._ranges[index - 1].stop > start

    def find(self, start: int, num_bytes: int = 1) -> Range | None:
        """The range that has all of it."""
        index = bisect_right(self._ranges, start, key=lambda r: r.start)
        found = self._ranges[index - 1] if index else None
        return found if found is not None and start + num_bytes <= found.stop else None

    def remove(self, start: int) -> Range | None:
        """Remove the range that begins there."""
        found = self.find(start)
        if found is None or found.start != start:
            return None
        self._ranges.remove(found)
        return found


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """A view of host memory."""
    if num_bytes == 0:
        return np.zeros(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


class DeviceMemory:
    """What is allocated on all devices, and what was freed lately."""

    def __init__(self) -> None:
        self.allocated = RangeMap()
        self._quarantine: deque[Range] = deque()
        self._quarantine_bytes = 0

    def allocate(self, num_bytes: int, device: int) -> Range:
        """New memory between two guards, all poison."""
        memory = np.full(num_bytes + 2 * _GUARD_BYTES + _ALIGNMENT, GUARD, dtype=np.uint8)
        start = memory.ctypes.data + _GUARD_BYTES
        start += -start % _ALIGNMENT
        bytes_at(start, num_bytes)[:] = POISON
        new = Range(start, num_bytes, device, memory)
        self.allocated.add(new)
        return new

    def free(self, start: int) -> Range:
        """Poison it; it is kept for a while so that late writes are found."""
        freed = self.allocated.remove(start)
        assert freed is not None
        self._check_guards(freed)
        bytes_at(freed.start, freed.num_bytes)[:] = POISON
        self._quarantine.append(freed)
        self._quarantine_bytes += freed.num_bytes
        while self._quarantine_bytes > _MAX_QUARANTINE_BYTES:
            oldest = self._quarantine.popleft()
            self._quarantine_bytes -= oldest.num_bytes
            _check_poison(oldest)
        return freed

    def is_freed(self, address: int) -> bool:
        """Whether it was freed lately."""
        return any(freed.start <= address < freed.stop for freed in self._quarantine)

    def check(self) -> None:
        """Raise `MisuseError` where something wrote past its memory, or after its end."""
        for live in self.allocated:
            self._check_guards(live)
        for freed in self._quarantine:
            _check_poison(freed)

    def _check_guards(self, checked: Range) -> None:
        assert checked.memory is not None
        first = checked.start - checked.memory.ctypes.data
        before = checked.memory[:first]
        after = checked.memory[first + checked.num_bytes :]
        if (before != GUARD).any() or (after != GUARD).any():
            raise MisuseError(f"something wrote beside {checked}")


def _check_poison(freed: Range) -> None:
    if (bytes_at(freed.start, freed.num_bytes) != POISON).any():
        raise MisuseError(f"something wrote to {freed} after it was freed")
