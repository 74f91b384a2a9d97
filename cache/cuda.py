"""A GPU as a device, through CuPy: VRAM as the near shelf, pinned host memory below it.

All CUDA calls are here, and the kernels are in `kernels.cu`. CuPy is imported when a device is
opened, so this module can be imported everywhere.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cache.arena import Arena, CpuArena
from cache.budget import Budget
from cache.cuda_buffers import CudaBuffers, CudaPlanBuffer, PinnedBlocks, write_words
from cache.device import (
    Buffers,
    DeviceError,
    Event,
    Output,
    PlanBuffer,
    SlabMemory,
    Stream,
)
from cache.errors import OutOfMemoryError
from cache.kernel_launch import BLOCK_THREADS, grid_blocks

_KERNELS = Path(__file__).with_name("kernels.cu")
# No fused multiply-add, so that sums equal those of the CPU kernels bit for bit.
_KERNEL_OPTIONS = ("--std=c++17", "--fmad=false")
# What hostRegister says of memory that cannot be pinned: invalid, no memory, not supported.
_CANNOT_PIN = (1, 2, 801)
_REGISTER_PORTABLE_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_INSTALL = "docs/gpu.md says how to set up a GPU"


@dataclass(frozen=True, slots=True)
class CudaDeviceInfo:
    """One GPU as the driver shows it; `free_bytes` is 0 where it was not looked at."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    num_multiprocessors: int
    pci_bus_id: str


@dataclass(frozen=True, slots=True)
class CudaReport:
    """What of CUDA was found. Versions are 1000 * major + 10 * minor.

    `problem` says what is wrong and what to do; it is None where a device can be used.
    """

    cupy_version: str | None
    driver_version: int | None
    runtime_version: int | None
    devices: tuple[CudaDeviceInfo, ...]
    problem: str | None


def probe(cupy: Any = None, index: int | None = None) -> CudaReport:
    """Look for GPUs that can be used, and for the free memory of GPU `index`. Never raises.

    Without an index the free memory of all is looked at, which makes a context on each.
    """
    if cupy is None:
        try:
            cupy = importlib.import_module("cupy")
        except Exception as error:  # a broken install fails in ways of its own
            is_missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
            found = "is not installed" if is_missing else f"cannot be imported ({_line(error)})"
            return CudaReport(None, None, None, (), f"CuPy {found}; {_INSTALL}")
    version = built_for = driver_version = None
    devices: tuple[CudaDeviceInfo, ...] = ()
    try:
        version = str(cupy.__version__)
        runtime = cupy.cuda.runtime
        built_for = int(runtime.runtimeGetVersion())
        driver_version = int(runtime.driverGetVersion()) or None
        problem = _version_problem(version, driver_version, built_for)
        if problem is None:
            numbers = range(int(runtime.getDeviceCount()))
            devices = tuple(_info(cupy, number, index in (number, None)) for number in numbers)
            if not devices:
                problem = "the driver shows no device; see CUDA_VISIBLE_DEVICES"
    except Exception as error:  # a broken driver fails in ways of its own
        problem = f"the driver shows no device ({_line(error)}); see nvidia-smi"
    return CudaReport(version, driver_version, built_for, devices, problem)


class CudaEvent:
    """A point in a stream."""

    def __init__(self, device: CudaDevice, stream: Any) -> None:
        self._device = device
        self.event = device.cupy.cuda.Event(disable_timing=True)
        stream.record(self.event)

    def wait(self) -> None:
        """Wait, without the GIL, until the GPU is there. Raises `DeviceError`.

        The thread spins: that costs a core, and saves the time to wake up.
        """
        with self._device.calls():
            self.event.synchronize()


