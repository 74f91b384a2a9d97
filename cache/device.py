"""The `Device` protocol, and the CPU as a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cache import cpu_kernels
from cache.arena import Arena, CpuArena
from cache.budget import Budget
from cache.errors import DeviceError as DeviceError
from cache.plan import Plan, closed_plan, new_plan
from cache.row_format import RowFormat

log = logging.getLogger(__name__)

DEFAULT_CPU_BYTES = 1 << 30


class SlabMemory(NamedTuple):
    """The bytes of a slab: both tiers' slots, [num_slots, slot_bytes / itemsize], and defaults.

    The dtype is that of `row_format`. `default_of[table]`, float32, is the value of an absent key's
    row. `device` and `default_of` are device arrays; `host` is host memory that the device can
    read and write. With scales, `device_scales` and `host_scales` are float32 [num_slots] of the
    same memories.
    """

    device: Any
    host: Any
    default_of: Any
    row_format: RowFormat = RowFormat.FLOAT32
    device_scales: Any = None
    host_scales: Any = None


class Pooling(IntEnum):
    """What becomes of the rows of a bag; sums run from left to right in float32."""

    NONE = 0  # a bag is one position
    SUM = 1
    MEAN = 2


class Output(NamedTuple):
    """Where the rows of a plan's positions from `first` on go: float32 [n, dim], C-contiguous.

    `rows` is a device array, or host memory that the device can write. With a `pooling`, row b is
    made of the positions from `first + offsets[b]` to `first + offsets[b + 1]`; `offsets` is int64
    [n + 1] in host memory. An empty bag gives zeros.
    """

    first: int
    rows: Any
    pooling: Pooling = Pooling.NONE
    offsets: NDArray[np.int64] | None = None


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block until all work before it is done. Raises `DeviceError`."""


class Stream(Protocol):
    """Work in order: what is enqueued first is done first."""

    def record(self) -> Event:
        """An event after everything that is enqueued so far."""

    def wait_for(self, event: Event) -> None:
        """Let what is enqueued from now on begin after the event; does not block."""


class PlanBuffer(Protocol):
    """Memory of one plan at a time, where the device reads it fast."""

    plan: Plan

    def close(self) -> None:
        """Give the memory back; nothing may be using it."""


class Buffers(Protocol):
    """Memory of the inputs of one batch at a time; it grows to the largest batch and stays."""

    def rows(self, name: str, num_keys: int, dim: int) -> Any:
        """A float32 array [num_keys, dim] to look rows up into; valid until the next batch."""

    def put(self, name: str, parts: Sequence[NDArray[Any]]) -> Any:
        """The parts joined along their first axis, where the model reads them.

        A copy to the device is enqueued, not awaited; the parts may change after the call. Arrays
        of objects stay on the host. On the host, one part is returned as it is. On a GPU bfloat16
        becomes its bits in uint16. Raises `OutOfMemoryError`.
        """

    def copied(self) -> Event:
        """An event after all copies so far."""

    def close(self) -> None:
        """Give the memory back; nothing may be using it."""


class Device(Protocol):
    """The near shelf: memory that models read, a host memory it can reach, and the kernels.

    Callable from any thread. Once `fault` is set, every call raises `DeviceError`.
    """

    name: str
    max_bytes: int  # the budget and the reserve
    budget: Budget
    host_budget: Budget
    fault: str | None  # why nothing works any more

    @property
    def compute(self) -> Stream:
        """The stream of all models."""

    def reserve(self, owner: str, max_bytes: int) -> Arena:
        """Reserve device memory; commits are charged to `budget` as `owner`."""

    def reserve_host(self, owner: str, max_bytes: int) -> Arena:
        """Reserve host memory that the device reads in place; charged to `host_budget`."""

    def to_device(self, array: NDArray[Any]) -> Any:
        """Copy a small array to the device; blocks.

        Any dtype but bfloat16; valid as long as it is referenced. Raises `OutOfMemoryError`.
        """

    def new_stream(self) -> Stream:
        """A stream; one slab has one."""

    def new_plan_buffer(self, max_positions: int) -> PlanBuffer:
        """Memory for plans of at most `max_positions` positions."""

    def new_buffers(self, *, is_on_host: bool = False) -> Buffers:
        """Memory for inputs: of the device, or of the host where the device can write."""

    def execute(
        self,
        stream: Stream,
        buffer: PlanBuffer,
        num_reads: int,
        num_fills: int,
        memory: SlabMemory,
        outputs: Sequence[Output],
    ) -> None:
        """Enqueue the plan in `buffer`: reads to `outputs`, spills, fills and all its moves.

        The caller holds the slab's mutex, so that plans are enqueued in the order in which they
        were admitted. Of the buffer's plan, `num_reads` and `num_fills` are in use. The buffer and
        the memory of the outputs stay as they are until an event recorded after this call is done.
        """

    def close(self) -> None:
        """Give everything back; nothing may be using it."""


