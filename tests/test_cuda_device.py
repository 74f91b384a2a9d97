"""What a GPU does beyond the contract of all devices: failures, its pool and its pinned blocks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from cache.cuda import CudaDevice, probe
from cache.cuda_buffers import plan_bytes
from cache.device import Output, open_device
from cache.errors import DeviceError, OutOfMemoryError
from tests.cache_fixtures import look_up, machine_of, new_row_cache, opened_device
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import Machine, MachineConfig

MIB = 1 << 20
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with opened_device("cuda-double") as opened:
        assert isinstance(opened, CudaDevice)
        yield opened


def test_what_earlier_work_has_done_shows_in_any_call(device: CudaDevice) -> None:
    machine_of(device).fail("runtime.setDevice", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match=r"cuda:0 has failed .*restart the server"):
        device.compute.record()
    assert device.fault is not None
    with pytest.raises(DeviceError, match="restart the server"):
        device.reserve_staging("test", 4096)


def test_a_launch_that_fails_ends_the_device(device: CudaDevice) -> None:
    cache = new_row_cache(device=device)
    machine_of(device).fail("kernel launch", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match="restart the server"):
        cache.lookup(
            frame := cache.new_frame(), 1, [Output(0, device.new_buffers().rows("r", 1, 4))]
        )
    assert frame.event is None
    assert device.fault is not None
    machine_of(device).run_everything()


def test_memory_that_cannot_be_pinned_is_no_fault_of_the_device(device: CudaDevice) -> None:
    machine_of(device).fail("runtime.hostRegister", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError, match=r"tier: 4096 bytes .* cannot be pinned"):
        device.reserve_host("tier", 4096).commit(0, 4096)
    assert not device.fault
    assert device.host_budget.charges() == {}
    machine_of(device).fail("runtime.hostRegister", ILLEGAL_ADDRESS)
    with pytest.raises(DeviceError, match="restart the server"):
        device.reserve_host("tier", 4096).commit(0, 4096)
    assert device.fault is not None
    assert device.host_budget.charges() == {}


def test_a_plan_that_cannot_be_enqueued_ends_the_slab_and_shows_on_the_device(
    device: CudaDevice,
) -> None:
    """The index has admitted rows by then, whose bytes are nowhere."""
    cache = new_row_cache(device=device)
    with (
        patch.object(device, "execute", side_effect=MemoryError("no memory")),
        pytest.raises(MemoryError),
    ):
        look_up(cache, [1, 2])
    assert device.fault == "a plan could not be executed (no memory); restart the server"
    with (
        patch.object(device, "fault", None),  # the slab itself has not forgotten
        pytest.raises(DeviceError, match="could not be executed: no memory"),
    ):
        look_up(cache, [1])
    assert cache.num_device_rows == 2


def test_memory_that_was_given_back_is_there_for_another_size(device: CudaDevice) -> None:
    """CuPy's pool counts what it keeps for later against its limit."""
    for num_mib in range(1, 5):
        arena = device.reserve("small", num_mib * MIB)
        arena.commit(0, num_mib * MIB)
        arena.close()
    large = device.reserve("large", 15 * MIB)
    large.commit(0, 15 * MIB)
    with pytest.raises(OutOfMemoryError, match="free are 1048576 of 16777216"):
        device.reserve("more", 2 * MIB).commit(0, 2 * MIB)
    large.close()


def test_a_plan_buffer_is_given_back_as_a_whole_where_half_of_it_fails(device: CudaDevice) -> None:
    machine_of(device).fail("runtime.hostRegister", OUT_OF_MEMORY)
    with pytest.raises(OutOfMemoryError, match=r"plans: .* cannot be pinned"):
        device.new_plan_buffer(100)
    assert (device.budget.charges(), device.host_budget.charges()) == ({}, {})
    buffer = device.new_plan_buffer(100)
    assert device.budget.charges() == {"plans": plan_bytes(100)}
    buffer.close()


def test_an_input_takes_the_next_power_of_two_or_what_it_needs(device: CudaDevice) -> None:
    buffers = device.new_buffers()
    buffers.rows("first", 1000, 1000)
    assert device.budget.charges() == {"inputs": 4 * MIB}
    buffers.rows("second", 1100, 2500)  # 11 MB: 16 MiB are not left
    assert device.budget.charges() == {"inputs": 4 * MIB + 11_000_000}
    buffers.close()
    assert device.budget.charges() == {}


def test_outputs_use_few_blocks_again_and_again(device: CudaDevice) -> None:
    source = device.to_device(np.arange(MIB, dtype=np.float32))

    def read(num_values: int) -> None:
        address, dtype = source.data.ptr, np.dtype(np.float32)
        (values,) = device.read_back([(address, (num_values,), dtype)])
        assert values[-1] == num_values - 1

    for num_values in (10, 1000, 10_000, 100_000, MIB, 10, 1000, MIB):
        read(num_values)
    assert device.host_budget.charges() == {"outputs": 4 * MIB}


def test_staging_memory_is_there_for_all_who_ask_at_once() -> None:
    machine = Machine(MachineConfig())
    device = CudaDevice(
        0, max_bytes=16 * MIB, max_host_bytes=0, reserve_fraction=0.0, cupy=cupy_of(machine)
    )
    with ThreadPoolExecutor(4) as pool:
        arenas = list(pool.map(lambda _: device.reserve_staging("test", 65536), range(200)))
    assert device.host_budget.charges() == {"test": 200 * 65536}
    for arena in arenas:
        arena.close()
    device.close()
    machine.check()


def test_only_the_gpu_that_is_asked_for_is_touched() -> None:
    machine = Machine(MachineConfig(num_devices=2))
    cupy: Any = cupy_of(machine)
    look = cupy.cuda.runtime.memGetInfo

    def fail_on_the_other() -> tuple[int, int]:
        if machine.current_device == 1:
            raise cupy.cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY)
        found: tuple[int, int] = look()
        return found

    with patch.object(cupy.cuda.runtime, "memGetInfo", fail_on_the_other):
        report = probe(cupy, 0)
        assert [info.free_bytes > 0 for info in report.devices] == [True, False]
        device = CudaDevice(0, max_bytes=MIB, max_host_bytes=MIB, cupy=cupy)
        with pytest.raises(DeviceError, match="'cuda:1' cannot be used: the driver shows no"):
            CudaDevice(1, max_bytes=MIB, max_host_bytes=MIB, cupy=cupy)
        with patch("cache.cuda.importlib.import_module", return_value=cupy):
            automatic = open_device("auto", max_bytes=MIB, max_host_bytes=MIB)
        assert automatic.name == "cuda:0"
        automatic.close()
    device.close()


def test_a_cupy_that_cannot_be_imported_is_reported() -> None:
    with patch("cache.cuda.importlib.import_module", side_effect=OSError("libcuda is broken")):
        problem = probe().problem
    assert problem is not None
    assert "CuPy cannot be imported (libcuda is broken)" in problem
