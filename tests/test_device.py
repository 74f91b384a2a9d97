"""What every device must do: arenas, budgets, inputs, and plans executed in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.arena import Arena
from cache.cuda import CudaDevice, probe
from cache.device import Device, DeviceError, Output, Pooling, SlabMemory, Stream, open_device
from cache.errors import OutOfMemoryError
from cache.plan import TIER_ABSENT, TIER_BITS, TIER_DEVICE, TIER_FILLED, TIER_HOST
from cache.row_format import RowFormat
from tests.cache_fixtures import DEVICES, Rows, machine_of, opened_device, to_host
from tests.cuda_double import machine as double
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import Machine, MachineConfig

PAGE = 4096


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened_device(request.param) as opened:
        yield opened


@pytest.fixture
def cpu_arena() -> Arena:
    with opened_device("cpu") as device:
        return device.reserve("slab", 8 * PAGE)


def test_reserved_memory_costs_nothing_until_it_is_committed(device: Device) -> None:
    for arena, budget in (
        (device.reserve("slab", 8 * PAGE), device.budget),
        (device.reserve_host("slab", 8 * PAGE), device.host_budget),
    ):
        assert (arena.committed_bytes, budget.used_bytes) == (0, 0)
        arena.commit(0, 8 * PAGE)
        arena.commit(0, 8 * PAGE)  # it is there already
        assert arena.committed_bytes == 8 * PAGE
        assert budget.charges() == {"slab": 8 * PAGE}
        arena.decommit(0, 8 * PAGE)
        arena.close()
        arena.close()
        assert budget.charges() == {}


def test_pages_are_committed_one_by_one_where_the_arena_has_several(cpu_arena: Arena) -> None:
    assert cpu_arena.page_bytes == PAGE
    cpu_arena.commit(PAGE, 2 * PAGE)
    cpu_arena.commit(0, 4 * PAGE)  # two of these are there already
    assert cpu_arena.committed_bytes == 4 * PAGE


def test_addresses_and_committed_neighbours_outlive_a_decommit(cpu_arena: Arena) -> None:
    cpu_arena.commit(0, 8 * PAGE)
    values = cpu_arena.array(0, (8, PAGE // 4), np.float32)
    values[:] = 7
    address = values.ctypes.data
    cpu_arena.decommit(2 * PAGE, 3 * PAGE)
    cpu_arena.commit(2 * PAGE, 3 * PAGE)
    values[2:5] = 8
    assert cpu_arena.array(0, (8, PAGE // 4), np.float32).ctypes.data == address
    assert values[:, 0].tolist() == [7, 7, 8, 8, 8, 7, 7, 7]


def test_a_commit_over_the_budget_changes_nothing(device: Device) -> None:
    device.budget.max_bytes = 5 * PAGE
    first, second = device.reserve("slab", 4 * PAGE), device.reserve("slab", 2 * PAGE)
    first.commit(0, 4 * PAGE)
    with pytest.raises(
        OutOfMemoryError, match=r"slab needs 8192 bytes of device memory, free are 4096 of 20480"
    ):
        second.commit(0, 2 * PAGE)
    assert device.budget.used_bytes == first.committed_bytes == 4 * PAGE
    assert second.committed_bytes == 0


def test_the_last_page_is_charged_for_what_is_used_of_it(device: Device) -> None:
    arena = device.reserve("odd", PAGE + 100)
    arena.commit(0, PAGE + 100)
    assert device.budget.used_bytes == PAGE + 100
    assert arena.array(0, (PAGE // 4 + 25,), np.float32).nbytes == PAGE + 100
    assert arena.array(PAGE, (25,), np.float32).shape == (25,)


def test_host_memory_has_its_own_budget(device: Device) -> None:
    arena = device.reserve_host("tier", PAGE)
    arena.commit(0, PAGE)
    assert (device.budget.used_bytes, device.host_budget.used_bytes) == (0, PAGE)
    values = arena.array(0, (PAGE,), np.uint8)  # of the host, whatever the device is
    values[:] = 7
    assert values.sum() == 7 * PAGE


def test_an_arena_of_nothing_has_an_array_of_nothing(device: Device) -> None:
    for arena in (device.reserve("none", 0), device.reserve_host("none", 0)):
        assert arena.array(0, (0, 4), np.float32).shape == (0, 4)
        arena.close()


def test_a_small_array_is_copied_to_the_device(device: Device) -> None:
    array = np.arange(7, dtype=np.float32)[::2]
    copied = device.to_device(array)
    array[:] = 0
    assert to_host(device, copied).tolist() == [0, 2, 4, 6]


def test_parts_are_joined_where_the_model_reads_them(device: Device) -> None:
    buffers = device.new_buffers()
    for num_parts in (1, 3, 2):  # the memory of the first batch grows, and is used again
        parts = [np.full((2, 3), part, dtype=np.int64) for part in range(num_parts)]
        joined = buffers.put("keys", parts)
        copied = buffers.copied()
        if num_parts > 1:
            for part in parts:
                part[:] = -1  # they may change after the call
        device.compute.wait_for(copied)
        expected = np.repeat(np.arange(num_parts), 2)
        assert to_host(device, joined).tolist() == [[number] * 3 for number in expected]
    buffers.close()
    assert device.budget.used_bytes == 0


def test_objects_stay_on_the_host(device: Device) -> None:
    words = np.array([b"a", b"bc"], dtype=np.object_)
    joined = device.new_buffers().put("words", [words, words])
    assert isinstance(joined, np.ndarray)
    assert joined.tolist() == [b"a", b"bc", b"a", b"bc"]


def test_a_single_value_and_an_empty_batch_are_inputs_too(device: Device) -> None:
    buffers = device.new_buffers()
    single = buffers.put("single", [np.array(3.5, dtype=np.float32)])
    empty = buffers.put("empty", [np.zeros((0, 4), dtype=np.float32)])
    device.compute.wait_for(buffers.copied())
    assert to_host(device, single).tolist() == 3.5
    assert to_host(device, empty).shape == (0, 4)


def encoded(values: NDArray[np.float32], row_format: RowFormat) -> NDArray[Any]:
    """Rows of a format; int8 rows have the scale 0.5."""
    if row_format is RowFormat.FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    if row_format is RowFormat.BFLOAT16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return (values * 2).astype(np.int8) if row_format is RowFormat.INT8 else values


def slab(
    device: Device,
    near: list[float],
    far: list[float],
    row_format: RowFormat = RowFormat.FLOAT32,
) -> SlabMemory:
    """A slab of rows of 16 bytes, of equal values."""
    width = 16 // row_format.dtype.itemsize
    arena, scales = device.reserve_host("slab", 16 * len(far)), device.reserve_host("scales", 64)
    arena.commit(0, 16 * len(far))
    scales.commit(0, 64)
    host = arena.array(0, (len(far), width), row_format.dtype)
    host[:] = encoded(np.repeat(np.array(far, np.float32)[:, None], width, axis=1), row_format)
    host_scales = scales.array(0, (len(far),), np.float32)
    host_scales[:] = 0.5
    rows = np.repeat(np.array(near, np.float32)[:, None], width, axis=1)
    return SlabMemory(
        device=device.to_device(encoded(rows, row_format)),
        host=host,
        default_of=device.to_device(np.array([0.5, -0.5], dtype=np.float32)),
        row_format=row_format,
        device_scales=device.to_device(np.full(len(near), 0.5, np.float32)),
        host_scales=host_scales,
    )


def execute(
    device: Device,
    stream: Stream,
    memory: SlabMemory,
    reads: list[tuple[int, int]],
    fills: list[tuple[int, int, int]],
    outputs: list[Output],
    moves: Sequence[tuple[int, int]] = (),
) -> None:
    """Execute a plan of reads as (tier, slot), fills as (slot, from, spill), moves as (from, to).

    Fills that no read names come first.
    Blocks until it is done.
    """
    buffer = device.new_plan_buffer(max_positions=16)
    buffer.plan.reads[: len(reads)] = [slot << TIER_BITS | tier for tier, slot in reads]
    columns = np.array(fills, dtype=np.int64).reshape(-1, 3).T
    buffer.plan.fill_slot[: len(fills)] = columns[0]
    buffer.plan.fill_from[: len(fills)] = columns[1]
    buffer.plan.spill_slot[: len(fills)] = columns[2]
    move_from, move_to = np.array(moves, dtype=np.int64).reshape(-1, 2).T.copy()
    buffer.plan = buffer.plan._replace(
        move_from=move_from, move_to=move_to,
        num_free_fills=len(fills) - sum(tier == TIER_FILLED for tier, _ in reads),
    )  # fmt: skip
    device.execute(stream, buffer, len(reads), len(fills), memory, outputs)
    stream.record().wait()
    buffer.close()


def test_plans_read_spill_and_fill_in_the_order_in_which_they_were_enqueued(
    device: Device,
) -> None:
    memory = slab(device, [1, 2], [10, 20, 30])
    stream = device.new_stream()
    first, second = Rows(device, 4, 3), Rows(device, 3, 3)
    reads = [(TIER_DEVICE, 1), (TIER_HOST, 1), (TIER_ABSENT, 1), (TIER_FILLED, 0)]
    outputs = [Output(0, first.array[:1]), Output(1, first.array[1:])]
    execute(device, stream, memory, reads, [(0, 1, 2)], outputs)
    reads = [(TIER_DEVICE, 0), (TIER_HOST, 2), (TIER_DEVICE, 1)]
    execute(device, stream, memory, reads, [], [Output(0, second.array)])
    assert first.values().tolist() == [[2] * 3, [20] * 3, [-0.5] * 3, [20] * 3]
    assert second.values().tolist() == [[20] * 3, [1] * 3, [2] * 3]


@pytest.mark.parametrize("row_format", RowFormat)
def test_every_row_format_is_read_pooled_filled_spilled_and_moved(
    device: Device, row_format: RowFormat
) -> None:
    memory = slab(device, [1, 2, 3, 4], [10, 20, 30], row_format)
    stream = device.new_stream()
    single, sums, means = Rows(device, 2, 3), Rows(device, 3, 4), Rows(device, 2, 2)
    reads = [
        (TIER_DEVICE, 0), (TIER_HOST, 1),  # single
        (TIER_DEVICE, 0), (TIER_HOST, 0), (TIER_ABSENT, 1), (TIER_DEVICE, 1),  # sums
        (TIER_DEVICE, 1), (TIER_ABSENT, 0), (TIER_HOST, 1), (TIER_HOST, 1),  # means
    ]  # fmt: skip
    outputs = [
        Output(0, single.array),
        Output(2, sums.array, Pooling.SUM, np.array([0, 3, 3, 4])),
        Output(6, means.array, Pooling.MEAN, np.array([0, 2, 4])),
    ]
    execute(device, stream, memory, reads, [(2, 0, 2)], outputs, moves=[(1, 3)])
    assert single.values().tolist() == [[1] * 3, [20] * 3]
    assert sums.values().tolist() == [[10.5] * 4, [0] * 4, [2] * 4]
    assert means.values().tolist() == [[1.25] * 2, [20] * 2]
    after = Rows(device, 3, 4)
    reads = [(TIER_DEVICE, 2), (TIER_DEVICE, 3), (TIER_HOST, 2)]
    execute(device, stream, memory, reads, [], [Output(0, after.array)])
    assert after.values().tolist() == [[10] * 4, [2] * 4, [3] * 4]


def test_rows_can_be_written_to_host_memory(device: Device) -> None:
    buffers = device.new_buffers(is_on_host=True)
    out = buffers.rows("rows", 2, 4)
    assert isinstance(out, np.ndarray)
    memory = slab(device, [1, 2], [10, 20])
    execute(
        device,
        device.new_stream(),
        memory,
        [(TIER_DEVICE, 1), (TIER_HOST, 0)],
        [],
        [Output(0, out)],
    )
    assert out.tolist() == [[2] * 4, [10] * 4]


def test_a_plan_of_nothing_is_done(device: Device) -> None:
    memory, rows = slab(device, [1], [2]), Rows(device, 0)
    execute(device, device.new_stream(), memory, [], [], [Output(0, rows.array)])
    assert rows.values().shape == (0, 4)


def test_a_part_of_the_device_memory_is_kept_free() -> None:
    device = open_device("cpu", max_bytes=1000, max_host_bytes=500, reserve_fraction=0.2)
    assert repr(device.budget) == "<Budget 'device memory' used=0 of 800 bytes>"
    assert device.name == "cpu"


def test_a_device_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"'gpu' does not exist: expected cpu, cuda:N or auto"):
        open_device("gpu", max_bytes=1, max_host_bytes=1)


# What is wrong with a GPU is said with what to do.


def open_double(config: MachineConfig, max_bytes: int | None = 1 << 20, index: int = 0) -> Any:
    cupy = cupy_of(Machine(config))
    return CudaDevice(index, max_bytes=max_bytes, max_host_bytes=1 << 20, cupy=cupy)


@pytest.mark.parametrize(
    ("config", "index", "fault"),
    [
        (MachineConfig(driver_version=0), 0, "no NVIDIA driver; install one .* CUDA 13.0"),
        (MachineConfig(num_devices=0), 0, "shows no device; see CUDA_VISIBLE_DEVICES"),
        (MachineConfig(num_devices=2), 2, "'cuda:2' does not exist; there are cuda:0, cuda:1"),
        (MachineConfig(driver_version=12080), 0, "supports up to 12.8; update the driver, or"),
        (MachineConfig(total_bytes=1000), 0, "1000 of 1000 bytes free.*lower --device-memory"),
        (MachineConfig(can_use_host_pointers=False), 0, "cannot read pinned host memory"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_refused(
    config: MachineConfig, index: int, fault: str
) -> None:
    with pytest.raises(DeviceError, match=fault):
        open_double(config, index=index)


def test_a_driver_that_fails_is_reported_and_not_raised() -> None:
    machine = Machine(MachineConfig())
    machine.fail("runtime.getDeviceCount", double.NO_DEVICE)
    report = probe(cupy_of(machine))
    assert report.devices == ()
    assert "cudaErrorNoDevice: no CUDA-capable device is detected" in str(report.problem)


def test_all_that_is_free_is_the_memory_of_the_device() -> None:
    device = open_double(MachineConfig(total_bytes=1 << 20, other_bytes=1 << 18), max_bytes=None)
    assert device.max_bytes == 3 << 18


def test_memory_that_the_gpu_has_not_is_refused() -> None:
    with opened_device("cuda-double") as device:
        arena = device.reserve("slab", PAGE)
        machine_of(device).fail("runtime.hostRegister", double.MEMORY_ALLOCATION)
        pinned = device.reserve_host("tier", PAGE)
        with pytest.raises(OutOfMemoryError, match=r"4096 bytes .* cannot be pinned .*out of mem"):
            pinned.commit(0, PAGE)
        assert device.host_budget.used_bytes == 0
        pinned.commit(0, PAGE)
        device.budget.max_bytes = 1 << 30
        large = device.reserve("large", (1 << 24) + 1)
        with pytest.raises(OutOfMemoryError, match="cuda:0 has no 16777217 bytes left"):
            large.commit(0, (1 << 24) + 1)
        assert device.budget.used_bytes == 0
        arena.commit(0, PAGE)


def test_a_kernel_that_fails_ends_the_device() -> None:
    with opened_device("cuda-double") as device:
        machine_of(device).fail("kernel", double.LAUNCH_FAILURE)
        memory, rows = slab(device, [1], [2]), Rows(device, 1)
        with pytest.raises(DeviceError, match=r"failed \(cudaErrorLaunchFailure.*restart"):
            execute(
                device, device.new_stream(), memory, [(TIER_DEVICE, 0)], [], [Output(0, rows.array)]
            )
        assert device.fault is not None
        with pytest.raises(DeviceError, match="restart the server"):
            device.new_stream()


def test_each_device_of_two_is_used_by_threads_whose_current_one_is_the_other() -> None:
    machine = Machine(MachineConfig(num_devices=2))
    devices = [
        CudaDevice(
            index, max_bytes=1 << 20, max_host_bytes=1 << 20, cupy=cupy_of(machine), is_debug=True
        )
        for index in (0, 1)
    ]
    slabs = [slab(device, [number + 1], [9]) for number, device in enumerate(devices)]
    rows = [Rows(device, 1) for device in devices]
    for number, device in enumerate(devices):
        machine.current_device = 1 - number
        outputs = [Output(0, rows[number].array)]
        execute(device, device.new_stream(), slabs[number], [(TIER_DEVICE, 0)], [], outputs)
    for number in (0, 1):
        machine.current_device = 1 - number
        assert rows[number].values().tolist() == [[number + 1] * 4]
    machine.check()
