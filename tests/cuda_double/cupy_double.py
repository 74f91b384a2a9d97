"""The names of CuPy that `cache/cuda.py` uses, with CuPy's own signatures, on a `Machine`."""
# ruff: noqa: N801, N802

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.cuda_double import kernels
from tests.cuda_double.machine import (
    ALREADY_REGISTERED,
    INVALID_CONFIGURATION,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_REGISTERED,
    CUDARuntimeError,
    Machine,
    Point,
    Work,
)
from tests.cuda_double.memory import Range, bytes_at

_POOL_UNIT_BYTES = 512


class OutOfMemoryError(MemoryError):
    """A pool has no memory."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        text = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(f"{text}, limit set to: {limit:,} bytes)." if limit else f"{text}).")


class CUDADriverError(RuntimeError):
    """An error of the driver's own interface."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"CUDA_ERROR {status}")


class _OfMachine:
    """A class of one machine; see `cupy_of`."""

    _machine: ClassVar[Machine]


class Stream(_OfMachine):
    """A queue of work; as a context manager, the thread's current stream."""

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        with self._machine.call("Stream"):
            if null or ptds or not non_blocking:
                raise self._machine.misuse("a stream that waits for the null stream is created")
            self._queue = self._machine.new_queue()

    @property
    def ptr(self) -> int:
        return self._queue.pointer

    def record(self, event: Event | None = None) -> Event:
        with self._machine.call("Stream.record"):
            event = self._machine.bound["Event"]() if event is None else event
            assert event is not None
            self._machine.check_device(self._queue.device, "a stream")
            self._machine.check_device(event._device, "an event")
            queue = self._machine.queue(self.ptr)
            event._point = Point(queue, queue.num_enqueued)
        return event

    def wait_event(self, event: Event) -> None:
        with self._machine.call("Stream.wait_event"):
            queue = self._machine.queue(self.ptr)
            point = event._point  # as it is now; what is recorded later does not count
            if point is not None and point.queue is not queue:
                self._machine.put(
                    queue, Work("wait for an event", lambda: self._machine.run_until(point))
                )

    def __enter__(self) -> Stream:
        with self._machine.call("Stream.__enter__"):
            self._machine.check_device(self._queue.device, "a stream")
            self._machine.current_streams.append(self.ptr)
        return self

    def __exit__(self, *args: object) -> None:
        assert self._machine.current_streams.pop() == self.ptr

    def __del__(self) -> None:
        if queue := getattr(self, "_queue", None):
            queue.is_destroyed = True  # its work still runs


class Event(_OfMachine):
    """A point in a stream."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        with self._machine.call("Event"):
            self.ptr = self._machine.new_pointer()
            self._device = self._machine.current_device
            self._point: Point | None = None

    def synchronize(self) -> None:
        with self._machine.call("Event.synchronize"):
            if self._point is not None:
                self._machine.run_until(self._point)


class _PoolMemory:
    """What one pool holds of each device, in units of CuPy's pool.

    As in CuPy the limit counts what is kept, too, and nothing that is kept is given up for it.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.device_to_limit: dict[int, int] = {}
        self.used: Counter[int] = Counter()
        # Sizes of the chunks that were given back to the pool, not to the device.
        self.kept: defaultdict[int, list[int]] = defaultdict(list)

    def held_bytes(self, device: int) -> int:
        return self.used[device] + sum(self.kept[device])

    def take(self, size: int) -> Range:
        device = self.machine.current_device
        num_bytes = _rounded(size)
        limit, held = self.device_to_limit.get(device, 0), self.held_bytes(device)
        kept = sorted(self.kept[device])
        fitting = next((chunk for chunk in kept if chunk >= num_bytes), None)
        if fitting is not None:
            self.kept[device].remove(fitting)
            if fitting > num_bytes:
                self.kept[device].append(fitting - num_bytes)
        elif limit and held + num_bytes > limit:
            raise OutOfMemoryError(num_bytes, held, limit)
        elif num_bytes > self.machine.free_bytes(device):
            self.kept[device].clear()
            if num_bytes > self.machine.free_bytes(device):
                raise OutOfMemoryError(num_bytes, held, limit)
        self.used[device] += num_bytes
        return self.machine.memory.allocate(size, device)

    def give_back(self, memory: Range) -> None:
        assert memory.device is not None
        if user := self.machine.user_of(memory.start, memory.num_bytes):
            self.machine.misuse(f"{memory} is freed before {user} has run")
        self.machine.memory.free(memory.start)
        self.used[memory.device] -= _rounded(memory.num_bytes)
        self.kept[memory.device].append(_rounded(memory.num_bytes))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _POOL_UNIT_BYTES) * _POOL_UNIT_BYTES


