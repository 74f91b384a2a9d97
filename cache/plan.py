"""A plan: what the index decided and the device executes, in arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Where a position's row is read, and from where it came.
TIER_DEVICE = 0
TIER_HOST = 1
TIER_SOURCE = 2  # only as an origin: a row from the source is read from its host slot
TIER_ABSENT = 3  # the default row of the position's table


class Plan(NamedTuple):
    """One lookup of at most `max_positions` keys on one slab.

    Reads: position p is read from slot `read_slot[p]` of tier `read_tier[p]`; for TIER_ABSENT
    `read_slot` is the number of the table. Fills: entry i copies host slot `fill_from[i]` to device
    slot `fill_slot[i]`, after the bytes there were spilled to host slot `spill_slot[i]` where that
    is not -1. Device slots read, device slots filled, and host slots spilled to are pairwise
    disjoint; no host slot is both read and spilled to.
    """

    read_tier: NDArray[np.uint8]
    read_slot: NDArray[np.int64]
    fill_slot: NDArray[np.int64]
    fill_from: NDArray[np.int64]
    spill_slot: NDArray[np.int64]


def new_plan(max_positions: int) -> Plan:
    """Return an empty plan."""
    return Plan(
        read_tier=np.zeros(max_positions, dtype=np.uint8),
        read_slot=np.zeros(max_positions, dtype=np.int64),
        fill_slot=np.zeros(max_positions, dtype=np.int64),
        fill_from=np.zeros(max_positions, dtype=np.int64),
        spill_slot=np.zeros(max_positions, dtype=np.int64),
    )


def closed_plan(plan: Plan, num_reads: int, num_fills: int) -> Plan:
    """Return `plan` cut to what is in use; views, not copies."""
    return Plan(
        read_tier=plan.read_tier[:num_reads],
        read_slot=plan.read_slot[:num_reads],
        fill_slot=plan.fill_slot[:num_fills],
        fill_from=plan.fill_from[:num_fills],
        spill_slot=plan.spill_slot[:num_fills],
    )


def check_plan(plan: Plan) -> None:
    """Assert the rules of disjointness that `Plan` states."""
    reads = set(plan.read_slot[plan.read_tier == TIER_DEVICE].tolist())
    fills = plan.fill_slot.tolist()
    spills = plan.spill_slot[plan.spill_slot >= 0].tolist()
    host_reads = set(plan.read_slot[plan.read_tier == TIER_HOST].tolist())
    host_reads.update(plan.fill_from.tolist())
    assert len(fills) == len(set(fills)), "a device slot is filled twice"
    assert len(spills) == len(set(spills)), "a host slot is spilled to twice"
    assert reads.isdisjoint(fills), "a device slot is read and filled"
    assert host_reads.isdisjoint(spills), "a host slot is read and spilled to"
