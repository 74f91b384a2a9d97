"""The double of CUDA shows what would be wrong on a GPU: late work, stale memory, misuse."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_double import machine as double
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.kernels import SOURCE, Arguments
from tests.cuda_double.machine import CUDARuntimeError, Machine, MachineConfig
from tests.cuda_double.memory import MisuseError, bytes_at

TO_DEVICE, TO_HOST = 1, 2


class Gpu:
    """A machine, its CuPy, and a page of registered host memory of ones."""

    def __init__(self, config: MachineConfig | None = None) -> None:
        self.machine = Machine(config or MachineConfig())
        self.cupy: Any = cupy_of(self.machine)
        self.runtime = self.cupy.cuda.runtime
        self.host: NDArray[np.float32] = np.ones(1024, dtype=np.float32)
        self.runtime.hostRegister(self.host.ctypes.data, self.host.nbytes, 3)
        self.pool = self.cupy.cuda.MemoryPool()

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def array(self, num_values: int) -> Any:
        memory = self.pool.malloc(4 * num_values)
        return self.cupy.ndarray((num_values,), np.float32, memptr=memory)

    def copy(self, array: Any, stream: Any, kind: int = TO_DEVICE) -> None:
        addresses = [array.data.ptr, self.host.ctypes.data]
        target, source = addresses if kind == TO_DEVICE else reversed(addresses)
        self.runtime.memcpyAsync(target, source, array.nbytes, kind, stream.ptr)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def now(array: Any) -> list[float]:
    """What is in device memory at this moment, which no call of CUDA tells."""
    values: list[float] = bytes_at(array.data.ptr, array.nbytes).view(np.float32).tolist()
    return values


def test_nothing_runs_before_somebody_waits_and_the_target_is_poison_until_then(gpu: Gpu) -> None:
    array, stream = gpu.array(2), gpu.stream()
    gpu.copy(array, stream)
    event = stream.record()
    assert np.isnan(now(array)).all()
    gpu.host[:] = 7  # too early: the copy has not read it
    event.synchronize()
    assert now(array) == [7, 7]


def test_a_copy_to_the_host_is_poison_until_it_has_run(gpu: Gpu) -> None:
    array, stream = gpu.array(2), gpu.stream()
    gpu.copy(array, stream)
    stream.record().synchronize()
    gpu.copy(array, stream, TO_HOST)
    assert np.isnan(gpu.host[:2]).all()
    gpu.machine.run_until_now(stream.ptr)
    assert gpu.host[:2].tolist() == [1, 1]


def test_streams_wait_for_what_an_event_had_recorded_when_they_were_told_to(gpu: Gpu) -> None:
    first, second = gpu.stream(), gpu.stream()
    done: list[str] = []
    event = gpu.cupy.cuda.Event(disable_timing=True)
    second.wait_event(event)  # nothing is recorded: there is nothing to wait for
    gpu.machine.enqueue(first.ptr, lambda: done.append("a"))
    first.record(event)
    gpu.machine.enqueue(second.ptr, lambda: done.append("b"))
    second.wait_event(event)
    gpu.machine.enqueue(second.ptr, lambda: done.append("c"))
    gpu.machine.enqueue(first.ptr, lambda: done.append("d"))
    first.record(event)
    gpu.machine.run_until_now(second.ptr)
    assert done == ["b", "a", "c"]


def test_with_a_seed_streams_work_ahead_of_those_who_wait() -> None:
    orders = set()
    for seed in range(8):
        gpu = Gpu(MachineConfig(seed=seed))
        done: list[str] = []
        streams = {"a": gpu.stream(), "b": gpu.stream()}
        for number in range(6):
            for name, stream in streams.items():
                gpu.machine.enqueue(stream.ptr, partial(done.append, f"{name}{number}"))
                stream.record()
        gpu.machine.run_everything()
        assert [text for text in done if text[0] == "a"] == [f"a{number}" for number in range(6)]
        orders.add(tuple(done))
    assert len(orders) > 1


def test_memory_is_poison_when_it_is_new_and_is_watched_when_it_is_freed(gpu: Gpu) -> None:
    array = gpu.array(4)
    address = array.data.ptr
    bytes_at(address, 16)[:] = 0
    del array
    gc.collect()
    assert gpu.pool.used_bytes() == 0
    assert (bytes_at(address, 16) == 0xFF).all()
    gpu.machine.check()
    bytes_at(address, 16)[3] = 0
    with pytest.raises(MisuseError, match=r"wrote to .* after it was freed"):
        gpu.machine.check()


def test_writes_beside_an_allocation_are_found(gpu: Gpu) -> None:
    array = gpu.array(4)
    bytes_at(array.data.ptr, 17)[16] = 0
    with pytest.raises(MisuseError, match=r"wrote beside memory of device 0 0x.*\+16"):
        gpu.machine.check()


def test_memory_that_pending_work_uses_must_not_be_freed(gpu: Gpu) -> None:
    array, stream = gpu.array(4), gpu.stream()
    gpu.copy(array, stream)
    event = stream.record()
    del array
    gc.collect()
    with pytest.raises(MisuseError, match=r"target of a copy: 16 bytes at 0x.* in freed memory"):
        event.synchronize()
    with pytest.raises(MisuseError, match="is freed before copy of 16 bytes has run"):
        gpu.machine.check()


def test_pinned_memory_is_registered_once_and_not_unregistered_while_it_is_used(gpu: Gpu) -> None:
    start = gpu.host.ctypes.data
    with pytest.raises(CUDARuntimeError, match="AlreadyRegistered"):
        gpu.runtime.hostRegister(start + 16, 16, 3)
    with pytest.raises(CUDARuntimeError, match="NotRegistered"):
        gpu.runtime.hostUnregister(start + 16)
    array, stream = gpu.array(4), gpu.stream()
    gpu.copy(array, stream)
    with pytest.raises(MisuseError, match="is unregistered before copy of 16 bytes has run"):
        gpu.runtime.hostUnregister(start)


def test_copies_are_between_memories_that_cuda_knows(gpu: Gpu) -> None:
    array, stream, plain = gpu.array(4), gpu.stream(), np.ones(4, np.float32)
    address, host, pageable = array.data.ptr, gpu.host.ctypes.data, plain.ctypes.data
    for target, source, size, kind, fault in (
        (address, host, 20, TO_DEVICE, "in unknown memory"),
        (pageable, address, 16, TO_HOST, "in unknown memory"),
        (address, host, 16, TO_HOST, "is of kind 2"),
        (host, host, 16, TO_DEVICE, "is of kind 1"),
    ):
        with pytest.raises(MisuseError, match=fault):
            gpu.runtime.memcpyAsync(target, source, size, kind, stream.ptr)


def test_a_copy_from_pageable_memory_waits_for_the_stream_and_is_counted(gpu: Gpu) -> None:
    array, stream, plain = gpu.array(4), gpu.stream(), np.full(4, 5, np.float32)
    done: list[int] = []
    gpu.machine.enqueue(stream.ptr, lambda: done.append(1))
    gpu.runtime.memcpyAsync(array.data.ptr, plain.ctypes.data, 16, TO_DEVICE, stream.ptr)
    assert done == [1]
    plain[:] = 0  # it is staged
    stream.record().synchronize()
    assert now(array) == [5] * 4
    assert gpu.machine.num_pageable_copies == 1


def test_the_null_stream_is_not_used(gpu: Gpu) -> None:
    array = gpu.array(4)
    with pytest.raises(MisuseError, match="the null stream is used"):
        gpu.runtime.memsetAsync(array.data.ptr, 0, 16, 0)
    with pytest.raises(MisuseError, match="the null stream is used"):
        array.get()
    with pytest.raises(MisuseError, match="waits for the null stream"):
        gpu.cupy.cuda.Stream()


def test_what_belongs_to_a_device_is_used_while_that_is_current() -> None:
    gpu = Gpu(MachineConfig(num_devices=2))
    gpu.runtime.setDevice(1)
    array, stream = gpu.array(4), gpu.stream()
    gpu.copy(array, stream)
    faults: list[str] = []

    def use() -> None:  # a thread begins with device 0
        for call in (stream.record, stream.__enter__, lambda: gpu.copy(array, stream)):
            try:
                call()
            except MisuseError as error:
                faults.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert faults == ["a stream of device 1 is used while 0 is current"] * 3
    with pytest.raises(CUDARuntimeError, match="invalid device ordinal"):
        gpu.runtime.setDevice(2)


def test_what_has_failed_stays_failed(gpu: Gpu) -> None:
    stream = gpu.stream()
    gpu.machine.fail("copy", double.ILLEGAL_ADDRESS)
    gpu.copy(gpu.array(4), stream)
    event = stream.record()
    for call in (event.synchronize, event.synchronize, gpu.stream, gpu.runtime.memGetInfo):
        with pytest.raises(CUDARuntimeError, match="illegal memory access") as caught:
            call()
        assert caught.value.status == 700


def test_a_pool_has_a_limit_and_the_device_an_end(gpu: Gpu) -> None:
    gpu.pool.set_limit(size=2048)
    kept = gpu.pool.malloc(1000)
    assert (gpu.pool.used_bytes(), gpu.pool.total_bytes()) == (1024, 1024)
    with pytest.raises(gpu.cupy.cuda.memory.OutOfMemoryError, match="limit set to: 2,048 bytes"):
        gpu.pool.malloc(1025)
    total_bytes = gpu.machine.config.total_bytes
    assert gpu.runtime.memGetInfo() == (total_bytes - 1024, total_bytes)
    assert kept.ptr % 512 == 0
    del kept
    assert (gpu.pool.used_bytes(), gpu.pool.total_bytes()) == (0, 1024)
    gpu.pool.free_all_blocks()
    assert gpu.runtime.memGetInfo() == (total_bytes, total_bytes)


def test_an_array_is_a_view_that_the_host_sees_through_copies_only(gpu: Gpu) -> None:
    array, stream = gpu.array(12), gpu.stream()
    part = array.reshape(3, 4)[1:, 1]
    assert (part.shape, part.data.ptr - array.data.ptr) == ((2,), 20)
    assert array.view(np.int32)[3].shape == ()
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array"):
        np.asarray(array)
    gpu.copy(array, stream)
    with stream:
        assert array.get().tolist() == [1] * 12  # it waits for the current stream
    assert np.from_dlpack(array).tolist() == [1] * 12
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(array).data_ptr() == array.data.ptr


def launch(gpu: Gpu, stream: Any, words: list[int], **changed: int) -> tuple[Any, ...]:
    """Launch a plan of one read and one output on a slab of two slots on each side."""
    slots, out, plan = gpu.array(8), gpu.array(4), gpu.pool.malloc(8 * len(words))
    bytes_at(slots.data.ptr, 32).view(np.float32)[:] = [1] * 4 + [2] * 4
    words = [word if word != 0xADD else out.data.ptr for word in words]
    bytes_at(plan.ptr, 8 * len(words)).view(np.int64)[:] = words
    marks = gpu.pool.malloc(4096)
    bytes_at(marks.ptr, 4096)[:] = 0
    arguments = Arguments(
        words=plan.ptr, num_outputs=1, outputs_at=1, num_units=1, fills_at=7, num_free_fills=0,
        moves_at=7, num_moves=0, device_slots=slots.data.ptr, host_slots=gpu.host.ctypes.data,
        slot_bytes=16, device_scales=0, host_scales=0, default_of=out.data.ptr,
        device_marks=marks.ptr, host_marks=marks.ptr,
    )._replace(**changed)  # fmt: skip
    code = SOURCE.read_text(encoding="utf-8")
    module = gpu.cupy.RawModule(code=code, options=("--fmad=false", "-DHOTSHELF_DEBUG"))
    with stream:
        kernel = module.get_function("execute_float32")
        kernel((1,), (256,), tuple(np.int64(argument) for argument in arguments))
    return out, plan, slots, marks


SECOND_SLOT = 1 << 3
OUTPUT = [0, 0, 0xADD, 4, 0, -1]


def test_a_kernel_runs_late_too(gpu: Gpu) -> None:
    stream = gpu.stream()
    out, *_kept = launch(gpu, stream, [SECOND_SLOT, *OUTPUT])
    assert np.isnan(now(out)).all()
    stream.record().synchronize()
    assert now(out) == [2] * 4


@pytest.mark.parametrize(
    ("words", "changed", "fault"),
    [
        ([-1] * 7, {}, "output 0 begins late|dim is -1"),
        ([SECOND_SLOT, 0, 0, 16, 4, 0, -1], {}, "rows of an output: 16 bytes at 0x10 are in"),
        ([2 << 3, *OUTPUT], {}, "a slot that is read is beyond 2 slots"),
        ([7, *OUTPUT], {}, "a read is of no tier"),
        (
            [SECOND_SLOT, *OUTPUT, 5, 0, -1],
            {"num_free_fills": 1, "moves_at": 10},
            "filled is beyond 2 slots",
        ),
        (
            [SECOND_SLOT, *OUTPUT, 0, 900, -1],
            {"num_free_fills": 1, "moves_at": 10},
            "filled from is beyond 256",
        ),
        (
            [SECOND_SLOT, *OUTPUT, 1, 0, -1],
            {"num_free_fills": 1, "moves_at": 10},
            "the plan breaks the rules of Plan",
        ),
        ([SECOND_SLOT, *OUTPUT], {"outputs_at": 2}, r"words 2\+6 are not in the plan"),
    ],
)
def test_a_kernel_that_would_go_astray_is_stopped(
    gpu: Gpu, words: list[int], changed: dict[str, int], fault: str
) -> None:
    stream = gpu.stream()
    _kept = launch(gpu, stream, words, **changed)
    with pytest.raises(MisuseError, match=fault):
        stream.record().synchronize()


def test_a_launch_names_memory_of_the_right_kind(gpu: Gpu) -> None:
    stream, host = gpu.stream(), gpu.host.ctypes.data
    with pytest.raises(MisuseError, match="device slots are in host memory"):
        launch(gpu, stream, [0, *OUTPUT], device_slots=host)
    with pytest.raises(MisuseError, match="host slots: 1 bytes at 0x10 are in unknown memory"):
        launch(gpu, stream, [0, *OUTPUT], host_slots=16)
