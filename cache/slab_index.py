"""The decisions of a slab, compiled: `probe`, `admit` and `abandon` over both tiers' indices.

The caller holds the slab's mutex. Rows are numbered through all tables of the slab: the row of a
key is the table's first row plus the key.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache import lru
from cache.jit import compiled
from cache.lru import NONE, Index
from cache.plan import (
    TIER_ABSENT,
    TIER_BITS,
    TIER_DEVICE,
    TIER_FILLED,
    TIER_HOST,
    TIER_MASK,
    TIER_SOURCE,
    Plan,
)

TIER_MISSING = 5  # between probe and admit: the slot is the number of the missing entry

# How a missing row gets its bytes.
IN_HOST = 0  # they are in the host tier
JOINED = 1  # another lookup is fetching them
FETCHED = 2  # this lookup fetches them

# Columns of the counts, by table. The first four are positions by their origin, TIER_DEVICE to
# TIER_ABSENT, of lookups that did not fail; the others are rows.
DEVICE_EVICTIONS = 4
HOST_EVICTIONS = 5
SPILLS = 6
DEVICE_ROWS = 7  # in the tier now
HOST_ROWS = 8
NUM_COUNTS = 9


class Tiers(NamedTuple):
    """Everything that the decisions read and write.

    With `is_inclusive` the host tier holds every row at the slot of its number and `host` is empty.
    `flight[slot]` is the lookup that is fetching into a host slot, or 0. `first_row` has one entry
    a table and one more: the number of rows. `counts` is [num_tables, NUM_COUNTS].
    """

    device: Index
    host: Index
    flight: NDArray[np.int64]
    is_inclusive: bool
    first_row: NDArray[np.int64]
    counts: NDArray[np.int64]


def new_tiers(
    first_row: NDArray[np.int64],
    *,
    num_device_slots: int,
    num_host_slots: int,
    num_staging_slots: int,
    max_positions: int,
    is_inclusive: bool,
) -> Tiers:
    """Return empty tiers for lookups of at most `max_positions` positions.

    An inclusive host tier needs no index.
    """
    max_touches = 2 * max_positions  # an admitted row can enter the host tier, and so can a victim
    num_rows = int(first_row[-1])
    num_slots = 0 if is_inclusive else num_host_slots + num_staging_slots
    host = lru.new_index(
        num_rows=0 if is_inclusive else num_rows,
        num_slots=num_slots,
        max_used=0 if is_inclusive else num_host_slots,
        max_touches=max_touches,
    )
    return Tiers(
        device=lru.new_index(num_rows, num_device_slots, num_device_slots, max_touches),
        host=host,
        flight=np.zeros(num_slots, dtype=np.int64),
        is_inclusive=is_inclusive,
        first_row=first_row,
        counts=np.zeros((len(first_row) - 1, NUM_COUNTS), dtype=np.int64),
    )


class Missing(NamedTuple):
    """The distinct rows of one lookup that the device tier did not have, by first position."""

    row: NDArray[np.int64]
    host_slot: NDArray[np.int64]  # leased where the host tier is not inclusive
    kind: NDArray[np.uint8]
    fill: NDArray[np.int64]  # after `admit`: the fill that no read has named yet, or NONE


def new_missing(max_positions: int) -> Missing:
    """Return room for the missing rows of one lookup."""
    return Missing(
        row=np.zeros(max_positions, dtype=np.int64),
        host_slot=np.zeros(max_positions, dtype=np.int64),
        kind=np.zeros(max_positions, dtype=np.uint8),
        fill=np.zeros(max_positions, dtype=np.int64),
    )


@compiled
def locate_keys(
    keys: NDArray[np.int64],
    tables: NDArray[np.int32],
    first_column: int,
    first_row: NDArray[np.int64],
    rows: NDArray[np.int64],
    table_of: NDArray[np.int32],
) -> None:
    """Write row and table of every position.

    Position p is of table `tables[(first_column + p) % len(tables)]`. An absent key gets the row
    NONE.
    """
    column = first_column
    for position in range(len(keys)):
        table = tables[column]
        column += 1
        if column == len(tables):
            column = 0
        key = keys[position]
        table_of[position] = table
        if 0 <= key < first_row[table + 1] - first_row[table]:
            rows[position] = first_row[table] + key
        else:
            rows[position] = NONE


@compiled
def probe(
    tiers: Tiers,
    rows: NDArray[np.int64],
    table_of: NDArray[np.int32],
    flight: int,
    plan: Plan,
    missing: Missing,
    origin: NDArray[np.uint8],
) -> int:
    """Find and touch what is there, in order of position, and list what is not.

    Device hits and the host slots of missing rows are leased. A missing row that nobody fetches
    gets a free host slot and belongs to `flight`. `origin[p]` is the tier that serves position p;
    repeats of a missing row are hits. Returns the number of missing rows.
    """
    lru.make_room(tiers.device, len(rows))
    lru.make_room(tiers.host, len(rows))
    # Out of the tuples once: taking an array out of a tuple counts a reference.
    slot_of, slots = tiers.device.slot_of, tiers.device.slots
    recency, state = tiers.device.log, tiers.device.state
    reads = plan.reads
    num_hits = 0
    num_missing = 0
    for position in range(len(rows)):
        row = rows[position]
        if row == NONE:
            reads[position] = table_of[position] << TIER_BITS | TIER_ABSENT
            origin[position] = TIER_ABSENT
            continue
        slot = slot_of[row]
        if slot >= 0:
            lru.touch(slots, recency, state, slot)
            slots[slot, lru.LEASES] += 1
            reads[position] = slot << TIER_BITS | TIER_DEVICE
            origin[position] = TIER_DEVICE
            num_hits += 1
            continue
        if slot < NONE:  # a repeat: marked below, unmarked before this function returns
            reads[position] = (NONE - 1 - slot) << TIER_BITS | TIER_MISSING
            origin[position] = TIER_DEVICE
            continue
        slot_of[row] = NONE - 1 - num_missing
        reads[position] = num_missing << TIER_BITS | TIER_MISSING
        missing.row[num_missing] = row
        is_in_host = _find_below(tiers, row, flight, missing, num_missing) == IN_HOST
        origin[position] = TIER_HOST if is_in_host else TIER_SOURCE
        num_missing += 1
    state[lru.NUM_LEASES] += num_hits
    for entry in range(num_missing):
        slot_of[missing.row[entry]] = NONE
    return num_missing


@compiled
def _find_below(tiers: Tiers, row: int, flight: int, missing: Missing, entry: int) -> int:
    host = tiers.host
    if tiers.is_inclusive:
        slot = row
        kind = IN_HOST
    else:
        slot = host.slot_of[row]
        if slot == NONE:
            # There is one: the slots of the tier and those that all frames can lease are apart.
            slot = lru.take_free(host)
            host.slot_of[row] = slot
            host.row_of[slot] = row
            tiers.flight[slot] = flight
            kind = FETCHED
        elif tiers.flight[slot] != 0:
            kind = JOINED
        else:
            lru.touch(host.slots, host.log, host.state, slot)
            kind = IN_HOST
        lru.acquire(host, slot)
    missing.host_slot[entry] = slot
    missing.kind[entry] = kind
    return kind


@compiled
def admit(
    tiers: Tiers,
    table_of: NDArray[np.int32],
    plan: Plan,
    missing: Missing,
    origin: NDArray[np.uint8],
    num_reads: int,
    num_missing: int,
) -> int:
    """Give missing rows device slots, in order of first position, count, and close the plan.

    The bytes of every missing row are in its host slot by now, and are read from there; the read of
    the row's first position does the fill. A row that another lookup admitted meanwhile is only
    touched. Where every device slot is leased, the row is not admitted. Host slots that are spilled
    to are leased. The leases on device slots end here, as the plan is enqueued before the mutex is
    released. Returns the number of fills.
    """
    device = tiers.device
    lru.make_room(device, num_missing)
    lru.make_room(tiers.host, 2 * num_missing)
    lru.oldest(device)
    place = device.state[lru.TAIL]
    num_fills = 0
    for entry in range(num_missing):
        row = missing.row[entry]
        missing.fill[entry] = NONE
        present = device.slot_of[row]
        if present != NONE:
            lru.touch(device.slots, device.log, device.state, present)
            _settle_host_entry(tiers, missing, entry, True)
            continue
        victim_slot = NONE
        if device.state[lru.NUM_FREE] == 0:
            victim_slot = lru.find_victim(device, place)
            if victim_slot == NONE:
                place = device.state[lru.HEAD]
                _settle_host_entry(tiers, missing, entry, False)
                continue
            place = device.slots[victim_slot, lru.PLACE]
        _settle_host_entry(tiers, missing, entry, True)
        plan.spill_slot[num_fills] = NONE
        if victim_slot != NONE:
            plan.spill_slot[num_fills] = _evict(tiers, victim_slot)
        slot = lru.take_free(device)
        lru.insert(device, row, slot)
        lru.acquire(device, slot)
        tiers.counts[_table_of(tiers, row), DEVICE_ROWS] += 1
        plan.fill_slot[num_fills] = slot
        plan.fill_from[num_fills] = missing.host_slot[entry]
        missing.fill[entry] = num_fills
        num_fills += 1
    for fill in range(num_fills):
        lru.release(device, plan.fill_slot[fill])
    device.state[lru.NUM_LEASES] -= _close_reads(
        device.slots, plan.reads, missing.host_slot, missing.fill, num_reads
    )
    _count(tiers.counts, table_of, origin, num_reads)
    return num_fills


@compiled
def _close_reads(
    device_slots: NDArray[np.int32],
    reads: NDArray[np.int64],
    host_slot: NDArray[np.int64],
    fill: NDArray[np.int64],
    num_reads: int,
) -> int:
    """Point the missing positions at their fills or host slots; end the leases of device hits.

    The first position of a row that is filled does the fill. Returns the number of leases.
    """
    num_leases = 0
    for position in range(num_reads):
        tier = reads[position] & TIER_MASK
        slot = reads[position] >> TIER_BITS
        if tier == TIER_DEVICE:
            device_slots[slot, lru.LEASES] -= 1
            num_leases += 1
        elif tier == TIER_MISSING and fill[slot] != NONE:
            reads[position] = fill[slot] << TIER_BITS | TIER_FILLED
            fill[slot] = NONE
        elif tier == TIER_MISSING:
            reads[position] = host_slot[slot] << TIER_BITS | TIER_HOST
    return num_leases


@compiled
def _count(
    counts: NDArray[np.int64],
    table_of: NDArray[np.int32],
    origin: NDArray[np.uint8],
    num_reads: int,
) -> None:
    for position in range(num_reads):
        counts[table_of[position], origin[position]] += 1


@compiled
def _evict(tiers: Tiers, slot: int) -> int:
    """Free the victim's device slot; return the host slot to spill its bytes to, or NONE."""
    victim = lru.remove(tiers.device, slot)
    table = _table_of(tiers, victim)
    tiers.counts[table, DEVICE_EVICTIONS] += 1
    tiers.counts[table, DEVICE_ROWS] -= 1
    host = tiers.host
    if tiers.is_inclusive or host.state[lru.MAX_USED] == 0 or host.slot_of[victim] != NONE:
        return NONE
    spill_slot = _insert_into_host(tiers, victim, NONE)
    lru.acquire(host, spill_slot)
    tiers.counts[table, SPILLS] += 1
    return spill_slot