class _Allocation:
    """Memory that is given back with the last pointer to it."""

    def __init__(self, pool: _PoolMemory, memory: Range) -> None:
        self._pool = pool
        self._memory = memory
        self.ptr = memory.start
        self.size = memory.num_bytes

    def __del__(self) -> None:
        pool, memory = self._pool, self._memory
        pool.machine.later(lambda: pool.give_back(memory))


class MemoryPointer:
    """An address in an allocation."""

    def __init__(self, mem: _Allocation | None, offset: int) -> None:
        self.mem = mem
        self._offset = offset

    @property
    def ptr(self) -> int:
        return 0 if self.mem is None else self.mem.ptr + self._offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self._offset + offset)


class MemoryPool(_OfMachine):
    """Memory under a limit; what is given back is kept until it is asked for."""

    def __init__(self, allocator: object = None) -> None:
        assert allocator is None
        self._memory = _PoolMemory(self._machine)
        self._machine.pools.append(self._memory)

    def malloc(self, size: int) -> MemoryPointer:
        with self._machine.call("MemoryPool.malloc"):
            if size == 0:
                return MemoryPointer(None, 0)
            return MemoryPointer(_Allocation(self._memory, self._memory.take(size)), 0)

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        with self._machine.call("MemoryPool.set_limit"):
            assert fraction is None
            self._memory.device_to_limit[self._machine.current_device] = size or 0

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        with self._machine.call("MemoryPool.free_all_blocks"):
            self._memory.kept[self._machine.current_device].clear()

    def used_bytes(self) -> int:
        with self._machine.call("MemoryPool.used_bytes"):
            return self._memory.used[self._machine.current_device]

    def total_bytes(self) -> int:
        with self._machine.call("MemoryPool.total_bytes"):
            return self._memory.held_bytes(self._machine.current_device)


class ndarray(_OfMachine):
    """An array in device memory; the host sees it through copies only."""

    def __init__(
        self,
        shape: Sequence[int] | int,
        dtype: DTypeLike = float,
        memptr: MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
        order: Literal["C"] = "C",
    ) -> None:
        if memptr is None or strides is not None:
            raise self._machine.misuse("an array that is not a plain view of the pool's memory")
        numbers: NDArray[Any] = np.empty(0, dtype=dtype)
        if numbers.dtype.kind not in "biufc":  # bfloat16 too: CuPy knows no such dtype
            raise TypeError(f"CuPy has no dtype {dtype}")
        num_bytes = int(np.prod(shape, dtype=np.int64)) * numbers.dtype.itemsize
        if num_bytes:
            self._machine.known(memptr.ptr, num_bytes, "an array")
            numbers = bytes_at(memptr.ptr, num_bytes).view(dtype)
        self._set(memptr, numbers.reshape(shape))

    def _set(self, data: MemoryPointer, view: NDArray[Any]) -> ndarray:
        self.data = data
        self._view = view
        return self

    def _part(self, view: NDArray[Any]) -> ndarray:
        """Another view of the same memory."""
        new = object.__new__(type(self))
        if view.size == 0 or self._view.size == 0:
            return new._set(self.data, view)
        return new._set(self.data + (view.ctypes.data - self._view.ctypes.data), view)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._view.dtype

    @property
    def size(self) -> int:
        return self._view.size

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, slices: Any) -> ndarray:
        slices = slices if isinstance(slices, tuple) else (slices,)
        return self._part(self._view[(*slices, ...)])

    def reshape(self, *shape: Any, order: Literal["C"] = "C", copy: bool | None = None) -> ndarray:
        return self._part(self._view.reshape(*shape, order=order))

    def view(self, dtype: DTypeLike | None = None, type: Any = None) -> ndarray:
        return self._part(self._view.view(self.dtype if dtype is None else dtype))

    def get(
        self,
        stream: Stream | None = None,
        order: Literal["C"] = "C",
        out: NDArray[Any] | None = None,
        blocking: bool = True,
    ) -> NDArray[Any]:
        """Wait for the given or the current stream, and for no other."""
        with self._machine.call("ndarray.get"):
            assert blocking
            pointer = self._machine.current_streams[-1] if stream is None else stream.ptr
            self._machine.run_until_now(pointer)
            if self.nbytes:
                self._machine.known(self.data.ptr, 1, "an array")
            target = np.empty(self.shape, self.dtype) if out is None else out
            target[...] = self._view
            return target

    def __array__(self, *args: object, **kwargs: object) -> NDArray[Any]:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The memory as the CPU's, which it is here."""
        return self._view.__dlpack__(max_version=max_version, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._view.__dlpack_device__()


class RawKernel(_OfMachine):
    """One function of a module."""

    def __init__(self, name: str, is_debug: bool) -> None:
        self._name = name
        self._is_debug = is_debug

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], **kwargs: Any
    ) -> None:
        """Launch in the current stream."""
        try:
            self._launch(grid, block, args, kwargs)
        except CUDARuntimeError as error:  # CuPy launches through the driver's interface
            raise CUDADriverError(error.status) from error

    def _launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        machine = self._machine
        with machine.call("kernel launch"):
            assert not kwargs
            if not all(type(size) is int and size > 0 for size in (*grid, *block)):
                raise CUDARuntimeError(INVALID_CONFIGURATION)
            for arg in args:
                # A Python int would be passed as 8 bytes too; we are strict about what is passed.
                if type(arg) is not np.int64:
                    raise machine.misuse(f"a kernel's argument is {arg!r}, not an int64")
            arguments = kernels.Arguments(*(int(arg) for arg in args))
            queue = machine.queue(machine.current_streams[-1])
            machine.check_device(queue.device, "a stream")
            uses = kernels.used_memory(machine, arguments)
            machine.put(queue, Work(self._name, lambda: self._run(grid, block, arguments), uses))
            machine.num_launches += 1

    def _run(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: kernels.Arguments
    ) -> None:
        self._machine.raise_fault("kernel")
        kernels.check_plan_in_memory(self._machine, self._name, arguments)
        kernels.launch(self._machine, self._name, grid[0], block[0], arguments, self._is_debug)


