"""The machine behind the double: streams as queues, memory, current devices and faults."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tests.cuda_double.memory import POISON, DeviceMemory, MisuseError, Range, RangeMap, bytes_at

INVALID_VALUE = 1
MEMORY_ALLOCATION = 2
INVALID_CONFIGURATION = 9
INSUFFICIENT_DRIVER = 35
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_HANDLE = 400
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
LAUNCH_FAILURE = 719

_STATUS_TO_TEXT = {
    INVALID_VALUE: "cudaErrorInvalidValue: invalid argument",
    MEMORY_ALLOCATION: "cudaErrorMemoryAllocation: out of memory",
    INVALID_CONFIGURATION: "cudaErrorInvalidConfiguration: invalid configuration argument",
    INSUFFICIENT_DRIVER: (
        "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
    ),
    NO_DEVICE: "cudaErrorNoDevice: no CUDA-capable device is detected",
    INVALID_DEVICE: "cudaErrorInvalidDevice: invalid device ordinal",
    INVALID_HANDLE: "cudaErrorInvalidResourceHandle: invalid resource handle",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    ALREADY_REGISTERED: (
        "cudaErrorHostMemoryAlreadyRegistered: "
        "part or all of the requested memory range is already mapped"
    ),
    NOT_REGISTERED: (
        "cudaErrorHostMemoryNotRegistered: "
        "pointer does not correspond to a registered memory region"
    ),
    LAUNCH_FAILURE: "cudaErrorLaunchFailure: unspecified launch failure",
}  # fmt: skip

_WITHOUT_DRIVER = ("runtime.driverGetVersion", "runtime.runtimeGetVersion")


class CUDARuntimeError(RuntimeError):
    """An error that the driver reports, as CuPy raises it."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_STATUS_TO_TEXT[status])


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """What the machine is. Without a `seed` work runs as late as it may; with one, out of phase."""

    num_devices: int = 1
    total_bytes: int = 1 << 30
    other_bytes: int = 0  # that other processes hold
    driver_version: int = 13000  # 0: there is no driver
    runtime_version: int = 13000
    can_use_host_pointers: bool = True
    seed: int | None = None


class Work(NamedTuple):
    """One item of a stream, and the memory that it uses, as (first address, one past the last)."""

    what: str
    run: Callable[[], None]
    uses: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False, slots=True)
class Queue:
    """The work of one stream; what is enqueued first is done first."""

    pointer: int
    device: int
    items: deque[Work] = field(default_factory=deque)
    num_enqueued: int = 0
    num_done: int = 0
    is_destroyed: bool = False


@dataclass(eq=False, slots=True)
class Point:
    """What an event has recorded: a place in a queue."""

    queue: Queue
    number: int


class Pool(Protocol):
    """Whoever holds device memory."""

    def held_bytes(self, device: int) -> int:
        """Bytes of a device that others cannot have."""


@dataclass(slots=True)
class _Fault:
    status: int
    num_calls: int | None  # how often; None: from now on


