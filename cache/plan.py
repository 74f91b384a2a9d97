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
TIER_FILLED = 4  # only in a plan: the row of a fill, which this read performs

# An entry of `Plan.reads` is slot << TIER_BITS | tier: one load says where a row is.
TIER_BITS = 3
TIER_MASK = (1 << TIER_BITS) - 1


class Plan(NamedTuple):
    """One lookup of at most `max_positions` keys on one slab; all arrays are int64.

    Reads: position p is read from slot `reads[p] >> TIER_BITS` of tier `reads[p] & TIER_MASK`. For
    TIER_ABSENT the slot is the number of the table, for TIER_FILLED that of a fill. Fills: entry i
    copies host slot `fill_from[i]` to device slot `fill_slot[i]`, after the bytes there were
    spilled to host slot `spill_slot[i]` where that is not -1. Moves: entry i copies device slot
    `move_from[i]` to `move_to[i]`.

    The first `num_free_fills` fills stand alone, such as those that change rows on the device
    (scatter). Each other one is named by one read, which does it: so a missed row crosses the bus
    once. Device slots filled or moved to are distinct, and nothing reads, spills or moves what was
    there, but for the spill of the same entry. Host slots spilled to are distinct, and nothing
    reads them. So the operations may run in any order.
    """

    reads: NDArray[np.int64]
    fill_slot: NDArray[np.int64]
    fill_from: NDArray[np.int64]
    spill_slot: NDArray[np.int64]
    move_from: NDArray[np.int64]
    move_to: NDArray[np.int64]
    num_free_fills: int = 0


def new_plan(max_positions: int, reads: NDArray[np.int64] | None = None) -> Plan:
    """Return an empty plan without moves; `reads` is memory to use for its reads."""
    return Plan(
        reads=np.zeros(max_positions, dtype=np.int64) if reads is None else reads[:max_positions],
        fill_slot=np.zeros(max_positions, dtype=np.int64),
        fill_from=np.zeros(max_positions, dtype=np.int64),
        spill_slot=np.zeros(max_positions, dtype=np.int64),
        move_from=np.zeros(0, dtype=np.int64),
        move_to=np.zeros(0, dtype=np.int64),
    )


def closed_plan(plan: Plan, num_reads: int, num_fills: int) -> Plan:
    """Return `plan` cut to what is in use; views, not copies."""
    return plan._replace(
        reads=plan.reads[:num_reads],
        fill_slot=plan.fill_slot[:num_fills],
        fill_from=plan.fill_from[:num_fills],
        spill_slot=plan.spill_slot[:num_fills],
    )


def check_plan(plan: Plan) -> None:
    """Assert the rules of disjointness that `Plan` states."""
    tiers = plan.reads & TIER_MASK
    slots = plan.reads >> TIER_BITS
    sources = {*slots[tiers == TIER_DEVICE].tolist(), *plan.move_from.tolist()}
    targets = [*plan.fill_slot.tolist(), *plan.move_to.tolist()]
    spills = plan.spill_slot[plan.spill_slot >= 0].tolist()
    host_sources = {*slots[tiers == TIER_HOST].tolist(), *plan.fill_from.tolist()}
    named = sorted(slots[tiers == TIER_FILLED].tolist())
    not_free = list(range(plan.num_free_fills, len(plan.fill_slot)))
    assert named == not_free, "a fill has not one read"
    assert len(targets) == len(set(targets)), "a device slot is written twice"
    assert len(spills) == len(set(spills)), "a host slot is spilled to twice"
    assert sources.isdisjoint(targets), "a device slot is read and written"
    assert host_sources.isdisjoint(spills), "a host slot is read and spilled to"
