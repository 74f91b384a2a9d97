"""What every device must do: arenas, budgets, and plans executed in order."""

from __future__ import annotations

import numpy as np
import pytest

from cache.arena import Arena
from cache.budget import Budget
from cache.device import CpuDevice, DeviceError, Output, SlabMemory, Stream, open_device
from cache.errors import OutOfMemoryError
from cache.plan import TIER_ABSENT, TIER_BITS, TIER_DEVICE, TIER_HOST
from tests.cache_fixtures import LateDevice, new_device

PAGE = 4096


@pytest.fixture(params=[CpuDevice, LateDevice])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    return new_device(request.param)


@pytest.fixture
def arena(device: CpuDevice) -> Arena:
    return device.reserve("slab", 8 * PAGE)


def test_reserved_memory_costs_nothing_until_it_is_committed(
    device: CpuDevice, arena: Arena
) -> None:
    assert (arena.committed_bytes, device.budget.used_bytes) == (0, 0)
    arena.commit(PAGE, 2 * PAGE)
    arena.commit(0, 4 * PAGE)  # two of these are there already
    assert device.budget.charges() == {"slab": 4 * PAGE}
    arena.close()
    assert device.budget.charges() == {}


def test_addresses_and_committed_neighbours_outlive_a_decommit(arena: Arena) -> None:
    arena.commit(0, 8 * PAGE)
    values = arena.array(0, (8, PAGE // 4), np.float32)
    values[:] = 7
    address = values.ctypes.data
    arena.decommit(2 * PAGE, 3 * PAGE)
    arena.commit(2 * PAGE, 3 * PAGE)
    values[2:5] = 8
    assert arena.array(0, (8, PAGE // 4), np.float32).ctypes.data == address
    assert values[:, 0].tolist() == [7, 7, 8, 8, 8, 7, 7, 7]


def test_a_commit_over_the_budget_changes_nothing() -> None:
    budget = Budget("device memory", 5 * PAGE)
    arena = CpuDevice(budget, Budget("host memory", 0)).reserve("slab", 8 * PAGE)
    arena.commit(0, 4 * PAGE)
    with pytest.raises(
        OutOfMemoryError, match=r"slab needs 8192 bytes of device memory, free are 4096 of 20480"
    ):
        arena.commit(4 * PAGE, 2 * PAGE)
    assert budget.used_bytes == arena.committed_bytes == 4 * PAGE


def test_the_last_page_is_charged_for_what_is_used_of_it(device: CpuDevice) -> None:
    arena = device.reserve("odd", PAGE + 100)
    arena.commit(0, PAGE + 100)
    assert device.budget.used_bytes == PAGE + 100
    assert arena.array(0, (PAGE // 4 + 25,), np.float32).nbytes == PAGE + 100
    arena.decommit(PAGE, 100)
    assert device.budget.used_bytes == PAGE


def test_host_memory_has_its_own_budget(device: CpuDevice) -> None:
    device.reserve_host("tier", PAGE).commit(0, PAGE)
    assert (device.budget.used_bytes, device.host_budget.used_bytes) == (0, PAGE)


def execute(
    device: CpuDevice,
    stream: Stream,
    memory: SlabMemory,
    reads: list[tuple[int, int]],
    fills: list[tuple[int, int, int]],
    outputs: list[Output],
) -> None:
    """Enqueue a plan of reads as (tier, slot) and fills as (slot, from, spill)."""
    buffer = device.new_plan_buffer(max_positions=16)
    buffer.plan.reads[: len(reads)] = [slot << TIER_BITS | tier for tier, slot in reads]
    columns = np.array(fills, dtype=np.int64).reshape(-1, 3).T
    buffer.plan.fill_slot[: len(fills)] = columns[0]
    buffer.plan.fill_from[: len(fills)] = columns[1]
    buffer.plan.spill_slot[: len(fills)] = columns[2]
    device.execute(stream, buffer, len(reads), len(fills), memory, outputs)


def test_plans_read_spill_and_fill_in_the_order_in_which_they_were_enqueued(
    device: CpuDevice,
) -> None:
    memory = SlabMemory(
        device=np.array([[1] * 4, [2] * 4], dtype=np.float32),
        host=np.array([[10] * 4, [20] * 4, [30] * 4], dtype=np.float32),
        default_of=np.array([0.5, -0.5], dtype=np.float32),
    )
    stream = device.new_stream()
    first, second = (np.zeros((n, 3), dtype=np.float32) for n in (4, 3))
    reads = [(TIER_DEVICE, 1), (TIER_HOST, 1), (TIER_ABSENT, 1), (TIER_HOST, 1)]
    outputs = [Output(0, first[:1]), Output(1, first[1:])]
    execute(device, stream, memory, reads, [(0, 1, 2)], outputs)
    reads = [(TIER_DEVICE, 0), (TIER_HOST, 2), (TIER_DEVICE, 1)]
    execute(device, stream, memory, reads, [], [Output(0, second)])
    stream.record().wait()
    assert first.tolist() == [[2] * 3, [20] * 3, [-0.5] * 3, [20] * 3]
    assert second.tolist() == [[20] * 3, [1] * 3, [2] * 3]


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(DeviceError, match=r"'cuda:0' cannot be used: .* devices cpu, auto"):
        open_device("cuda:0", max_bytes=1, max_host_bytes=1)


def test_a_part_of_the_device_memory_is_kept_free() -> None:
    device = open_device("auto", max_bytes=1000, max_host_bytes=500, reserve_fraction=0.2)
    assert repr(device.budget) == "<Budget 'device memory' used=0 of 800 bytes>"
    assert device.name == "cpu"
