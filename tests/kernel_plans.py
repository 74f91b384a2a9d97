"""Random plans of every kind, what they must do in plain NumPy, and ways to run them.

A `Case` is memory and a plan; it is never changed. `reference`, `run_on_cpu` and `run_on_shim` work
on copies and return all bytes that a plan may change, with the canaries around the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cache.budget import Budget
from cache.device import CpuDevice, CpuPlanBuffer, Output, Pooling, SlabMemory
from cache.kernel_launch import BLOCK_THREADS, grid_blocks
from cache.plan import (
    TIER_ABSENT,
    TIER_BITS,
    TIER_DEVICE,
    TIER_FILLED,
    TIER_HOST,
    TIER_MASK,
    check_plan,
    closed_plan,
)
from cache.row_format import RowFormat
from tests.cuda_shim import Shim

Words = NDArray[np.int64]
Bytes = NDArray[np.uint8]

CANARY = np.float32(-12345.678)
_GUARD = 24  # floats before and after the rows of an output
_QUIET_NAN = np.uint32(0x7FC00000).view(np.float32)


@dataclass(frozen=True)
class OutputSpec:
    """An output without its memory; bag b has `bag_sizes[b]` positions, 1 without pooling.

    With a pooling, `num_skipped` positions before the first bag's are not read.
    """

    dim: int
    bag_sizes: tuple[int, ...]
    pooling: Pooling = Pooling.NONE
    shift: int = 0  # floats by which the rows are off an address of 16 bytes
    num_skipped: int = 0

    @property
    def num_positions(self) -> int:
        return self.num_skipped + sum(self.bag_sizes)

    @property
    def offsets(self) -> Words:
        return np.cumsum([self.num_skipped, *self.bag_sizes], dtype=np.int64)


@dataclass(frozen=True)
class Case:
    """Slots are uint8 [num_slots, slot_bytes]; the plan's arrays are as in `cache.plan.Plan`."""

    row_format: RowFormat
    device: Bytes
    host: Bytes
    device_scales: NDArray[np.float32]
    host_scales: NDArray[np.float32]
    default_of: NDArray[np.float32]
    reads: Words
    fills: Words  # [n, 3]: slot, from, spill or -1
    moves: Words  # [n, 2]: from, to
    outputs: tuple[OutputSpec, ...]

    @property
    def slot_bytes(self) -> int:
        return int(self.device.shape[1])

    @property
    def num_free_fills(self) -> int:
        """The fills that no read names; they are the first."""
        return len(self.fills) - int((self.reads & TIER_MASK == TIER_FILLED).sum())


@dataclass(frozen=True)
class Result:
    """Everything that a plan can have changed."""

    device: Bytes
    host: Bytes
    device_scales: NDArray[np.float32]
    host_scales: NDArray[np.float32]
    outputs: tuple[NDArray[np.float32], ...]  # with what lies around the rows


def assert_equal(one: Result, other: Result) -> None:
    """Assert that all bytes are equal, those of NaNs too."""
    arrays_of = [
        (result.device, result.host, result.device_scales, result.host_scales, *result.outputs)
        for result in (one, other)
    ]
    names = ["device", "host", "device scales", "host scales"]
    names += [f"output {index}" for index in range(len(one.outputs))]
    for name, mine, others in zip(names, *arrays_of, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint8), others.view(np.uint8), err_msg=name)


# ---- Making cases


def read_word(tier: int, slot: int) -> int:
    return slot << TIER_BITS | tier


def random_case(
    random: np.random.Generator,
    row_format: RowFormat,
    slot_bytes: int,
    *,
    max_outputs: int = 4,
    max_units: int = 40,
    max_copies: int = 12,
) -> Case:
    """A plan that keeps the rules, with repeats, absent rows, and every operation that it draws."""
    num_fills, num_moves = random.integers(0, max_copies + 1, 2).tolist()
    num_sources = int(random.integers(1, 12))
    num_device = num_sources + num_fills + num_moves
    device_slots = random.permutation(num_device)
    sources, targets = device_slots[:num_sources], device_slots[num_sources:]
    num_host_sources = int(random.integers(1, 12))
    host_slots = random.permutation(num_host_sources + num_fills)
    host_sources, spills = host_slots[:num_host_sources], host_slots[num_host_sources:]
    spills = np.where(random.random(num_fills) < 0.6, spills, -1)
    fills = np.stack([targets[:num_fills], random.choice(host_sources, num_fills), spills], axis=1)
    moves = np.stack([random.choice(sources, num_moves), targets[num_fills:]], axis=1)
    num_outputs = int(random.integers(0, max_outputs + 1))
    outputs = tuple(_random_output(random, row_format, slot_bytes, max_units)
                    for _ in range(num_outputs))  # fmt: skip
    num_reads = sum(output.num_positions for output in outputs)
    tiers = random.choice([TIER_DEVICE, TIER_HOST, TIER_ABSENT], num_reads, p=[0.5, 0.4, 0.1])
    slots = np.select(
        [tiers == TIER_DEVICE, tiers == TIER_HOST],
        [random.choice(sources, num_reads), random.choice(host_sources, num_reads)],
        random.integers(0, 3, num_reads),
    )
    reads = (slots << TIER_BITS | tiers).astype(np.int64)
    is_read = _is_read(outputs)
    num_named = min(int(random.integers(0, num_fills + 1)), int(is_read.sum()))
    named = np.arange(num_fills - num_named, num_fills)
    reads[random.choice(np.flatnonzero(is_read), num_named, replace=False)] = (
        named << TIER_BITS | TIER_FILLED
    )
    return Case(
        row_format,
        random_slots(random, row_format, num_device, slot_bytes),
        random_slots(random, row_format, len(host_slots), slot_bytes),
        _random_scales(random, num_device),
        _random_scales(random, len(host_slots)),
        np.array([0.0, -0.37, np.nan], dtype=np.float32),
        reads,
        fills.astype(np.int64),
        moves.astype(np.int64),
        outputs,
    )