class CudaStream:
    """A stream that waits for no other but where it is told to."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.calls():
            self.stream = device.cupy.cuda.Stream(non_blocking=True)

    @property
    def pointer(self) -> int:
        """The `cudaStream_t`."""
        return int(self.stream.ptr)

    def record(self) -> Event:
        """An event after everything that is enqueued so far."""
        with self._device.calls():
            return CudaEvent(self._device, self.stream)

    def wait_for(self, event: Event) -> None:
        """Let later work begin after the event."""
        assert isinstance(event, CudaEvent), "an event of another device"
        with self._device.calls():
            self.stream.wait_event(event.event)


class CudaArena:
    """Device memory of the pool. It is one page: committed as a whole, given back by `close`."""

    def __init__(self, owner: str, max_bytes: int, device: CudaDevice) -> None:
        self.max_bytes = max_bytes
        self.page_bytes = max(1, max_bytes)
        self._owner = owner
        self._device = device
        self._memory: Any = None

    def __repr__(self) -> str:
        return f"<CudaArena {self._owner!r} {self.committed_bytes} of {self.max_bytes} bytes>"

    @property
    def committed_bytes(self) -> int:
        """All bytes or none."""
        return 0 if self._memory is None else self.max_bytes

    def commit(self, offset: int, num_bytes: int) -> None:
        """Take the memory from the pool."""
        assert (offset, num_bytes) == (0, self.max_bytes), "the arena is one page"
        if self._memory is None:
            self._device.budget.charge(self._owner, num_bytes)
            try:
                self._memory = self._device.allocate(self._owner, num_bytes)
            except OutOfMemoryError:
                self._device.budget.discharge(self._owner, num_bytes)
                raise

    def decommit(self, offset: int, num_bytes: int) -> None:
        """Give the memory back; the arena cannot promise the same address again."""
        assert (offset, num_bytes) == (0, self.max_bytes), "the arena is one page"
        self.close()

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A view of the range, a CuPy array."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert offset + num_bytes <= self.max_bytes, "view leaves the arena"
        if self._memory is None:
            assert self.max_bytes == 0, "view of memory that is not committed"
            self.commit(0, 0)
        return self._device.cupy.ndarray(shape, dtype, memptr=self._memory + offset)

    def close(self) -> None:
        """Give the memory back; it returns to the pool when the last view is gone."""
        if self._memory is not None:
            self._memory = None
            self._device.budget.discharge(self._owner, self.max_bytes)


class PinnedArena:
    """Pinned host memory that the GPU reads and writes in place, at the host's addresses.

    It is one page, because the driver pins and unpins a range as a whole. The memory is mapped by
    us and registered: CuPy's own pinned pool rounds to powers of two and never shrinks.
    """

    def __init__(self, owner: str, max_bytes: int, device: CudaDevice) -> None:
        self.max_bytes = max_bytes
        self.page_bytes = max(1, max_bytes)
        self._owner = owner
        self._device = device
        self._pageable = CpuArena(owner, max_bytes, device.host_budget)

    def __repr__(self) -> str:
        return f"<PinnedArena {self._owner!r} {self.committed_bytes} of {self.max_bytes} bytes>"

    @property
    def committed_bytes(self) -> int:
        """All bytes or none."""
        return self._pageable.committed_bytes

    def commit(self, offset: int, num_bytes: int) -> None:
        """Fault the memory in, then pin it."""
        assert (offset, num_bytes) == (0, self.max_bytes), "the arena is one page"
        if num_bytes == 0 or self.committed_bytes:
            return
        self._pageable.commit(0, num_bytes)
        runtime = self._device.cupy.cuda.runtime
        try:
            with self._device.calls(_CANNOT_PIN):
                runtime.hostRegister(self._address(), num_bytes, _REGISTER_PORTABLE_MAPPED)
        except DeviceError:
            self._pageable.decommit(0, num_bytes)
            raise
        except runtime.CUDARuntimeError as error:
            self._pageable.decommit(0, num_bytes)
            raise OutOfMemoryError(
                f"{self._owner}: {num_bytes} bytes of host memory cannot be pinned "
                f"({_line(error)}); lower --host-memory"
            ) from error
        self._device.pinned.add(self)

    def decommit(self, offset: int, num_bytes: int) -> None:
        """Unpin the memory and give it back."""
        assert (offset, num_bytes) == (0, self.max_bytes), "the arena is one page"
        self.close()

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A view of the range, a NumPy array."""
        return self._pageable.array(offset, shape, dtype)

    def close(self) -> None:
        """Unpin the memory and give it back; a lost device has unpinned it."""
        if self in self._device.pinned and self._device.fault is None:
            with self._device.calls():
                self._device.cupy.cuda.runtime.hostUnregister(self._address())
        self._device.pinned.discard(self)
        self._pageable.close()

    def _address(self) -> int:
        return int(self._pageable.array(0, (self.max_bytes,), np.uint8).ctypes.data)


class KernelLaunch(NamedTuple):
    """A plan on the device, ready to be executed; no blocks where there is nothing to do."""

    kernel: Any
    num_blocks: int
    arguments: tuple[np.int64, ...]


