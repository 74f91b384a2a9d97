"""How fast the kernel reads rows: from VRAM, from pinned memory and from managed memory.

The ceiling of a lookup that hits is a copy within the GPU, the ceiling of one that misses is a copy
from pinned memory. Rows are read from distinct random slots and written in order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.check import MIB, Check, SkippedError
from benchmarks.gpu.report import Aim, Figure
from benchmarks.gpu.slabs import (
    SlabReader,
    committed,
    copies,
    distinct_slots,
    fill_device,
    fill_host,
)
from benchmarks.gpu.timing import Samples, rates
from cache.arena import Arena
from cache.cuda import CudaDevice, probe
from cache.cuda_buffers import plan_bytes
from cache.device import SlabMemory
from cache.plan import TIER_DEVICE, TIER_FILLED, TIER_HOST

ROW_BYTES = (64, 128, 256, 512, 1024, 2048)
UNALIGNED_ROW_BYTES = 528  # a slot is a multiple of 16 bytes, and not always of 128
MANAGED_ROW_BYTES = 512
AIM = Aim(is_at_least=True, ratio=0.85)
MIN_AIMED_BYTES = 512
NUM_PLANS = 2

_LINE_BYTES = 128
_GPU_COPY = "device copy"
_PINNED_COPY = "pinned copy"

View = Callable[[int, tuple[int, ...], Any], Any]


def run_hits(check: Check) -> None:
    """Rows in VRAM; bytes are counted as read and written."""
    slab_bytes, launch_bytes = _sizes(check, check.scale.slab_bytes)
    with _device(check, slab_bytes + launch_bytes) as device:
        slab = committed(device.reserve("slab", slab_bytes))
        output = committed(device.reserve("output", launch_bytes))
        fill_device(device, slab.array(0, (1,), np.uint32).data.ptr, slab_bytes // 4)
        for row_bytes in ROW_BYTES:
            _device_rows(check, device, slab.array, slab_bytes, output, row_bytes)


def run_managed(check: Check) -> None:
    """The same over memory that the driver moves between host and GPU as it likes.

    Never more of it than is free: beyond that a GPU can hang.
    """
    slab_bytes, launch_bytes = _sizes(check, check.scale.managed_bytes)
    with _device(check, slab_bytes + launch_bytes) as device:
        _refuse_managed(check, device, 4 * slab_bytes)
        slab = committed(device.reserve("slab", slab_bytes))
        output = committed(device.reserve("output", launch_bytes))
        address = slab.array(0, (1,), np.uint32).data.ptr
        fill_device(device, address, slab_bytes // 4)
        cuda = device.cupy.cuda
        with device.calls():
            managed = cuda.malloc_managed(slab_bytes)
        kind = cuda.runtime.memcpyDeviceToDevice
        [copy] = copies(device, managed.ptr, [address], slab_bytes, kind)
        copy()

        def view(offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
            return device.cupy.ndarray(shape, dtype, memptr=managed + offset)

        where = "managed memory, "
        _device_rows(check, device, view, slab_bytes, output, MANAGED_ROW_BYTES, where)


def _refuse_managed(check: Check, device: CudaDevice, num_bytes: int) -> None:
    free_bytes = _free_bytes(check)
    needed = max(check.scale.min_free_for_managed_bytes, num_bytes)
    if free_bytes < needed:
        raise SkippedError(f"{free_bytes} bytes of the GPU are free, expected at least {needed}")
    runtime = device.cupy.cuda.runtime
    with device.calls():
        can_share = runtime.deviceGetAttribute(
            runtime.cudaDevAttrConcurrentManagedAccess, device.index
        )
    if not can_share:
        raise SkippedError("the GPU cannot use managed memory while the CPU does")


def run_misses(check: Check) -> None:
    """Rows in pinned host memory, which the kernel reads in place; bytes are counted as read."""
    host_bytes, launch_bytes = check.scale.host_bytes, check.scale.host_launch_bytes
    with _device(check, 2 * launch_bytes, host_bytes) as device:
        host = committed(device.reserve_host("host tier", host_bytes))
        output = committed(device.reserve("output", launch_bytes))
        fill_host(host.array(0, (host_bytes // 4,), np.uint32))
        for row_bytes in sorted((*ROW_BYTES, UNALIGNED_ROW_BYTES)):
            _host_rows(check, device, host, output, row_bytes)
        host.close()


def _device_rows(
    check: Check,
    device: CudaDevice,
    view: View,
    slab_bytes: int,
    output: Arena,
    row_bytes: int,
    where: str = "",
) -> None:
    """The kernel alone, and the plan's copy with it, against a copy of as many bytes."""
    num_slots, num_words = slab_bytes // row_bytes, row_bytes // 4
    num_rows = _num_rows(check, output, row_bytes, num_slots)
    slab = view(0, (num_slots, num_words), np.float32)
    host = committed(device.reserve_staging("host slot", row_bytes))
    reader = SlabReader(
        device,
        SlabMemory(
            device=slab,
            host=host.array(0, (1, num_words), np.float32),
            default_of=device.to_device(np.zeros(1, dtype=np.float32)),
        ),
        output.array(0, (num_rows, num_words), np.float32),
        _slots(row_bytes, num_slots, num_rows),
        TIER_DEVICE,
    )
    num_bytes = num_rows * row_bytes
    sources = _spread(slab.data.ptr, slab_bytes, num_bytes)
    runtime = device.cupy.cuda.runtime
    kind = runtime.memcpyDeviceToDevice
    contenders = {
        _GPU_COPY: copies(device, reader.output.data.ptr, sources, num_bytes, kind),
        "kernel": reader.launches(),
        "execute": reader.executions(),
    }
    reader.check(contenders["kernel"])
    reader.check(contenders["execute"])
    found = rates(check, device, contenders, 2 * num_bytes)
    what = f"hits, {where}rows of {row_bytes} B"
    _add(check, f"{what}: kernel", found["kernel"], _GPU_COPY, found[_GPU_COPY], row_bytes, where)
    _add(check, f"{what}: with the plan's copy", found["execute"], _GPU_COPY, found[_GPU_COPY])
    reader.check(contenders["kernel"])
    reader.close()
    host.close()


