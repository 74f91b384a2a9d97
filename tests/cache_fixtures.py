"""Small caches for tests: row r of a table is [r, r + 0.25, r + 0.5, ...]; the three devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.budget import Budget
from cache.cuda import CudaDevice, probe
from cache.device import CpuDevice, Device, Output
from cache.errors import SourceError
from cache.layout import SlabLayout
from cache.row_cache import RowCache, SlabFrame
from cache.table import Table
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import Machine, MachineConfig

DEVICES = ("cpu", "cuda-double", "cuda")


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


def new_device() -> CpuDevice:
    return CpuDevice(Budget("device memory", 1 << 24), Budget("host memory", 1 << 24))


@contextmanager
def opened_device(
    kind: str, seed: int | None = None, *, max_bytes: int = 1 << 24, is_debug: bool = True
) -> Iterator[Device]:
    """A device of `DEVICES`, with `max_bytes` of each memory; with `is_debug` kernels check plans.

    The double works as late as it may, or out of phase with a `seed`. In the end nothing may have
    misused it. Skips the test where there is no GPU.
    """
    if kind == "cpu":
        yield CpuDevice(Budget("device memory", max_bytes), Budget("host memory", max_bytes))
        return
    machine = Machine(MachineConfig(seed=seed)) if kind == "cuda-double" else None
    if machine is None and (problem := probe().problem):
        pytest.skip(problem)
    device = CudaDevice(
        0, max_bytes=max_bytes, max_host_bytes=max_bytes, reserve_fraction=0.0, is_debug=is_debug,
        cupy=None if machine is None else cupy_of(machine),
    )  # fmt: skip
    try:
        yield device
        if machine is not None and device.fault is None:
            machine.run_everything()
    finally:
        device.close()
    if machine is not None:
        machine.check()


def machine_of(device: Device) -> Machine:
    """What is behind a device of the double."""
    assert isinstance(device, CudaDevice)
    machine: Machine = device.cupy.cuda.Stream._machine
    return machine


class Rows:
    """Memory of a device for float32 rows [n, dim], not a number until something is written."""

    def __init__(self, device: Device, num_rows: int, dim: int = 4) -> None:
        self._device = device
        self._buffers = device.new_buffers()
        self.array = self._buffers.rows("rows", num_rows, dim)
        if isinstance(self.array, np.ndarray):
            self.array[...] = np.nan

    def values(self) -> NDArray[np.float32]:
        """What is there, on the host; whoever writes it must be done."""
        return to_host(self._device, self.array)

    def close(self) -> None:
        """Give it back."""
        self._buffers.close()


def to_host(device: Device, array: Any) -> NDArray[Any]:
    """A copy of a device array whose writers are done."""
    if not isinstance(device, CudaDevice):
        return np.array(array)
    (copied,) = device.read_back([(array.data.ptr, array.shape, array.dtype)])
    return copied


def new_table(num_rows: int, dim: int = 4, name: str = "feat", is_strict: bool = False) -> Table:
    return Table(name, num_rows, dim, 0.0, is_strict, Path("rows.bin"))


def new_row_cache(
    num_rows: int = 1000,
    *,
    device_slots: int = 64,
    host_slots: int = 0,
    is_inclusive: bool = False,
    source: MemorySource | None = None,
    device: Device | None = None,
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


_free_frames: WeakKeyDictionary[RowCache, list[SlabFrame]] = WeakKeyDictionary()


class OpenLookup:
    """A lookup whose frame is still held; `device` is the cache's."""

    def __init__(self, cache: RowCache, rows: Sequence[int], device: Device | None = None) -> None:
        self.rows = list(rows)
        self._cache = cache
        self._frames = _free_frames.setdefault(cache, [])
        try:
            self._frame = self._frames.pop()
        except IndexError:
            self._frame = cache.new_frame()
        self._frame.rows[: len(self.rows)] = self.rows
        self._out = Rows(device or new_device(), len(self.rows))
        cache.lookup(self._frame, len(self.rows), [Output(0, self._out.array)])

    def finish(self) -> tuple[NDArray[np.float32], list[str]]:
        """Wait for it; return its rows and where they came from."""
        self._cache.finish(self._frame)
        origin = [TIER_NAMES[tier] for tier in self._frame.origin[: len(self.rows)]]
        self._frames.append(self._frame)
        values = self._out.values()
        self._out.close()
        return values, origin


def look_up(
    cache: RowCache, rows: Sequence[int], device: Device | None = None
) -> tuple[NDArray[np.float32], list[str]]:
    """Look up rows with a frame of its own; return them and where they came from."""
    return OpenLookup(cache, rows, device).finish()


class ReadFailedError(SourceError):
    """What a source raises in tests."""