class CudaDevice:
    """One GPU. Each slab has a stream; copies of inputs have one, and all models have one.

    One compute stream is enough for one GPU, and it makes the memory that a model's run has freed
    safe for the next run: what is enqueued later is done later. Streams wait for each other by
    events only. Callable from any thread.
    """

    def __init__(
        self,
        index: int,
        *,
        max_bytes: int | None,
        max_host_bytes: int,
        reserve_fraction: float = 0.1,
        cupy: Any = None,
        is_debug: bool = False,
    ) -> None:
        """Open GPU `index`; `max_bytes` None takes all that is free on it.

        `reserve_fraction` of that is kept free. With `is_debug` the kernels check every plan.
        Raises `DeviceError`.
        """
        self.name = f"cuda:{index}"
        self.index = index
        self.fault: str | None = None
        info = _usable(self.name, index, cupy)
        self.info = info
        self.cupy = importlib.import_module("cupy") if cupy is None else cupy
        max_bytes = info.free_bytes if max_bytes is None else max_bytes
        if max_bytes > info.free_bytes:
            raise DeviceError(
                f"{self.name} has {info.free_bytes} of {info.total_bytes} bytes free, but "
                f"device_memory is {max_bytes}; lower --device-memory or free the GPU"
            )
        self.max_bytes = max_bytes
        self.budget = Budget("device memory", int(max_bytes * (1 - reserve_fraction)))
        self.host_budget = Budget("host memory", max_host_bytes)
        runtime = self.cupy.cuda.runtime
        if not runtime.deviceGetAttribute(
            runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, index
        ):
            raise DeviceError(f"{self.name} cannot read pinned host memory at the host's addresses")
        with self.calls():
            self._pool = self.cupy.cuda.MemoryPool()
            self._pool.set_limit(size=max_bytes)
        # Kept alive until they are closed: what is unmapped while it is pinned stays pinned, and
        # others may get its addresses.
        self.pinned: set[PinnedArena] = set()
        self._staging_mutex = threading.Lock()
        self._free_pinned = PinnedBlocks(self)
        self._is_debug = is_debug
        self._module = self._compiled()
        self._name_to_kernel: dict[str, Any] = {}
        self._marks: dict[tuple[int, int, int], tuple[Any, Any]] = {}
        self.copies = CudaStream(self)
        self.compute = CudaStream(self)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name} {self.info.name!r} {self.budget!r}>"

    def reserve(self, owner: str, max_bytes: int) -> Arena:
        """Reserve VRAM."""
        return CudaArena(owner, max_bytes, self)

    def reserve_host(self, owner: str, max_bytes: int) -> Arena:
        """Reserve pinned host memory."""
        return PinnedArena(owner, max_bytes, self)

    def reserve_staging(self, owner: str, max_bytes: int) -> Arena:
        """Pinned memory that is needed whatever the host memory is; committed."""
        arena = PinnedArena(owner, max_bytes, self)
        with self._staging_mutex:  # another's block must not take the room that was made
            self.host_budget.make_room(max_bytes)
            arena.commit(0, max_bytes)
        return arena

    def to_device(self, array: NDArray[Any]) -> Any:
        """Copy a small array; blocks."""
        contiguous = np.ascontiguousarray(array)
        memory = self.allocate("constants", contiguous.nbytes)
        copied = self.cupy.ndarray(contiguous.shape, contiguous.dtype, memptr=memory)
        if contiguous.nbytes:
            self.copy_to_device(copied.data.ptr, contiguous.ctypes.data, contiguous.nbytes)
            self.copies.record().wait()
        return copied

    def new_stream(self) -> Stream:
        """A stream of its own."""
        return CudaStream(self)

    def new_plan_buffer(self, max_positions: int) -> PlanBuffer:
        """A plan in pinned memory."""
        return CudaPlanBuffer(self, max_positions)

    def new_buffers(self, *, is_on_host: bool = False) -> Buffers:
        """Inputs in VRAM, or in pinned memory."""
        return CudaBuffers(self, is_on_host=is_on_host)

    def execute(
        self,
        stream: Stream,
        buffer: PlanBuffer,
        num_reads: int,
        num_fills: int,
        memory: SlabMemory,
        outputs: Sequence[Output],
    ) -> None:
        """Enqueue one copy of the plan and one kernel."""
        assert isinstance(stream, CudaStream)
        assert isinstance(buffer, CudaPlanBuffer)
        launch = self.upload(stream, buffer, num_reads, num_fills, memory, outputs)
        if launch.num_blocks:
            self.launch(stream, launch)

    def upload(
        self,
        stream: CudaStream,
        buffer: CudaPlanBuffer,
        num_reads: int,
        num_fills: int,
        memory: SlabMemory,
        outputs: Sequence[Output],
    ) -> KernelLaunch:
        """Enqueue the copy of a plan, and return the launch that executes it.

        Apart from `launch`, so that the kernel can be timed alone.
        """
        layout = write_words(buffer, num_reads, num_fills, outputs)
        num_free_fills = buffer.plan.num_free_fills
        num_copies = num_free_fills + layout.num_moves
        slot_bytes = memory.device.shape[1] * memory.device.dtype.itemsize
        has_scales = memory.row_format.has_scales
        arguments = (
            buffer.device_words.data.ptr,
            layout.num_outputs, layout.outputs_at, layout.num_units,
            layout.fills_at, num_free_fills, layout.moves_at, layout.num_moves,
            memory.device.data.ptr, memory.host.ctypes.data, slot_bytes,
            memory.device_scales.data.ptr if has_scales else 0,
            memory.host_scales.ctypes.data if has_scales else 0,
            memory.default_of.data.ptr,
            *self._zeroed_marks(stream, memory),
        )  # fmt: skip
        runtime = self.cupy.cuda.runtime
        with self.calls():
            runtime.memcpyAsync(
                buffer.device_words.data.ptr, buffer.words.ctypes.data, 8 * layout.num_words,
                runtime.memcpyHostToDevice, stream.pointer,
            )  # fmt: skip
        return KernelLaunch(
            self._kernel(f"execute_{memory.row_format.value}"),
            grid_blocks(layout.num_units, num_copies, slot_bytes),
            tuple(map(np.int64, arguments)),
        )

    def launch(self, stream: CudaStream, launch: KernelLaunch) -> None:
        """Enqueue the kernel."""
        with self.calls(), stream.stream:
            launch.kernel((launch.num_blocks,), (BLOCK_THREADS,), launch.arguments)

    def read_back(
        self, sources: Sequence[tuple[int, tuple[int, ...], np.dtype[Any]]]
    ) -> list[NDArray[Any]]:
        """Copy device memory (address, shape, dtype) to new host arrays; blocks.

        The copies follow the work in `compute` so far, and only they are waited for. The memory
        must stay valid until this returns. Raises `DeviceError`.
        """
        sizes = [
            int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for _, shape, dtype in sources
        ]
        starts = np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)]).tolist()
        block = self._free_pinned.acquire(starts[-1])
        runtime = self.cupy.cuda.runtime
        staged = []
        with self.calls():
            for (address, shape, dtype), size, start in zip(
                sources, sizes, starts[:-1], strict=True
            ):
                view = block.array(start, shape, dtype)
                staged.append(view)
                if size:
                    runtime.memcpyAsync(
                        view.ctypes.data, address, size, runtime.memcpyDeviceToHost,
                        self.compute.pointer,
                    )  # fmt: skip
        self.compute.record().wait()
        arrays = [np.array(view) for view in staged]
        self._free_pinned.release(block)
        return arrays

    def copy_to_device(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy of host memory in the copy stream."""
        runtime = self.cupy.cuda.runtime
        with self.calls():
            runtime.memcpyAsync(
                target, source, num_bytes, runtime.memcpyHostToDevice, self.copies.pointer
            )

    def allocate(self, owner: str, num_bytes: int) -> Any:
        """Memory of the pool, uncharged; raises `OutOfMemoryError`."""
        try:
            with self.calls():
                try:
                    return self._pool.malloc(num_bytes)
                except self.cupy.cuda.memory.OutOfMemoryError:
                    # The limit counts what the pool keeps for later, too.
                    self._pool.free_all_blocks()
                    return self._pool.malloc(num_bytes)
        except self.cupy.cuda.memory.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{owner}: {self.name} has no {num_bytes} bytes left ({_line(error)})"
            ) from error

    def close(self) -> None:
        """Give all memory back."""
        for arena in list(self.pinned):
            arena.close()
        self._marks.clear()
        if self.fault is None:
            self.make_current()
            self._pool.free_all_blocks()

    def make_current(self) -> None:
        """Make this GPU the one of the calling thread."""
        self.cupy.cuda.runtime.setDevice(self.index)

    def calls(self, harmless: tuple[int, ...] = ()) -> _Calls:
        """Where CUDA is called: a call that fails there is a fault of the device.

        Errors of a status in `harmless` are raised as they are.
        """
        return _Calls(self, harmless)

    def _compiled(self) -> Any:
        """The kernels for this GPU; CuPy keeps the binary on disk."""
        options = (*_KERNEL_OPTIONS, "-DHOTSHELF_DEBUG") if self._is_debug else _KERNEL_OPTIONS
        module = self.cupy.RawModule(code=_KERNELS.read_text(encoding="utf-8"), options=options)
        try:
            self.make_current()
            module.compile()
        except Exception as error:  # the compiler may be missing, not load, or refuse the code
            raise DeviceError(
                f"{self.name}: the kernels do not compile ({_line(error)}); see `hotshelf doctor`"
            ) from error
        return module

    def _kernel(self, name: str) -> Any:
        if name not in self._name_to_kernel:
            self._name_to_kernel[name] = self._module.get_function(name)
        return self._name_to_kernel[name]

    def _zeroed_marks(self, stream: CudaStream, memory: SlabMemory) -> tuple[int, int]:
        """One word a slot of both tiers, for the checks of a debug build."""
        if not self._is_debug:
            return 0, 0
        sizes = (4 * len(memory.device), 4 * len(memory.host))
        key = (memory.host.ctypes.data, *sizes)
        if key not in self._marks:
            self._marks[key] = tuple(self.allocate("marks", max(4, size)) for size in sizes)
        marks = self._marks[key]
        with self.calls():
            for memory_pointer, size in zip(marks, sizes, strict=True):
                self.cupy.cuda.runtime.memsetAsync(memory_pointer.ptr, 0, size, stream.pointer)
        return marks[0].ptr, marks[1].ptr


class _Calls:
    """Calls to one GPU. What fails there does not heal: the context is lost, so nothing follows."""

    def __init__(self, device: CudaDevice, harmless: tuple[int, ...]) -> None:
        self._device = device
        self._harmless = harmless

    def __enter__(self) -> None:
        if self._device.fault is not None:
            raise DeviceError(self._device.fault)
        try:
            self._device.make_current()
        except self._errors() as error:  # also what earlier work has done shows here
            raise self._fault(error) from error

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        is_harmless = getattr(error, "status", None) in self._harmless
        if isinstance(error, self._errors()) and not is_harmless:
            raise self._fault(error) from error

    def _errors(self) -> tuple[type[Exception], ...]:
        cuda = self._device.cupy.cuda
        return (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError)

    def _fault(self, error: Exception) -> DeviceError:
        self._device.fault = f"{self._device.name} has failed ({_line(error)}); restart the server"
        return DeviceError(self._device.fault)


def _usable(name: str, index: int, cupy: Any) -> CudaDeviceInfo:
    """The GPU of that number; raises `DeviceError` where it cannot be used."""
    report = probe(cupy, index)
    if report.problem is not None:
        raise DeviceError(f"device {name!r} cannot be used: {report.problem}")
    if index >= len(report.devices):
        names = ", ".join(f"cuda:{device.index}" for device in report.devices)
        raise DeviceError(f"device {name!r} does not exist; there are {names}")
    return report.devices[index]


def _info(cupy: Any, index: int, is_wanted: bool) -> CudaDeviceInfo:
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(index)
    free_bytes = 0
    if is_wanted:
        runtime.setDevice(index)
        free_bytes, _ = runtime.memGetInfo()
    return CudaDeviceInfo(
        index=index,
        name=bytes(properties["name"]).decode(errors="replace"),
        compute_capability=(int(properties["major"]), int(properties["minor"])),
        total_bytes=int(properties["totalGlobalMem"]),
        free_bytes=int(free_bytes),
        num_multiprocessors=int(properties["multiProcessorCount"]),
        pci_bus_id=str(runtime.deviceGetPCIBusId(index)),
    )


def _version_problem(version: str, driver_version: int | None, built_for: int) -> str | None:
    if driver_version is None:
        needed = _dotted(built_for // 1000 * 1000)
        return f"there is no NVIDIA driver; install one that supports CUDA {needed} (docs/gpu.md)"
    if driver_version // 1000 >= built_for // 1000:
        return None
    return (
        f"CuPy {version} is built for CUDA {_dotted(built_for)}, but the driver supports up to "
        f"{_dotted(driver_version)}; update the driver, or install "
        f"cupy-cuda{driver_version // 1000}x in its place"
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
