"""The index of a tier: exact LRU over slots, in compiled functions on plain arrays.

A tier has slots and an `Index` says which row is in which. Entries are in a doubly linked list by
recency (the list of D. E. Knuth, TAOCP 1, 2.2.5); `slot_of` is dense, so finding a row is one read.
Nothing here locks: the caller holds the mutex of the slab.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.jit import compiled

NONE = -1  # no slot, no row

# Positions in `Index.state`.
OLDEST = 0
NEWEST = 1
NUM_FREE = 2
NUM_USED = 3
MAX_USED = 4


class Index(NamedTuple):
    """Rows to slots and back, recency, leases and free slots of one tier.

    A slot is *free* (on the stack `free`), *used* (holds an entry, in the list), or *held* (holds
    no entry but is leased). At most `state[MAX_USED]` slots are used. A slot returns to the stack
    when it holds no entry and its last lease ends.
    """

    slot_of: NDArray[np.int32]  # [num_rows]; NONE where the row is not in the tier
    row_of: NDArray[np.int64]  # [num_slots]; NONE where the slot holds no entry
    older: NDArray[np.int32]  # [num_slots]
    newer: NDArray[np.int32]  # [num_slots]
    leases: NDArray[np.int32]  # [num_slots]
    free: NDArray[np.int32]  # [num_slots], a stack
    state: NDArray[np.int64]


def new_index(num_rows: int, num_slots: int, max_used: int) -> Index:
    """Return an index of empty slots; lower slots are taken first."""
    assert max_used <= num_slots < 2**31
    return Index(
        slot_of=np.full(num_rows, NONE, dtype=np.int32),
        row_of=np.full(num_slots, NONE, dtype=np.int64),
        older=np.full(num_slots, NONE, dtype=np.int32),
        newer=np.full(num_slots, NONE, dtype=np.int32),
        leases=np.zeros(num_slots, dtype=np.int32),
        free=np.arange(num_slots - 1, -1, -1, dtype=np.int32),
        state=np.array([NONE, NONE, num_slots, 0, max_used], dtype=np.int64),
    )


@compiled
def link_newest(index: Index, slot: int) -> None:
    """Put `slot` at the newest end of the list."""
    newest = index.state[NEWEST]
    index.older[slot] = newest
    index.newer[slot] = NONE
    if newest == NONE:
        index.state[OLDEST] = slot
    else:
        index.newer[newest] = slot
    index.state[NEWEST] = slot


@compiled
def unlink(index: Index, slot: int) -> None:
    """Take `slot` out of the list."""
    older = index.older[slot]
    newer = index.newer[slot]
    if older == NONE:
        index.state[OLDEST] = newer
    else:
        index.newer[older] = newer
    if newer == NONE:
        index.state[NEWEST] = older
    else:
        index.older[newer] = older


@compiled
def touch(index: Index, slot: int) -> None:
    """Make `slot` the newest entry."""
    if index.state[NEWEST] != slot:
        unlink(index, slot)
        link_newest(index, slot)


@compiled
def insert(index: Index, row: int, slot: int) -> None:
    """Make `slot` the entry of `row`, the newest."""
    index.slot_of[row] = slot
    index.row_of[slot] = row
    link_newest(index, slot)
    index.state[NUM_USED] += 1


@compiled
def remove(index: Index, slot: int) -> int:
    """Drop the entry in `slot` and return its row; the slot is free once it has no lease."""
    row = int(index.row_of[slot])
    unlink(index, slot)
    index.state[NUM_USED] -= 1
    detach(index, slot)
    return row


@compiled
def detach(index: Index, slot: int) -> None:
    """Forget the row of a slot that is in no list; the slot is free once it has no lease."""
    index.slot_of[index.row_of[slot]] = NONE
    index.row_of[slot] = NONE
    if index.leases[slot] == 0:
        push_free(index, slot)


@compiled
def push_free(index: Index, slot: int) -> None:
    """Return `slot` to the stack of free slots."""
    index.free[index.state[NUM_FREE]] = slot
    index.state[NUM_FREE] += 1


@compiled
def take_free(index: Index) -> int:
    """Take a free slot, or NONE."""
    if index.state[NUM_FREE] == 0:
        return NONE
    index.state[NUM_FREE] -= 1
    return int(index.free[index.state[NUM_FREE]])


@compiled
def acquire(index: Index, slot: int) -> None:
    """Lease `slot`: it is not reused until the matching `release`."""
    index.leases[slot] += 1


@compiled
def release(index: Index, slot: int) -> None:
    """End one lease of `slot`."""
    index.leases[slot] -= 1
    if index.leases[slot] == 0 and index.row_of[slot] == NONE:
        push_free(index, slot)


@compiled
def oldest_without_lease(index: Index) -> int:
    """Return the victim: the oldest slot that nobody leases, or NONE.

    Leased slots were touched when they were leased, so the walk passes few of them.
    """
    slot = int(index.state[OLDEST])
    while slot != NONE and index.leases[slot] > 0:
        slot = int(index.newer[slot])
    return slot


def rows_by_recency(index: Index) -> list[int]:
    """The rows of the tier, oldest first."""
    rows = []
    slot = int(index.state[OLDEST])
    while slot != NONE:
        rows.append(int(index.row_of[slot]))
        slot = int(index.newer[slot])
    return rows


def check_integrity(index: Index) -> None:
    """Assert that the list, both maps, the leases and the free stack agree."""
    rows = rows_by_recency(index)
    slots = [int(index.slot_of[row]) for row in rows]
    assert len(rows) == index.state[NUM_USED] <= index.state[MAX_USED]
    assert [int(index.row_of[slot]) for slot in slots] == rows
    for older, newer in pairwise(slots):
        assert index.newer[older] == newer
        assert index.older[newer] == older
    free = index.free[: index.state[NUM_FREE]].tolist()
    assert len(set(free)) == len(free)
    assert set(free).isdisjoint(slots)
    assert all(index.row_of[slot] == NONE and index.leases[slot] == 0 for slot in free)
    assert (index.leases >= 0).all()
    rest = set(range(len(index.row_of))) - set(free) - set(slots)
    assert all(index.leases[slot] > 0 for slot in rest), "a slot is lost"