class Machine:
    """A host with GPUs. Thread-safe: one call at a time, and work runs inside of calls.

    Nothing in a stream runs until somebody waits for an event after it. With a seed, each call
    also lets some streams work on by a few items. Errors of the driver are `CUDARuntimeError`,
    errors of ours that CUDA would not show are `MisuseError`; the latter are kept for `check`.
    """

    def __init__(self, config: MachineConfig) -> None:
        self.config = config
        self.memory = DeviceMemory()
        self.registered = RangeMap()
        self.num_launches = 0
        self.num_pageable_copies = 0  # each is a hidden wait for the stream
        self.random = random.Random(config.seed)
        self.pools: list[Pool] = []
        self.bound: dict[str, Any] = {}  # the classes of this machine's CuPy
        self._mutex = threading.RLock()
        self._queues: dict[int, Queue] = {}
        self._next_pointer = 0x5000_0000
        self._misuses: list[MisuseError] = []
        self._faults: dict[str, _Fault] = {}
        self._sticky: int | None = None
        self._late_frees: deque[Callable[[], None]] = deque()
        self._thread = threading.local()
        self._is_running = False

    def fail(self, call: str, status: int, num_calls: int | None = 1) -> None:
        """Let the next calls of this name fail, such as `runtime.hostRegister` or `kernel`."""
        self._faults[call] = _Fault(status, num_calls)

    def check(self) -> None:
        """Raise the first misuse that was seen, in whatever thread; look for writes astray."""
        with self._mutex:
            self._free_late()
            if self._misuses:
                raise self._misuses[0]
            self.memory.check()

    def misuse(self, text: str) -> MisuseError:
        """A misuse to raise; it is kept, as the code under test may swallow what it raises."""
        error = MisuseError(text)
        self._misuses.append(error)
        return error

    def forget_misuses(self) -> None:
        """For tests that cause them."""
        self._misuses.clear()

    # Streams

    def enqueue(self, stream_pointer: int, work: Callable[[], None], what: str = "work") -> None:
        """Put work behind what the stream has."""
        with self._mutex:
            self.put(self.queue(stream_pointer), Work(what, work))

    def run_until_now(self, stream_pointer: int) -> None:
        """Run everything that the stream has, as `cudaStreamSynchronize` does."""
        with self._mutex:
            queue = self.queue(stream_pointer)
            self.run_until(Point(queue, queue.num_enqueued))

    def run_everything(self) -> None:
        """Run all streams to their ends."""
        with self._mutex:
            for queue in list(self._queues.values()):
                self.run_until(Point(queue, queue.num_enqueued))

    def run_some(self, stream_pointer: int, num_items: int) -> None:
        """Run the next items of a stream, as far as it has so many."""
        with self._mutex:
            queue = self.queue(stream_pointer)
            number = min(queue.num_done + num_items, queue.num_enqueued)
            self.run_until(Point(queue, number))

    @property
    def busy_streams(self) -> list[int]:
        """Pointers of the streams that have work."""
        with self._mutex:
            return [pointer for pointer, queue in self._queues.items() if queue.items]

    @property
    def num_pending(self) -> int:
        """Items that have not run."""
        return sum(len(queue.items) for queue in self._queues.values())

    def new_pointer(self) -> int:
        """A handle that is an address of nothing."""
        with self._mutex:
            self._next_pointer += 64
            return self._next_pointer

    def new_queue(self) -> Queue:
        """A stream on the current device."""
        queue = Queue(self.new_pointer(), self.current_device)
        self._queues[queue.pointer] = queue
        return queue

    def queue(self, stream_pointer: int) -> Queue:
        """The queue of a stream; the null stream waits for others, so it must not be used."""
        if stream_pointer == 0:
            raise self.misuse("the null stream is used")
        queue = self._queues.get(stream_pointer)
        if queue is None or queue.is_destroyed:
            raise CUDARuntimeError(INVALID_HANDLE)
        return queue

    def put(self, queue: Queue, work: Work) -> None:
        """Enqueue."""
        queue.items.append(work)
        queue.num_enqueued += 1

    def run_until(self, point: Point) -> None:
        """Run the queue up to a point; an error of an item stops it there."""
        while point.queue.num_done < point.number:
            self._step(point.queue)

    def _step(self, queue: Queue) -> None:
        self._free_late()
        if self._sticky is not None:
            raise CUDARuntimeError(self._sticky)
        work = queue.items.popleft()
        was_running, self._is_running = self._is_running, True
        try:
            work.run()
        except MisuseError as error:
            if error not in self._misuses:
                self._misuses.append(error)
            raise
        except CUDARuntimeError as error:
            self._die(error.status)
            raise
        finally:
            queue.num_done += 1
            self._is_running = was_running

    def _die(self, status: int) -> None:
        """What fails on a GPU does not heal: nothing runs any more, and every call fails."""
        self._sticky = status
        for queue in self._queues.values():
            queue.items.clear()

    def _run_ahead(self) -> None:
        """Let some streams work on."""
        if self.config.seed is None or self._is_running:
            return
        for queue in list(self._queues.values()):
            if queue.items and self.random.random() < 0.5:
                for _ in range(min(len(queue.items), self.random.randrange(4))):
                    self._step(queue)

    # Calls

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """One call of the driver, alone in the machine; it fails where it was told to."""
        with self._mutex:
            if self.config.driver_version == 0 and name not in _WITHOUT_DRIVER:
                raise CUDARuntimeError(INSUFFICIENT_DRIVER)
            if self._sticky is not None:
                raise CUDARuntimeError(self._sticky)
            self._free_late()
            self._run_ahead()
            self.raise_fault(name)
            yield

    def raise_fault(self, name: str) -> None:
        """Raise what `fail` ordered."""
        fault = self._faults.get(name)
        if fault is None:
            return
        if fault.num_calls is not None:
            fault.num_calls -= 1
            if fault.num_calls == 0:
                del self._faults[name]
        raise CUDARuntimeError(fault.status)

    def later(self, free: Callable[[], None]) -> None:
        """Do it at the next call: an object may die in any thread, in the middle of a call."""
        self._late_frees.append(free)

    def _free_late(self) -> None:
        while self._late_frees:
            self._late_frees.popleft()()

    # Devices

    @property
    def current_device(self) -> int:
        """Of this thread; a new thread begins with 0."""
        return getattr(self._thread, "device", 0)

    @current_device.setter
    def current_device(self, index: int) -> None:
        if not 0 <= index < self.config.num_devices:
            raise CUDARuntimeError(INVALID_DEVICE)
        self._thread.device = index

    @property
    def ranges(self) -> list[str]:
        """Of this thread: the NVTX ranges that are open."""
        if not hasattr(self._thread, "ranges"):
            self._thread.ranges = []
        ranges: list[str] = self._thread.ranges
        return ranges

    @property
    def current_streams(self) -> list[int]:
        """Of this thread, the current one last; 0 is the null stream."""
        if not hasattr(self._thread, "streams"):
            self._thread.streams = [0]
        streams: list[int] = self._thread.streams
        return streams

    def check_device(self, device: int, what: str) -> None:
        """What belongs to one device may be used only while that is the current one."""
        if device != self.current_device:
            raise self.misuse(
                f"{what} of device {device} is used while {self.current_device} is current"
            )

    # Memory

    def free_bytes(self, device: int) -> int:
        """What nobody holds of a device."""
        held_bytes = sum(pool.held_bytes(device) for pool in self.pools)
        return self.config.total_bytes - self.config.other_bytes - held_bytes

    def known(self, address: int, num_bytes: int, what: str) -> Range:
        """The device memory or registered host memory that has all of it."""
        found = self.memory.allocated.find(address, num_bytes) or self.registered.find(
            address, num_bytes
        )
        if found is None:
            why = "freed" if self.memory.is_freed(address) else "unknown"
            raise self.misuse(f"{what}: {num_bytes} bytes at {address:#x} are in {why} memory")
        return found

    def user_of(self, start: int, num_bytes: int) -> str | None:
        """What pending work uses the memory."""
        for queue in self._queues.values():
            for work in queue.items:
                if any(start < stop and first < start + num_bytes for first, stop in work.uses):
                    return work.what
        return None

    def poison_target(self, target: Range, address: int, num_bytes: int) -> None:
        """Poison what pending work will write, where that is not what earlier work still needs."""
        is_free = (
            self.user_of(address, num_bytes) is None
            if target.device is None
            else self.num_pending == 0
        )
        if is_free:
            bytes_at(address, num_bytes)[:] = POISON