def _host_rows(
    check: Check, device: CudaDevice, host: Arena, output: Arena, row_bytes: int
) -> None:
    """The kernel alone, and where it admits the rows, against a copy of as many bytes."""
    num_slots, num_words = host.max_bytes // row_bytes, row_bytes // 4
    num_rows = _num_rows(check, output, row_bytes, num_slots)
    slab = committed(device.reserve("slab", num_rows * row_bytes))
    memory = SlabMemory(
        device=slab.array(0, (num_rows, num_words), np.float32),
        host=host.array(0, (num_slots, num_words), np.float32),
        default_of=device.to_device(np.zeros(1, dtype=np.float32)),
    )
    rows = output.array(0, (num_rows, num_words), np.float32)
    slots = _slots(row_bytes, num_slots, num_rows)
    reader = SlabReader(device, memory, rows, slots, TIER_HOST)
    filler = SlabReader(device, memory, rows, slots, TIER_FILLED)
    num_bytes = num_rows * row_bytes
    address = host.array(0, (1,), np.uint8).ctypes.data
    sources = _spread(address, host.max_bytes, num_bytes)
    kind = device.cupy.cuda.runtime.memcpyHostToDevice
    contenders = {
        _PINNED_COPY: copies(device, rows.data.ptr, sources, num_bytes, kind),
        "kernel": reader.launches(),
        "kernel that fills": filler.launches(),
    }
    found = rates(check, device, contenders, num_bytes)
    is_aligned = row_bytes % _LINE_BYTES == 0
    what = f"misses, rows of {row_bytes} B" + ("" if is_aligned else " (not 128-byte aligned)")
    aimed = row_bytes if is_aligned else 0
    for name, checked in (("kernel", reader), ("kernel that fills", filler)):
        checked.check(contenders[name])
        label = f"{what}: {name}"
        _add(check, label, found[name], _PINNED_COPY, found[_PINNED_COPY], aimed)
        checked.close()
    slab.close()


def _add(
    check: Check,
    what: str,
    rate: Samples,
    ceiling_is: str,
    ceiling: Samples,
    row_bytes: int = 0,
    where: str = "",
) -> None:
    """Report a rate; with rows of `MIN_AIMED_BYTES` and more it is judged."""
    check.add(
        Figure(
            what,
            rate.median,
            "GB/s",
            low=rate.percentile(10),
            high=rate.percentile(90),
            ceiling=ceiling.median,
            ceiling_is=ceiling_is,
            ratio=rate.over(ceiling),
            aim=AIM if row_bytes >= MIN_AIMED_BYTES and not where else None,
            details={"num_rounds": len(rate.values)},
        )
    )


def _device(
    check: Check, num_bytes: int, host_bytes: int = 0
) -> AbstractContextManager[CudaDevice]:
    all_plans_bytes = 2 * NUM_PLANS * plan_bytes(check.scale.max_positions)
    max_bytes = num_bytes + all_plans_bytes + 16 * MIB
    return check.open_device(max_bytes=max_bytes, max_host_bytes=host_bytes, kind=CudaDevice)


def _sizes(check: Check, slab_bytes: int) -> tuple[int, int]:
    """Bytes of a slab and of a launch: as wanted, or a part of what is free on a small GPU."""
    slab_bytes = min(slab_bytes, _free_bytes(check) // 4 // MIB * MIB)
    return slab_bytes, min(check.scale.launch_bytes, slab_bytes // 8)


def _free_bytes(check: Check) -> int:
    return probe(check.cupy, check.index).devices[check.index].free_bytes


def _num_rows(check: Check, output: Arena, row_bytes: int, num_slots: int) -> int:
    return min(output.max_bytes // row_bytes, check.scale.max_positions, num_slots)


def _slots(row_bytes: int, num_slots: int, num_rows: int) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(row_bytes)
    return [distinct_slots(random, num_slots, num_rows) for _ in range(NUM_PLANS)]


def _spread(address: int, total_bytes: int, num_bytes: int) -> list[int]:
    """Addresses of `NUM_PLANS` blocks that do not overlap, where there is room."""
    step = (total_bytes - num_bytes) // NUM_PLANS // _LINE_BYTES * _LINE_BYTES
    return [address + number * step for number in range(NUM_PLANS)]