@compiled
def _insert_into_host(tiers: Tiers, row: int, slot: int) -> int:
    """Make `row` the newest entry of the host tier, in `slot` or a free one."""
    host = tiers.host
    if host.state[lru.NUM_USED] == host.state[lru.MAX_USED]:
        evicted = _table_of(tiers, lru.remove(host, lru.oldest(host)))
        tiers.counts[evicted, HOST_EVICTIONS] += 1
        tiers.counts[evicted, HOST_ROWS] -= 1
    if slot == NONE:
        slot = lru.take_free(host)
    lru.insert(host, row, slot)
    tiers.counts[_table_of(tiers, row), HOST_ROWS] += 1
    return slot


@compiled
def _settle_host_entry(tiers: Tiers, missing: Missing, entry: int, is_on_device: bool) -> None:
    """A row is in one tier: promoted ones leave the host, fetched ones enter where they stay."""
    if tiers.is_inclusive:
        return
    host = tiers.host
    slot = missing.host_slot[entry]
    row = missing.row[entry]
    if missing.kind[entry] == FETCHED:
        tiers.flight[slot] = 0
        if is_on_device or host.state[lru.MAX_USED] == 0:
            lru.detach(host, slot)
        else:
            _insert_into_host(tiers, row, slot)
    elif is_on_device:
        present = host.slot_of[row]
        if present != NONE and tiers.flight[present] == 0:
            lru.remove(host, present)
            tiers.counts[_table_of(tiers, row), HOST_ROWS] -= 1


