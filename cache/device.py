"""The `Device` protocol, and the CPU as a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cache import cpu_kernels
from cache.arena import Arena, CpuArena
from cache.budget import Budget
from cache.errors import CacheError
from cache.plan import Plan


class DeviceError(CacheError):
    """The device that was asked for cannot be used; the text says what to do."""


class SlabMemory(NamedTuple):
    """The bytes of a slab: both tiers' slots, float32 [num_slots, slot_bytes / 4], and defaults.

    `default_of[table]` is the value of an absent key's row. `device` and `default_of` are device
    arrays; `host` is host memory that the device can read and write.
    """

    device: Any
    host: Any
    default_of: Any


class Output(NamedTuple):
    """Where the rows of a plan's positions from `first` on go: a device array [n, dim]."""

    first: int
    rows: Any


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block until all work before it is done."""


class Stream(Protocol):
    """Work in order: what is enqueued first is done first."""

    def record(self) -> Event:
        """An event after everything that is enqueued so far."""


class Device(Protocol):
    """The near shelf: memory that models read, a host memory it can reach, and the kernels."""

    name: str
    budget: Budget
    host_budget: Budget

    def reserve(self, owner: str, max_bytes: int) -> Arena:
        """Reserve device memory; commits are charged to `budget` as `owner`."""

    def reserve_host(self, owner: str, max_bytes: int) -> Arena:
        """Reserve host memory that the device reads in place; charged to `host_budget`."""

    def to_device(self, array: NDArray[Any]) -> Any:
        """Copy a small array to the device; blocks."""

    def new_stream(self) -> Stream:
        """A stream; one slab has one."""

    def execute(
        self, stream: Stream, plan: Plan, memory: SlabMemory, outputs: Sequence[Output]
    ) -> None:
        """Enqueue a plan: reads to `outputs`, spills and fills.

        The caller holds the slab's mutex, so that plans are enqueued in the order in which they
        were admitted. `plan` and `outputs` stay as they are until an event recorded after this call
        is done.
        """


class DoneEvent:
    """The event of a stream that works at once."""

    def wait(self) -> None:
        """Return at once."""


class InlineStream:
    """A stream that does the work in the call that enqueues it: no thread to wake and wait for."""

    def record(self) -> Event:
        """An event that is done."""
        return DoneEvent()


class CpuDevice:
    """RAM as the near shelf: the same tiers, plans and budgets without a GPU."""

    name = "cpu"

    def __init__(self, budget: Budget, host_budget: Budget) -> None:
        self.budget = budget
        self.host_budget = host_budget

    def reserve(self, owner: str, max_bytes: int) -> Arena:
        """Reserve near memory."""
        return CpuArena(owner, max_bytes, self.budget)

    def reserve_host(self, owner: str, max_bytes: int) -> Arena:
        """Reserve host memory."""
        return CpuArena(owner, max_bytes, self.host_budget)

    def to_device(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of the array."""
        return np.array(array)

    def new_stream(self) -> Stream:
        """A stream that works at once."""
        return InlineStream()

    def execute(
        self, stream: Stream, plan: Plan, memory: SlabMemory, outputs: Sequence[Output]
    ) -> None:
        """Execute a plan in the calling thread."""
        # A host slot that is filled from is never spilled to in the same plan, so reads may go
        # first or last; first keeps the rows that fills read in the CPU's cache.
        for output in outputs:
            cpu_kernels.read_rows(
                plan, output.first, memory.device, memory.host, memory.default_of, output.rows
            )
        cpu_kernels.spill_and_fill(plan, memory.device, memory.host)


def open_device(
    name: str, *, max_bytes: int, max_host_bytes: int, reserve_fraction: float = 0.1
) -> Device:
    """Return the device called `cpu`, `cuda:N` or `auto`, with its budgets.

    `reserve_fraction` of `max_bytes` is kept free. Raises `DeviceError`.
    """
    if name not in ("cpu", "auto"):
        raise DeviceError(f"device {name!r} cannot be used: this version has the devices cpu, auto")
    usable_bytes = int(max_bytes * (1 - reserve_fraction))
    return CpuDevice(Budget("device memory", usable_bytes), Budget("host memory", max_host_bytes))
