"""Small caches for tests: row r of a table is [r, r + 0.25, r + 0.5, ...], and a slow device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.budget import Budget
from cache.device import CpuDevice, Event, Output, PlanBuffer, SlabMemory, Stream
from cache.errors import SourceError
from cache.layout import SlabLayout
from cache.plan import check_plan, closed_plan
from cache.row_cache import RowCache
from cache.table import Table


def rows_of(keys: Any, dim: int = 4) -> NDArray[np.float32]:
    """The rows that tables made here hold for `keys`."""
    column = np.asarray(keys, dtype=np.float32).reshape(-1, 1)
    return column + np.arange(dim, dtype=np.float32) * np.float32(0.25)


class MemorySource:
    """Rows computed on the spot; `on_read` may block or raise."""

    def __init__(self, on_read: Callable[[list[int]], None] = lambda rows: None) -> None:
        self.reads: list[list[int]] = []
        self.on_read = on_read

    def read(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], host: NDArray[np.float32]
    ) -> None:
        self.reads.append(rows.tolist())
        host[slots] = np.nan  # what a reader before the end would see
        self.on_read(rows.tolist())
        host[slots] = rows_of(rows, host.shape[1])

    def read_all(self, host: NDArray[np.float32], on_progress: Callable[[int], object]) -> None:
        host[:] = rows_of(np.arange(len(host)), host.shape[1])

    def close(self) -> None:
        pass


class LateStream:
    """A stream whose work runs only when somebody waits for it, as late as is allowed."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], None]] = deque()
        self.num_enqueued = 0
        self.num_done = 0
        self._mutex = threading.RLock()

    def enqueue(self, work: Callable[[], None]) -> None:
        with self._mutex:
            self.work.append(work)
            self.num_enqueued += 1

    def record(self) -> Event:
        return LateEvent(self, self.num_enqueued)

    def wait_for(self, event: Event) -> None:
        self.enqueue(event.wait)

    def run_until(self, number: int) -> None:
        with self._mutex:
            while self.num_done < number:
                self.work.popleft()()
                self.num_done += 1


class LateEvent:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def wait(self) -> None:
        self._stream.run_until(self._number)


class LateDevice(CpuDevice):
    """A CPU device that works as a GPU does: later than it is told, in order of a stream."""

    name = "late"

    def new_stream(self) -> Stream:
        return LateStream()

    def execute(
        self,
        stream: Stream,
        buffer: PlanBuffer,
        num_reads: int,
        num_fills: int,
        memory: SlabMemory,
        outputs: Sequence[Output],
    ) -> None:
        check_plan(closed_plan(buffer.plan, num_reads, num_fills))
        assert isinstance(stream, LateStream)
        arguments = (self, stream, buffer, num_reads, num_fills, memory, list(outputs))
        stream.enqueue(lambda: CpuDevice.execute(*arguments))


def new_device(kind: type[CpuDevice] = CpuDevice) -> CpuDevice:
    return kind(Budget("device memory", 1 << 24), Budget("host memory", 1 << 24))


def new_table(num_rows: int, dim: int = 4, name: str = "feat", is_strict: bool = False) -> Table:
    return Table(name, num_rows, dim, 0.0, is_strict, Path("rows.bin"))


def new_row_cache(
    num_rows: int = 1000,
    *,
    device_slots: int = 64,
    host_slots: int = 0,
    is_inclusive: bool = False,
    source: MemorySource | None = None,
    device: CpuDevice | None = None,
    max_positions: int = 512,
    num_frames: int = 4,
) -> RowCache:
    """A slab of one table of dim 4; every tier is as small as asked."""
    layout = SlabLayout(
        slot_bytes=16,
        num_device_slots=device_slots,
        num_host_slots=num_rows if is_inclusive else host_slots,
        num_staging_slots=0 if is_inclusive else 2 * num_frames * max_positions,
        max_positions=max_positions,
        is_inclusive=is_inclusive,
    )
    cache = RowCache(
        [new_table(num_rows)], layout, device or new_device(), source or MemorySource()
    )
    if is_inclusive:
        cache.load_host_tier(lambda num_bytes: None)
    return cache


TIER_NAMES = ("device", "host", "source", "absent")


def look_up(cache: RowCache, rows: Sequence[int]) -> tuple[NDArray[np.float32], list[str]]:
    """Look up rows with a frame of its own; return them and where they came from."""
    frame = cache.new_frame()
    frame.rows[: len(rows)] = rows
    out = np.full((len(rows), 4), np.nan, dtype=np.float32)
    cache.lookup(frame, len(rows), [Output(0, out)])
    cache.finish(frame)
    return out, [TIER_NAMES[tier] for tier in frame.origin[: len(rows)]]


class ReadFailedError(SourceError):
    """What a source raises in tests."""