@compiled
def abandon(tiers: Tiers, plan: Plan, missing: Missing, num_reads: int, num_missing: int) -> None:
    """Undo a probe whose fetch failed: end its leases and forget its flight's rows."""
    for position in range(num_reads):
        if plan.reads[position] & TIER_MASK == TIER_DEVICE:
            lru.release(tiers.device, plan.reads[position] >> TIER_BITS)
    if tiers.is_inclusive:
        return
    for entry in range(num_missing):
        slot = missing.host_slot[entry]
        if missing.kind[entry] == FETCHED:
            tiers.flight[slot] = 0
            lru.detach(tiers.host, slot)
        lru.release(tiers.host, slot)


@compiled
def release_host_slots(
    tiers: Tiers, plan: Plan, missing: Missing, num_missing: int, num_fills: int
) -> None:
    """End the leases that a lookup holds on host slots, after the device has read them."""
    if tiers.is_inclusive:
        return
    for entry in range(num_missing):
        lru.release(tiers.host, missing.host_slot[entry])
    for fill in range(num_fills):
        if plan.spill_slot[fill] != NONE:
            lru.release(tiers.host, plan.spill_slot[fill])


@compiled
def _table_of(tiers: Tiers, row: int) -> int:
    return int(np.searchsorted(tiers.first_row, row, side="right")) - 1


def check_integrity(tiers: Tiers) -> None:
    """Assert that both tiers' indices are sound and that no row is in both."""
    for index, column in ((tiers.device, DEVICE_ROWS), (tiers.host, HOST_ROWS)):
        lru.check_integrity(index)
        assert tiers.counts[:, column].sum() == index.state[lru.NUM_USED]
    device_rows = set(lru.rows_by_recency(tiers.device))
    assert device_rows.isdisjoint(lru.rows_by_recency(tiers.host))
    in_flight = np.flatnonzero(tiers.flight)
    assert (tiers.host.slots[in_flight, lru.LEASES] > 0).all()
    assert (tiers.host.row_of[in_flight] != NONE).all()
