"""The index of a tier: exact LRU over slots, in compiled functions on plain arrays.

A tier has slots and an `Index` says which row is in which; `slot_of` is dense, so finding a row is
one read. Recency is a log: a touch appends the slot and notes its place, and an entry of the log
counts only when it is its slot's latest. The oldest entry that counts is the victim. That is the
order of a linked list, with one random write a touch where a list has five that wait for each
other. Entries that no longer count are swept out, some in each lookup, so that no lookup is
slow: the sweep goes from new to old and moves what counts towards the new end, in order.

Nothing here locks: the caller holds the mutex of the slab.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.jit import compiled, inlined

NONE = -1  # no slot, no row, no place

# Columns of `Index.slots`, together in one cache line.
PLACE = 0
LEASES = 1

# Positions in `Index.state`.
HEAD = 0  # where the log's next entry goes
TAIL = 1  # the log's oldest entry
NUM_LOGGED = 2
NUM_FREE = 3
NUM_USED = 4
MAX_USED = 5
SWEEP_READ = 6  # the sweep's next entry; it goes from here down to the tail
SWEEP_WRITE = 7  # where the sweep puts the next entry that counts
NUM_UNSWEPT = 8  # 0 when no sweep is under way
MAX_UNSWEPT = 9  # a longer log is swept
NUM_LEASES = 10
NUM_STATE = 11

MAX_SLOTS = 2**29  # so that places in the log fit in int32

# A sweep starts at two entries a slot, and reads four for each that is about to be added: it ends
# before there are three a slot, which is what the log has room for.
_SWEPT_PER_TOUCH = 4


class Index(NamedTuple):
    """Rows to slots and back, recency, leases and free slots of one tier.

    A slot is *free* (on the stack `free`), *used* (holds an entry), or *held* (holds no entry but
    is leased). At most `state[MAX_USED]` slots are used. A slot returns to the stack when it holds
    no entry and its last lease ends.
    """

    slot_of: NDArray[np.int32]  # [num_rows]; NONE where the row is not in the tier
    row_of: NDArray[np.int64]  # [num_slots]; NONE where the slot holds no entry
    slots: NDArray[np.int32]  # [num_slots, 2]: place in the log, or NONE; leases
    log: NDArray[np.int32]  # a ring of slots, oldest at state[TAIL]
    free: NDArray[np.int32]  # [num_slots], a stack
    state: NDArray[np.int64]


def new_index(num_rows: int, num_slots: int, max_used: int, max_touches: int) -> Index:
    """Return an index of empty slots; lower slots are taken first.

    At most `max_touches` touches and insertions lie between two calls of `make_room`.
    """
    assert max_used <= num_slots <= MAX_SLOTS
    log_size = 3 * num_slots + 8 * max_touches
    state = np.zeros(NUM_STATE, dtype=np.int64)
    state[NUM_FREE] = num_slots
    state[MAX_USED] = max_used
    state[MAX_UNSWEPT] = 2 * num_slots + 2 * max_touches
    return Index(
        slot_of=np.full(num_rows, NONE, dtype=np.int32),
        row_of=np.full(num_slots, NONE, dtype=np.int64),
        slots=np.tile(np.array([NONE, 0], dtype=np.int32), (num_slots, 1)),
        log=np.zeros(log_size, dtype=np.int32),
        free=np.arange(num_slots - 1, -1, -1, dtype=np.int32),
        state=state,
    )


@inlined
def touch(
    slots: NDArray[np.int32], log: NDArray[np.int32], state: NDArray[np.int64], slot: int
) -> None:
    """Make `slot` the newest entry; `make_room` was called for it."""
    head = state[HEAD]
    slots[slot, PLACE] = head
    log[head] = slot
    state[HEAD] = head + 1 if head + 1 < len(log) else 0
    state[NUM_LOGGED] += 1


@compiled
def make_room(index: Index, num_touches: int) -> None:
    """Sweep the log so that `num_touches` more entries fit; at most `max_touches` of the index."""
    slots, log, state = index.slots, index.log, index.state
    if state[NUM_UNSWEPT] == 0 and state[NUM_LOGGED] > state[MAX_UNSWEPT]:
        state[NUM_UNSWEPT] = state[NUM_LOGGED]
        state[SWEEP_READ] = state[HEAD] - 1 if state[HEAD] > 0 else len(log) - 1
        state[SWEEP_WRITE] = state[SWEEP_READ]
    if state[NUM_UNSWEPT] == 0:
        return
    read = state[SWEEP_READ]
    write = state[SWEEP_WRITE]
    num_swept = min(state[NUM_UNSWEPT], 64 + _SWEPT_PER_TOUCH * num_touches)
    for _ in range(num_swept):
        slot = log[read]
        if slots[slot, PLACE] == read:
            log[write] = slot
            slots[slot, PLACE] = write
            write = write - 1 if write > 0 else len(log) - 1
        read = read - 1 if read > 0 else len(log) - 1
    state[SWEEP_READ] = read
    state[SWEEP_WRITE] = write
    state[NUM_UNSWEPT] -= num_swept
    if state[NUM_UNSWEPT] == 0:
        _end_sweep(log, state)


@compiled
def _end_sweep(log: NDArray[np.int32], state: NDArray[np.int64]) -> None:
    """Everything below the swept entries is gone: the log starts at the lowest of them."""
    write = state[SWEEP_WRITE]
    tail = write + 1 if write + 1 < len(log) else 0
    num_logged = state[HEAD] - tail
    state[TAIL] = tail
    state[NUM_LOGGED] = num_logged if num_logged >= 0 else num_logged + len(log)


@compiled
def oldest(index: Index) -> int:
    """Return the slot of the oldest entry, or NONE."""
    slots, log, state = index.slots, index.log, index.state
    while state[NUM_LOGGED] > 0 and slots[log[state[TAIL]], PLACE] != state[TAIL]:
        _drop_tail(log, state)
    return int(log[state[TAIL]]) if state[NUM_LOGGED] > 0 else NONE


@compiled
def find_victim(index: Index, place: int) -> int:
    """Return the oldest slot without a lease from `place` in the log on, or NONE.

    Start at `state[TAIL]` after `oldest`. To find the next victim, go on from the place of the
    last: what was passed over is leased until the caller is done.
    """
    slots, log, head = index.slots, index.log, index.state[HEAD]
    while place != head:
        slot = log[place]
        if slots[slot, PLACE] == place and slots[slot, LEASES] == 0:
            return int(slot)
        place = place + 1 if place + 1 < len(log) else 0
    return NONE


@compiled
def _drop_tail(log: NDArray[np.int32], state: NDArray[np.int64]) -> None:
    """Forget the oldest entry of the log, which does not count."""
    state[TAIL] = state[TAIL] + 1 if state[TAIL] + 1 < len(log) else 0
    state[NUM_LOGGED] -= 1
    if state[NUM_UNSWEPT] > 0:
        state[NUM_UNSWEPT] -= 1
        if state[NUM_UNSWEPT] == 0:
            _end_sweep(log, state)


@compiled
def insert(index: Index, row: int, slot: int) -> None:
    """Make `slot` the entry of `row`, the newest."""
    index.slot_of[row] = slot
    index.row_of[slot] = row
    touch(index.slots, index.log, index.state, slot)
    index.state[NUM_USED] += 1


@compiled
def remove(index: Index, slot: int) -> int:
    """Drop the entry in `slot` and return its row; the slot is free once it has no lease."""
    row = int(index.row_of[slot])
    index.slots[slot, PLACE] = NONE
    index.state[NUM_USED] -= 1
    detach(index, slot)
    return row


@compiled
def detach(index: Index, slot: int) -> None:
    """Forget the row of a slot that is not used; the slot is free once it has no lease."""
    index.slot_of[index.row_of[slot]] = NONE
    index.row_of[slot] = NONE
    if index.slots[slot, LEASES] == 0:
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
    index.slots[slot, LEASES] += 1
    index.state[NUM_LEASES] += 1


@compiled
def release(index: Index, slot: int) -> None:
    """End one lease of `slot`."""
    index.slots[slot, LEASES] -= 1
    index.state[NUM_LEASES] -= 1
    if index.slots[slot, LEASES] == 0 and index.row_of[slot] == NONE:
        push_free(index, slot)


def rows_by_recency(index: Index) -> list[int]:
    """The rows of the tier, oldest first."""
    places = (index.state[TAIL] + np.arange(index.state[NUM_LOGGED])) % len(index.log)
    slots = index.log[places]
    counting = slots[index.slots[slots, PLACE] == places]
    return [int(row) for row in index.row_of[counting]]


def check_integrity(index: Index) -> None:
    """Assert that the log, both maps, the leases and the free stack agree."""
    rows = rows_by_recency(index)
    slots = [int(index.slot_of[row]) for row in rows]
    assert len(rows) == index.state[NUM_USED] <= index.state[MAX_USED]
    assert (index.slots[:, PLACE] != NONE).sum() == len(rows), "an entry is not in the log"
    assert [int(index.row_of[slot]) for slot in slots] == rows
    assert index.state[NUM_LOGGED] <= len(index.log)
    free = index.free[: index.state[NUM_FREE]].tolist()
    assert len(set(free)) == len(free)
    assert set(free).isdisjoint(slots)
    assert all(index.row_of[slot] == NONE and index.slots[slot, LEASES] == 0 for slot in free)
    assert (index.slots[:, LEASES] >= 0).all()
    assert index.slots[:, LEASES].sum() == index.state[NUM_LEASES]
    rest = set(range(len(index.row_of))) - set(free) - set(slots)
    assert all(index.slots[slot, LEASES] > 0 for slot in rest), "a slot is lost"
