"""The operations of a plan on the CPU, compiled: fill, spill and read."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cache.jit import compiled
from cache.plan import TIER_ABSENT, TIER_BITS, TIER_DEVICE, TIER_MASK, Plan

Rows = NDArray[np.float32]  # [num_slots, slot_bytes / 4]


@compiled
def spill_and_fill(plan: Plan, device: Rows, host: Rows) -> None:
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
def read_rows(
    plan: Plan, first: int, device: Rows, host: Rows, default_of: NDArray[np.float32], out: Rows
) -> None:
    """Write the rows of positions `first`... to `out`, float32 [n, dim].

    `default_of[table]` is the value of an absent key's row.
    """
    dim = out.shape[1]
    for index in range(out.shape[0]):
        tier = plan.reads[first + index] & TIER_MASK
        slot = plan.reads[first + index] >> TIER_BITS
        if tier == TIER_DEVICE:
            for column in range(dim):
                out[index, column] = device[slot, column]
        elif tier == TIER_ABSENT:
            for column in range(dim):
                out[index, column] = default_of[slot]
        else:
            for column in range(dim):
                out[index, column] = host[slot, column]
