"""The kernels launched by `CudaDevice`, on the double and a real GPU, give the bytes of NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.arena import Arena
from cache.cuda import CudaDevice
from cache.device import Output, Pooling, SlabMemory
from cache.kernel_launch import MAX_RESIDENT_THREADS
from cache.plan import TIER_DEVICE
from cache.row_format import RowFormat
from tests.cache_fixtures import DEVICES, opened_device
from tests.kernel_plans import (
    Case,
    OutputSpec,
    Result,
    assert_equal,
    new_rows,
    random_case,
    read_word,
    reference,
)

MAX_BYTES = 1 << 25
SLOT_BYTES = (16, 48, 64, 112, 128, 512, 528, 2048, 4096)
GPUS = tuple(kind for kind in DEVICES if kind != "cpu")


@pytest.fixture(params=[False, True], ids=["release", "debug"])
def is_debug(request: pytest.FixtureRequest) -> bool:
    """Whether the kernels check their plans."""
    return bool(request.param)


@pytest.fixture(params=GPUS)
def kind(request: pytest.FixtureRequest) -> str:
    """The double or the GPU."""
    return str(request.param)


@pytest.fixture
def device(kind: str, is_debug: bool) -> Iterator[CudaDevice]:
    with opened_device(kind, seed=3, max_bytes=MAX_BYTES, is_debug=is_debug) as opened:
        assert isinstance(opened, CudaDevice)
        yield opened


def host_copy(device: CudaDevice, array: NDArray[Any], arenas: list[Arena]) -> NDArray[Any]:
    """The array in pinned memory."""
    arena = device.reserve_host("test", array.nbytes)
    arena.commit(0, arena.max_bytes)
    arenas.append(arena)
    pinned: NDArray[Any] = arena.array(0, array.shape, array.dtype)
    pinned[...] = array
    return pinned


def run_on_gpu(case: Case, device: CudaDevice) -> Result:
    """By `CudaDevice.execute`, in a stream of its own; see `tests.kernel_plans`."""
    arenas: list[Arena] = []
    memory = SlabMemory(
        device=device.to_device(case.device.view(case.row_format.dtype)),
        host=host_copy(device, case.host.view(case.row_format.dtype), arenas),
        default_of=device.to_device(case.default_of),
        row_format=case.row_format,
        device_scales=device.to_device(case.device_scales),
        host_scales=host_copy(device, case.host_scales, arenas),
    )
    buffer = device.new_plan_buffer(max(len(case.reads), len(case.fills), len(case.moves), 1))
    buffer.plan.reads[: len(case.reads)] = case.reads
    columns = (buffer.plan.fill_slot, buffer.plan.fill_from, buffer.plan.spill_slot)
    for column, values in zip(columns, case.fills.T, strict=True):
        column[: len(case.fills)] = values
    buffer.plan = buffer.plan._replace(
        move_from=case.moves[:, 0], move_to=case.moves[:, 1], num_free_fills=case.num_free_fills
    )
    wholes, outputs, first = [], [], 0
    for spec in case.outputs:
        whole, rows = new_rows(spec)
        start = (rows.ctypes.data - whole.ctypes.data) // 4 if rows.size else 0
        wholes.append(device.to_device(whole))
        on_device = wholes[-1][start : start + rows.size].reshape(rows.shape)
        offsets = None if spec.pooling is Pooling.NONE else spec.offsets
        outputs.append(Output(first, on_device, spec.pooling, offsets))
        first += spec.num_positions
    stream = device.new_stream()
    device.execute(stream, buffer, len(case.reads), len(case.fills), memory, outputs)
    stream.record().wait()
    slots, scales, *rows_of = device.read_back(
        [
            (array.data.ptr, array.shape, np.dtype(array.dtype))
            for array in (memory.device, memory.device_scales, *wholes)
        ]
    )
    result = Result(
        slots.view(np.uint8), memory.host.view(np.uint8).copy(), scales,
        memory.host_scales.copy(), tuple(rows_of),
    )  # fmt: skip
    buffer.close()
    for arena in arenas:
        arena.close()
    return result


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda found: found.value)
def test_random_plans_do_what_they_say(
    device: CudaDevice, kind: str, row_format: RowFormat
) -> None:
    num_cases = 8 if kind == "cuda" else 1
    for slot_bytes in SLOT_BYTES:
        for seed in range(num_cases):
            case = random_case(np.random.default_rng([slot_bytes, seed]), row_format, slot_bytes)
            assert_equal(run_on_gpu(case, device), reference(case))


@pytest.mark.parametrize("row_format", RowFormat, ids=lambda found: found.value)
def test_a_large_batch_has_several_rows_of_a_group_in_flight(
    device: CudaDevice, row_format: RowFormat
) -> None:
    case = random_case(np.random.default_rng(1), row_format, 512, max_outputs=0)
    num_reads = MAX_RESIDENT_THREADS // 32 + 77
    sources = np.setdiff1d(np.arange(len(case.device)), [*case.fills[:, 0], *case.moves[:, 1]])
    slots = np.random.default_rng(2).choice(sources, num_reads).tolist()
    reads = np.array([read_word(TIER_DEVICE, slot) for slot in slots])
    dim = 512 // row_format.dtype.itemsize
    case = replace(case, reads=reads, outputs=(OutputSpec(dim, (1,) * num_reads),))
    assert_equal(run_on_gpu(case, device), reference(case))