def _is_read(outputs: Sequence[OutputSpec]) -> NDArray[np.bool_]:
    """Of each position; those that are skipped are not."""
    parts = [
        np.arange(output.num_positions) >= (output.num_skipped if output.pooling else 0)
        for output in outputs
    ]
    return np.concatenate([np.zeros(0, dtype=np.bool_), *parts])


def _random_output(
    random: np.random.Generator, row_format: RowFormat, slot_bytes: int, max_units: int
) -> OutputSpec:
    max_dim = slot_bytes // row_format.dtype.itemsize
    dim = random.choice([max_dim, max_dim // 2 or 1, int(random.integers(1, max_dim + 1))])
    num_units = int(random.integers(0, max_units + 1))
    pooling = Pooling(int(random.integers(0, 3)))
    shift = int(random.integers(0, 2))
    if pooling is Pooling.NONE:
        return OutputSpec(int(dim), (1,) * num_units, pooling, shift)
    sizes = random.choice([0, 1, 2, 3, 4, 5, 9], num_units).tolist()
    return OutputSpec(int(dim), tuple(sizes), pooling, shift, int(random.integers(0, 3)))


def random_slots(
    random: np.random.Generator, row_format: RowFormat, num_slots: int, slot_bytes: int
) -> Bytes:
    """Ordinary values of all magnitudes, and some slots of random bits: infinities and NaNs."""
    bits = random.integers(0, 256, (num_slots, slot_bytes), dtype=np.uint8)
    if row_format is RowFormat.INT8:
        return bits
    shape = (num_slots, slot_bytes // row_format.dtype.itemsize)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-5, 4, shape)
    dtypes: dict[RowFormat, Any] = {
        RowFormat.FLOAT32: np.float32,
        RowFormat.FLOAT16: np.float16,
        RowFormat.BFLOAT16: ml_dtypes.bfloat16,
    }
    ordinary = values.astype(dtypes[row_format]).view(np.uint8)
    return np.where(random.random((num_slots, 1)) < 0.2, bits, ordinary)


def _random_scales(random: np.random.Generator, num_slots: int) -> NDArray[np.float32]:
    scales = random.standard_normal(num_slots).astype(np.float32)
    odd = np.array([np.inf, np.nan, 1e-42, 0.0], dtype=np.float32)
    return np.where(random.random(num_slots) < 0.1, random.choice(odd, num_slots), scales)


def empty_case(row_format: RowFormat = RowFormat.FLOAT32, slot_bytes: int = 64) -> Case:
    """Memory of eight slots a tier, and a plan that does nothing."""
    random = np.random.default_rng(5)
    return Case(
        row_format,
        random_slots(random, row_format, 8, slot_bytes),
        random_slots(random, row_format, 8, slot_bytes),
        random.standard_normal(8).astype(np.float32),
        random.standard_normal(8).astype(np.float32),
        default_of=np.array([0.5, -2.0], dtype=np.float32),
        reads=np.zeros(0, np.int64),
        fills=np.zeros((0, 3), np.int64),
        moves=np.zeros((0, 2), np.int64),
        outputs=(),
    )


def words(*rows: int | tuple[int, ...]) -> Words:
    """Reads, fills or moves of a plan."""
    return np.array(rows, dtype=np.int64)


# ---- What a plan must do


def decode(case: Case, slot: Bytes, scale: np.float32, dim: int) -> NDArray[np.float32]:
    """The first `dim` values of a slot's bytes as float32, by NumPy and ml_dtypes."""
    stored = slot.view(case.row_format.dtype)[:dim]
    if case.row_format is RowFormat.FLOAT32:
        return stored.astype(np.float32)
    if case.row_format is RowFormat.INT8:
        with np.errstate(all="ignore"):
            return settled(stored.astype(np.float32) * scale)
    is_half = case.row_format is RowFormat.FLOAT16
    halves = stored.view(np.float16 if is_half else ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        values = np.asarray(halves.astype(np.float32))
    # A NaN keeps its sign and payload; a conversion by hardware may change it.
    bits = stored.astype(np.uint32)
    nans = (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13 if is_half else bits << 16
    return np.where(np.isnan(values), nans.view(np.float32), values)


def settled(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values with all NaNs the same."""
    return np.where(np.isnan(values), _QUIET_NAN, values)


def reference(case: Case) -> Result:
    """All results from the memory as it was before the plan."""
    device, host = case.device.copy(), case.host.copy()
    device_scales, host_scales = case.device_scales.copy(), case.host_scales.copy()
    has_scales = case.row_format.has_scales
    for slot, source, spill in case.fills.tolist():
        if spill >= 0:
            host[spill] = case.device[slot]
        device[slot] = case.host[source]
        if has_scales:
            if spill >= 0:
                host_scales[spill] = case.device_scales[slot]
            device_scales[slot] = case.host_scales[source]
    for source, target in case.moves.tolist():
        device[target] = case.device[source]
        if has_scales:
            device_scales[target] = case.device_scales[source]
    buffers = []
    first = 0
    for output in case.outputs:
        buffer, rows = new_rows(output)
        for bag, (begin, end) in enumerate(zip(output.offsets, output.offsets[1:], strict=False)):
            rows[bag] = _pooled(case, output, case.reads[first + begin : first + end])
        first += output.num_positions
        buffers.append(buffer)
    return Result(device, host, device_scales, host_scales, tuple(buffers))


def _pooled(case: Case, output: OutputSpec, reads: Words) -> NDArray[np.float32]:
    rows = [_row(case, read & TIER_MASK, read >> TIER_BITS, output.dim) for read in reads.tolist()]
    if output.pooling is Pooling.NONE:
        return rows[0]
    total = np.zeros(output.dim, dtype=np.float32)
    with np.errstate(all="ignore"):
        for row in rows:
            total = total + row
        if output.pooling is Pooling.MEAN and rows:
            total = total / np.float32(len(rows))
    return settled(total)


def _row(case: Case, tier: int, slot: int, dim: int) -> NDArray[np.float32]:
    if tier == TIER_ABSENT:
        return np.full(dim, case.default_of[slot], dtype=np.float32)
    if tier == TIER_DEVICE:
        return decode(case, case.device[slot], case.device_scales[slot], dim)
    if tier == TIER_FILLED:
        slot = int(case.fills[slot, 1])
    return decode(case, case.host[slot], case.host_scales[slot], dim)


# ---- Running


def new_rows(output: OutputSpec) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """A buffer full of canaries, and the rows [n, dim] in it."""
    num_rows = len(output.bag_sizes)
    size = num_rows * output.dim
    buffer = np.full(_GUARD + output.shift + size + _GUARD, CANARY, dtype=np.float32)
    start = _GUARD + output.shift
    return buffer, buffer[start : start + size].reshape(num_rows, output.dim)


class _Shifted:
    """What NumPy makes an array of that begins `num_bytes` before `array`; only its end is real."""

    def __init__(self, array: NDArray[Any], num_rows: int) -> None:
        address = array.ctypes.data - num_rows * array.strides[0]
        self.__array_interface__ = {
            "data": (address, False), "shape": (num_rows + len(array), *array.shape[1:]),
            "typestr": array.dtype.str, "version": 3,
        }  # fmt: skip


def shifted(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """`array` as the last rows of a larger one, whose first `num_rows` rows do not exist."""
    return np.asarray(_Shifted(array, num_rows)) if num_rows else array


def run_on_cpu(case: Case, slot_shift: int = 0) -> Result:
    """By `CpuDevice.execute`; `slot_shift` puts slots, and tables, at such large numbers."""
    device, host = case.device.copy(), case.host.copy()
    scales = (case.device_scales.copy(), case.host_scales.copy())
    dtype = case.row_format.dtype
    has_scales = case.row_format.has_scales
    memory = SlabMemory(
        shifted(device.view(dtype), slot_shift),
        shifted(host.view(dtype), slot_shift),
        shifted(case.default_of, slot_shift),
        case.row_format,
        shifted(scales[0], slot_shift) if has_scales else None,
        shifted(scales[1], slot_shift) if has_scales else None,
    )
    moved = _with_slots_shifted(case, slot_shift)
    buffer = CpuPlanBuffer(max(len(case.reads), len(case.fills), 1))
    buffer.plan.reads[: len(case.reads)] = moved.reads
    columns = (buffer.plan.fill_slot, buffer.plan.fill_from, buffer.plan.spill_slot)
    for column, values in zip(columns, moved.fills.T, strict=True):
        column[: len(case.fills)] = values
    buffer.plan = buffer.plan._replace(
        move_from=np.ascontiguousarray(moved.moves[:, 0]),
        move_to=np.ascontiguousarray(moved.moves[:, 1]),
        num_free_fills=case.num_free_fills,
    )
    buffers, outputs, first = [], [], 0
    for spec in case.outputs:
        whole, rows = new_rows(spec)
        buffers.append(whole)
        is_pooled = spec.pooling is not Pooling.NONE
        outputs.append(Output(first, rows, spec.pooling, spec.offsets if is_pooled else None))
        first += spec.num_positions
    cpu = CpuDevice(Budget("device memory", 0), Budget("host memory", 0))
    check_plan(closed_plan(buffer.plan, len(case.reads), len(case.fills)))
    cpu.execute(cpu.new_stream(), buffer, len(case.reads), len(case.fills), memory, outputs)
    return Result(device, host, *scales, tuple(buffers))


def _with_slots_shifted(case: Case, shift: int) -> Case:
    is_spill = case.fills[:, 2:] >= 0
    all_shifted = case.fills + shift
    return replace(
        case,
        reads=np.where(
            case.reads & TIER_MASK == TIER_FILLED, case.reads, case.reads + (shift << TIER_BITS)
        ),
        fills=np.hstack([all_shifted[:, :2], np.where(is_spill, all_shifted[:, 2:], -1)]),
        moves=case.moves + shift,
    )


def run_on_shim(
    case: Case,
    shim: Shim,
    seed: int = 0,
    *,
    slot_shift: int = 0,
    word_shift: int = 0,
    max_resident_threads: int = 1 << 17,
) -> Result:
    """By the CUDA source; the shifts put slots and words at large numbers. Raises `KernelTrap`."""
    device, host = case.device.copy(), case.host.copy()
    scales = (case.device_scales.copy(), case.host_scales.copy())
    marks = [np.zeros(len(slots), dtype=np.uint32) for slots in (device, host)]
    buffers = [new_rows(output) for output in case.outputs]
    words, sections = _words(_with_slots_shifted(case, slot_shift), buffers, word_shift)
    slot_bytes = case.slot_bytes
    has_scales = case.row_format.has_scales
    arguments = [
        words.ctypes.data - 8 * word_shift,
        *sections,
        _base(device, slot_shift), _base(host, slot_shift), slot_bytes,
        *((_base(array, slot_shift) if has_scales else 0) for array in scales),
        _base(case.default_of, slot_shift),
        *(_base(array, slot_shift) for array in marks),
    ]  # fmt: skip
    num_units = sum(len(output.bag_sizes) for output in case.outputs)
    num_copies = case.num_free_fills + len(case.moves)
    blocks = grid_blocks(num_units, num_copies, slot_bytes, max_resident_threads)
    shim.launch(f"execute_{case.row_format.value}", blocks, BLOCK_THREADS, arguments, seed)
    return Result(device, host, *scales, tuple(whole for whole, _ in buffers))


def _base(array: NDArray[Any], shift: int) -> int:
    return int(array.ctypes.data) - shift * array.strides[0]


def _words(
    case: Case, buffers: Sequence[tuple[Any, NDArray[np.float32]]], shift: int
) -> tuple[Words, list[int]]:
    """The plan as the kernels read it, and the parameters about it from `num_outputs` on."""
    parts = [case.reads, case.fills.ravel(), case.moves.ravel()]
    offsets_at, at = [], shift + sum(map(len, parts))
    for output in case.outputs:
        is_pooled = output.pooling is not Pooling.NONE
        offsets_at.append(at if is_pooled else -1)
        if is_pooled:
            parts.append(output.offsets)
            at += len(output.offsets)
    descriptors = []
    unit, first = 0, shift
    for output, (_, rows), offset_at in zip(case.outputs, buffers, offsets_at, strict=True):
        address = int(rows.ctypes.data)
        descriptors += [unit, first, address, output.dim, int(output.pooling), offset_at]
        unit += len(output.bag_sizes)
        first += output.num_positions
    parts.append(np.array(descriptors, dtype=np.int64))
    fills_at = shift + len(case.reads)
    moves_at = fills_at + case.fills.size
    sections = [
        len(case.outputs),
        at,
        unit,
        fills_at,
        case.num_free_fills,
        moves_at,
        len(case.moves),
    ]
    return np.concatenate(parts), sections