class RawModule(_OfMachine):
    """The kernels of `kernels.cu`, compiled for the CPU by the shim."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool | None = None,
    ) -> None:
        assert code == kernels.SOURCE.read_text(encoding="utf-8")
        assert "--fmad=false" in options
        self._is_debug = "-DHOTSHELF_DEBUG" in options

    def compile(self, log_stream: Any = None) -> None:
        with self._machine.call("RawModule.compile"):
            pass

    def get_function(self, name: str) -> RawKernel:
        """The entry of a row format."""
        with self._machine.call("RawModule.get_function"):
            if name not in kernels.NAME_TO_FORMAT:
                raise CUDARuntimeError(INVALID_VALUE)
            kernel: type[RawKernel] = self._machine.bound["RawKernel"]
            return kernel(name, self._is_debug)


class Runtime:
    """`cupy.cuda.runtime`."""

    memcpyHostToDevice = 1  # noqa: N815
    memcpyDeviceToHost = 2  # noqa: N815
    cudaDevAttrCanUseHostPointerForRegisteredMem = 91  # noqa: N815
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def getDeviceCount(self) -> int:
        with self._machine.call("runtime.getDeviceCount"):
            return self._machine.config.num_devices

    def driverGetVersion(self) -> int:
        with self._machine.call("runtime.driverGetVersion"):
            return self._machine.config.driver_version

    def runtimeGetVersion(self) -> int:
        with self._machine.call("runtime.runtimeGetVersion"):
            return self._machine.config.runtime_version

    def setDevice(self, device: int) -> None:
        with self._machine.call("runtime.setDevice"):
            self._machine.current_device = device

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        with self._machine.call("runtime.getDeviceProperties"):
            self._check_index(device)
            return {
                "name": b"CUDA double",
                "major": 9,
                "minor": 0,
                "totalGlobalMem": self._machine.config.total_bytes,
                "multiProcessorCount": 4,
            }

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        with self._machine.call("runtime.deviceGetAttribute"):
            self._check_index(device)
            assert attrib == self.cudaDevAttrCanUseHostPointerForRegisteredMem
            return int(self._machine.config.can_use_host_pointers)

    def deviceGetPCIBusId(self, device: int) -> str:
        with self._machine.call("runtime.deviceGetPCIBusId"):
            self._check_index(device)
            return f"0000:{device:02X}:00.0"

    def memGetInfo(self) -> tuple[int, int]:
        with self._machine.call("runtime.memGetInfo"):
            free_bytes = self._machine.free_bytes(self._machine.current_device)
            return free_bytes, self._machine.config.total_bytes

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        with self._machine.call("runtime.hostRegister"):
            if size == 0:
                raise CUDARuntimeError(INVALID_VALUE)
            if self._machine.registered.overlaps(ptr, size):
                raise CUDARuntimeError(ALREADY_REGISTERED)
            if flags & ~0xF or not flags & 2:
                raise self._machine.misuse("host memory is registered but not mapped")
            self._machine.registered.add(Range(ptr, size, None))

    def hostUnregister(self, ptr: int) -> None:
        with self._machine.call("runtime.hostUnregister"):
            found = self._machine.registered.remove(ptr)
            if found is None:
                raise CUDARuntimeError(NOT_REGISTERED)
            if user := self._machine.user_of(found.start, found.num_bytes):
                raise self._machine.misuse(f"{found} is unregistered before {user} has run")

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        machine = self._machine
        with machine.call("runtime.memcpyAsync"):
            queue = machine.queue(stream)
            machine.check_device(queue.device, "a stream")
            if size == 0:
                return
            if kind not in (self.memcpyHostToDevice, self.memcpyDeviceToHost):
                raise CUDARuntimeError(INVALID_VALUE)
            what = f"copy of {size} bytes"
            source_is_host = kind == self.memcpyHostToDevice
            target = machine.known(dst, size, f"target of a {what}")
            if source_is_host and machine.registered.find(src, size) is None:
                self._copy_pageable(dst, src, size, stream)
                return
            source = machine.known(src, size, f"source of a {what}")
            if (source.device is None) != source_is_host or (target.device is not None) != (
                source_is_host
            ):
                raise machine.misuse(f"{what} from {source} to {target} is of kind {kind}")
            machine.poison_target(target, dst, size)
            uses = ((dst, dst + size), (src, src + size))
            machine.put(queue, Work(what, lambda: self._copy(dst, src, size), uses))

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        machine = self._machine
        with machine.call("runtime.memsetAsync"):
            queue = machine.queue(stream)
            machine.check_device(queue.device, "a stream")
            if size == 0:
                return
            target = machine.known(ptr, size, "target of a memset")
            machine.poison_target(target, ptr, size)

            def fill() -> None:
                machine.known(ptr, size, "target of a memset")
                bytes_at(ptr, size)[:] = value & 0xFF

            machine.put(queue, Work("memset", fill, ((ptr, ptr + size),)))

    def _copy(self, dst: int, src: int, size: int) -> None:
        self._machine.raise_fault("copy")
        self._machine.known(dst, size, "target of a copy")
        self._machine.known(src, size, "source of a copy")
        bytes_at(dst, size)[:] = bytes_at(src, size)

    def _copy_pageable(self, dst: int, src: int, size: int, stream: int) -> None:
        """From memory that is not registered: the driver waits for the stream, then stages it."""
        machine = self._machine
        machine.run_until_now(stream)
        machine.num_pageable_copies += 1
        staged = bytes_at(src, size).copy()

        def fill() -> None:
            machine.known(dst, size, "target of a copy")
            bytes_at(dst, size)[:] = staged

        machine.put(
            machine.queue(stream), Work(f"copy of {size} bytes", fill, ((dst, dst + size),))
        )

    def _check_index(self, device: int) -> None:
        if not 0 <= device < self._machine.config.num_devices:
            raise CUDARuntimeError(INVALID_DEVICE)


class Nvtx(_OfMachine):
    """`cupy.cuda.nvtx`."""

    def RangePush(self, message: str, id_color: int = -1) -> None:
        self._machine.ranges.append(message)

    def RangePop(self) -> None:
        self._machine.ranges.pop()


_CLASSES = (Stream, Event, MemoryPool, ndarray, RawKernel, RawModule, Nvtx)


def cupy_of(machine: Machine) -> ModuleType:
    """A module that looks like CuPy on this machine."""
    bound: dict[str, Any] = {
        kind.__name__: type(kind.__name__, (kind,), {"_machine": machine}) for kind in _CLASSES
    }
    machine.bound = bound
    cupy = ModuleType("cupy")
    vars(cupy).update(
        __version__="14.2.0",
        ndarray=bound["ndarray"],
        RawModule=bound["RawModule"],
        cuda=SimpleNamespace(
            Stream=bound["Stream"],
            Event=bound["Event"],
            MemoryPool=bound["MemoryPool"],
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            runtime=Runtime(machine),
            nvtx=bound["Nvtx"](),
        ),
    )
    return cupy