class DoneEvent:
    """The event of a stream that works at once."""

    def wait(self) -> None:
        """Return at once."""


class InlineStream:
    """A stream that does the work in the call that enqueues it: no thread to wake and wait for."""

    def record(self) -> Event:
        """An event that is done."""
        return DoneEvent()

    def wait_for(self, event: Event) -> None:
        """Block until the event, since the work that comes next is done at once."""
        event.wait()


class CpuPlanBuffer:
    """A plan in plain memory."""

    def __init__(self, max_positions: int) -> None:
        self.plan = new_plan(max_positions)

    def close(self) -> None:
        """Nothing is to be given back."""


class CpuBuffers:
    """Inputs in plain memory."""

    def __init__(self) -> None:
        self._name_to_memory: dict[str, NDArray[np.float32]] = {}

    def rows(self, name: str, num_keys: int, dim: int) -> NDArray[np.float32]:
        """Memory that the next batch uses again."""
        size = num_keys * dim
        memory = self._name_to_memory.get(name)
        if memory is None or memory.size < size:
            memory = self._name_to_memory[name] = np.empty(size, dtype=np.float32)
        return memory[:size].reshape(num_keys, dim)

    def put(self, name: str, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The part itself, or the parts in a new array."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def copied(self) -> Event:
        """An event that is done."""
        return DoneEvent()

    def close(self) -> None:
        """Drop the memory."""
        self._name_to_memory.clear()


class CpuDevice:
    """RAM as the near shelf: the same tiers, plans and budgets without a GPU."""

    name = "cpu"
    fault: str | None = None

    def __init__(self, budget: Budget, host_budget: Budget, max_bytes: int | None = None) -> None:
        """`max_bytes` is what the budget is a part of; by default the budget is all."""
        self.max_bytes = budget.max_bytes if max_bytes is None else max_bytes
        self.budget = budget
        self.host_budget = host_budget
        self.compute: Stream = InlineStream()

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

    def new_plan_buffer(self, max_positions: int) -> PlanBuffer:
        """A plan in plain memory."""
        return CpuPlanBuffer(max_positions)

    def new_buffers(self, *, is_on_host: bool = False) -> Buffers:
        """Plain memory; near and host memory are the same to a model."""
        return CpuBuffers()

    def execute(
        self,
        stream: Stream,
        buffer: PlanBuffer,
        num_reads: int,
        num_fills: int,
        memory: SlabMemory,
        outputs: Sequence[Output],
    ) -> None:
        """Execute a plan in the calling thread."""
        plan = closed_plan(buffer.plan, num_reads, num_fills)
        # A host slot that is filled from is never spilled to in the same plan, so reads may go
        # first or last; first keeps the rows that fills read in the CPU's cache.
        source = (plan, *memory)
        for output in outputs:
            if output.pooling is Pooling.NONE:
                cpu_kernels.read(*source, output.first, output.rows)
            else:
                assert output.offsets is not None
                is_mean = output.pooling is Pooling.MEAN
                cpu_kernels.pool(*source, output.first, output.offsets, is_mean, output.rows)
        cpu_kernels.copy_slots(plan, memory.device, memory.host)
        if memory.device_scales is not None:
            scales = (memory.device_scales.reshape(-1, 1), memory.host_scales.reshape(-1, 1))
            cpu_kernels.copy_slots(plan, *scales)

    def close(self) -> None:
        """Nothing is left open."""


def open_device(
    name: str, *, max_bytes: int | None, max_host_bytes: int, reserve_fraction: float = 0.1
) -> Device:
    """Return the device called `cpu`, `cuda:N` or `auto`, with its budgets.

    `auto` is the first GPU, or the CPU where there is none. `max_bytes` None is all that is free on
    the GPU, or `DEFAULT_CPU_BYTES`; `reserve_fraction` of it is kept free. Raises `DeviceError`.
    """
    from cache import cuda

    if name == "auto":
        problem = cuda.probe(index=0).problem
        name = "cuda:0" if problem is None else "cpu"
        if problem is not None:
            log.info("the device is the cpu: %s", problem)
    if name.startswith("cuda:"):
        return cuda.CudaDevice(
            int(name.removeprefix("cuda:")), max_bytes=max_bytes, max_host_bytes=max_host_bytes,
            reserve_fraction=reserve_fraction,
        )  # fmt: skip
    if name != "cpu":
        raise DeviceError(f"device {name!r} does not exist: expected cpu, cuda:N or auto")
    max_bytes = DEFAULT_CPU_BYTES if max_bytes is None else max_bytes
    budget = Budget("device memory", int(max_bytes * (1 - reserve_fraction)))
    return CpuDevice(budget, Budget("host memory", max_host_bytes), max_bytes)
