"""What `make gpu-check` needs of CuPy beyond the server: timing, managed memory, device copies."""
# ruff: noqa: N802

from __future__ import annotations

from types import ModuleType
from typing import Any

from tests.cuda_double.cupy_double import Runtime, cupy_of
from tests.cuda_double.machine import INVALID_HANDLE, CUDARuntimeError, Machine, Work


class MeasuringRuntime(Runtime):
    """Also copies within the device, and knows of managed memory."""

    memcpyDeviceToDevice = 3  # noqa: N815
    cudaDevAttrConcurrentManagedAccess = 89  # noqa: N815

    def __init__(self, machine: Machine, *, has_managed_memory: bool) -> None:
        super().__init__(machine)
        self._has_managed_memory = has_managed_memory

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        if kind != self.memcpyDeviceToDevice:
            super().memcpyAsync(dst, src, size, kind, stream)
            return
        machine = self._machine
        with machine.call("runtime.memcpyAsync"):
            for address in (dst, src):
                if machine.known(address, size, "device copy").device is None:
                    raise machine.misuse("a copy within the device is of host memory")
            uses = ((dst, dst + size), (src, src + size))
            work = Work("device copy", lambda: self._copy(dst, src, size), uses)
            machine.put(machine.queue(stream), work)

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        if attrib == self.cudaDevAttrConcurrentManagedAccess:
            return int(self._has_managed_memory)
        return super().deviceGetAttribute(attrib, device)


def measuring_cupy_of(machine: Machine, *, has_managed_memory: bool = True) -> ModuleType:
    """A CuPy of this machine; between any two events lies a millisecond."""
    cupy = cupy_of(machine)
    managed = cupy.cuda.MemoryPool()

    def get_elapsed_time(start_event: Any, end_event: Any) -> float:
        for event in (start_event, end_event):
            point = event._point
            if point is None or point.queue.num_done < point.number:
                raise CUDARuntimeError(INVALID_HANDLE)
        return 1.0

    cupy.cuda.runtime = MeasuringRuntime(machine, has_managed_memory=has_managed_memory)
    cupy.cuda.get_elapsed_time = get_elapsed_time
    cupy.cuda.malloc_managed = managed.malloc
    return cupy
