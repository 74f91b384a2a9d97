"""The operations of a plan on the CPU, compiled: read, pool, spill, fill and move.

They give the bytes that `kernels.cu` gives. What nothing uses is not compiled: a slab of float32
without pooling needs `read_rows` and `spill_and_fill`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.jit import compiled, inlined
from cache.plan import TIER_ABSENT, TIER_BITS, TIER_DEVICE, TIER_FILLED, TIER_HOST, TIER_MASK, Plan
from cache.row_format import RowFormat

Slots = NDArray[Any]  # [num_slots, slot_bytes / itemsize], of the dtype of a row format
Rows = NDArray[np.float32]  # [n, dim]; as slots [num_slots, slot_bytes / 4]
Scales = NDArray[np.float32]  # [num_slots]
Words = NDArray[np.int64]


@compiled
def spill_and_fill(plan: Plan, device: Slots, host: Slots) -> None:
    """Copy each filled slot's old bytes to its spill slot, then its new bytes from the host."""
    width = device.shape[1]
    for entry in range(len(plan.fill_slot)):
        slot = plan.fill_slot[entry]
        spill_slot = plan.spill_slot[entry]
        source = plan.fill_from[entry]
        for column in range(width):
            if spill_slot >= 0:
                host[spill_slot, column] = device[slot, column]
            device[slot, column] = host[source, column]


@compiled
def move_rows(plan: Plan, device: Slots) -> None:
    """Copy each moved slot's bytes to its new slot."""
    width = device.shape[1]
    for entry in range(len(plan.move_from)):
        source = plan.move_from[entry]
        target = plan.move_to[entry]
        for column in range(width):
            device[target, column] = device[source, column]


@inlined
def _place(reads: Words, fill_from: Words, position: int) -> tuple[int, int]:
    """Tier and slot of a read; the row of a fill is in its host slot until the fills are done."""
    tier, slot = reads[position] & TIER_MASK, reads[position] >> TIER_BITS
    if tier == TIER_FILLED:
        return TIER_HOST, fill_from[slot]
    return tier, slot


@compiled
def read_rows(
    plan: Plan, first: int, device: Rows, host: Rows, default_of: NDArray[np.float32], out: Rows
) -> None:
    """Write the rows of positions `first`... to `out`, float32 [n, dim].

    `default_of[table]` is the value of an absent key's row. Rows of fills are read from the host;
    `spill_and_fill` does all fills later.
    """
    dim = out.shape[1]
    reads, fill_from = plan.reads, plan.fill_from
    for index in range(out.shape[0]):
        tier, slot = _place(reads, fill_from, first + index)
        if tier == TIER_DEVICE:
            for column in range(dim):
                out[index, column] = device[slot, column]
        elif tier == TIER_ABSENT:
            for column in range(dim):
                out[index, column] = default_of[slot]
        else:
            for column in range(dim):
                out[index, column] = host[slot, column]


@compiled
def read_float16(
    plan: Plan, first: int, device: Slots, host: Slots, default_of: NDArray[np.float32], out: Rows
) -> None:
    """As `read_rows`, from slots of float16 bits."""
    reads, fill_from = plan.reads, plan.fill_from
    bits = out.view(np.uint32)
    for index in range(out.shape[0]):
        tier, slot = _place(reads, fill_from, first + index)
        if tier == TIER_DEVICE:
            for column in range(out.shape[1]):
                bits[index, column] = _float16_bits(device[slot, column])
        elif tier == TIER_ABSENT:
            for column in range(out.shape[1]):
                out[index, column] = default_of[slot]
        else:
            for column in range(out.shape[1]):
                bits[index, column] = _float16_bits(host[slot, column])


@compiled
def read_bfloat16(
    plan: Plan, first: int, device: Slots, host: Slots, default_of: NDArray[np.float32], out: Rows
) -> None:
    """As `read_rows`, from slots of bfloat16 bits: the upper half of a float32."""
    reads, fill_from = plan.reads, plan.fill_from
    bits = out.view(np.uint32)
    for index in range(out.shape[0]):
        tier, slot = _place(reads, fill_from, first + index)
        if tier == TIER_DEVICE:
            for column in range(out.shape[1]):
                bits[index, column] = device[slot, column] << 16
        elif tier == TIER_ABSENT:
            for column in range(out.shape[1]):
                out[index, column] = default_of[slot]
        else:
            for column in range(out.shape[1]):
                bits[index, column] = host[slot, column] << 16


@compiled
def read_int8(
    plan: Plan,
    first: int,
    device: Slots,
    host: Slots,
    device_scales: Scales,
    host_scales: Scales,
    default_of: NDArray[np.float32],
    out: Rows,
) -> None:
    """As `read_rows`, from slots of int8: each times the scale of its slot."""
    reads, fill_from = plan.reads, plan.fill_from
    for index in range(out.shape[0]):
        tier, slot = _place(reads, fill_from, first + index)
        if tier == TIER_DEVICE:
            scale = device_scales[slot]
            for column in range(out.shape[1]):
                out[index, column] = np.float32(device[slot, column]) * scale
        elif tier == TIER_ABSENT:
            for column in range(out.shape[1]):
                out[index, column] = default_of[slot]
        else:
            scale = host_scales[slot]
            for column in range(out.shape[1]):
                out[index, column] = np.float32(host[slot, column]) * scale
        if tier != TIER_ABSENT:
            _settle_nans(out.view(np.uint32), index)


@compiled
def pool_rows(rows: Rows, offsets: NDArray[np.int64], is_mean: bool, out: Rows) -> None:
    """Write sums or means of bags to `out`, from left to right; `rows[0]` is at `offsets[0]`."""
    num_columns = out.shape[1]
    for bag in range(out.shape[0]):
        begin = offsets[bag] - offsets[0]
        end = offsets[bag + 1] - offsets[0]
        for column in range(num_columns):
            out[bag, column] = 0
        for position in range(begin, end):
            for column in range(num_columns):
                out[bag, column] += rows[position, column]
        if is_mean and end > begin:
            count = np.float32(end - begin)
            for column in range(num_columns):
                out[bag, column] /= count
        _settle_nans(out.view(np.uint32), bag)


@inlined
def _float16_bits(half: int) -> int:
    """The bits of a float16 as those of the float32 of the same value; payloads of NaNs stay."""
    exponent = half >> 10 & 0x1F
    fraction = half & 0x3FF
    bits = (exponent + 112) << 23 | fraction << 13  # 112 = 127 - 15, the biases
    if exponent == 31:  # infinity or NaN
        bits = 0x7F800000 | fraction << 13
    if exponent == 0:  # zero or subnormal: the fraction times 2^-24
        bits = int(np.float32(fraction * 2.0**-24).view(np.int32))
    return bits | (half & 0x8000) << 16


@inlined
def _settle_nans(bits: NDArray[np.uint32], index: int) -> None:
    """Make every NaN of a row the same: processors disagree about those from arithmetic.

    By bits, as a compiler may take one NaN for another.
    """
    for column in range(bits.shape[1]):
        if bits[index, column] & 0x7FFFFFFF > 0x7F800000:
            bits[index, column] = 0x7FC00000


def read(
    plan: Plan,
    device: Slots,
    host: Slots,
    default_of: NDArray[np.float32],
    row_format: RowFormat,
    device_scales: Scales | None,
    host_scales: Scales | None,
    first: int,
    out: Rows,
) -> None:
    """Write the rows of positions `first`... to `out`, float32 [n, dim], from any format."""
    if row_format is RowFormat.FLOAT32:
        read_rows(plan, first, device, host, default_of, out)
    elif row_format is RowFormat.FLOAT16:
        read_float16(plan, first, device, host, default_of, out)
    elif row_format is RowFormat.BFLOAT16:
        read_bfloat16(plan, first, device, host, default_of, out)
    else:
        assert device_scales is not None
        assert host_scales is not None
        read_int8(plan, first, device, host, device_scales, host_scales, default_of, out)


def pool(
    plan: Plan,
    device: Slots,
    host: Slots,
    default_of: NDArray[np.float32],
    row_format: RowFormat,
    device_scales: Scales | None,
    host_scales: Scales | None,
    first: int,
    offsets: NDArray[np.int64],
    is_mean: bool,
    out: Rows,
) -> None:
    """Write sums or means to `out`: row b is of the positions from `first + offsets[b]` on."""
    num_rows = int(offsets[-1] - offsets[0])
    rows = np.empty((num_rows, out.shape[1]), dtype=np.float32)
    read(
        plan, device, host, default_of, row_format, device_scales, host_scales,
        first + int(offsets[0]), rows,
    )  # fmt: skip
    pool_rows(rows, offsets, is_mean, out)


def copy_slots(plan: Plan, device: Slots, host: Slots) -> None:
    """Do the spills, fills and moves of a plan; for scales, [num_slots, 1], as for slots."""
    if len(plan.fill_slot):  # a call of compiled code is not free
        spill_and_fill(plan, device, host)
    if len(plan.move_from):
        move_rows(plan, device)
