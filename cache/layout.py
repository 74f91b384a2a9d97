"""How large the tiers of each slab are: the division of both memories, decided at start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cache.lru import MAX_SLOTS
from cache.table import Table

_MAX_STAGING_BYTES = 64 * 1024 * 1024  # of one slab


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Sizes of a slab, in slots.

    `num_staging_slots` are host slots beside the host tier: rows pass through them on their way
    from the source, and spilled rows wait in them. With `is_inclusive` the host tier holds every
    row and there is no staging.
    """

    slot_bytes: int
    num_device_slots: int
    num_host_slots: int
    num_staging_slots: int
    max_positions: int
    is_inclusive: bool

    @property
    def mode(self) -> str:
        """`inclusive`, `spill`, or `none` where there is no host tier."""
        if self.is_inclusive:
            return "inclusive"
        return "spill" if self.num_host_slots else "none"


def plan_layouts(
    groups: Mapping[int, Sequence[Table]],
    *,
    table_memory_bytes: int,
    host_memory_bytes: int,
    num_frames: int,
    max_positions: int,
) -> list[SlabLayout]:
    """Divide the two memories among slabs; `groups` are tables by slot bytes.

    Staging slots are for rows on their way: each frame can hold `max_positions` rows that it
    fetches and, with a host tier, as many that it spills. The former are needed in any case.
    """
    rows = {size: sum(table.num_rows for table in tables) for size, tables in groups.items()}
    positions = {size: _positions_of_a_part(size, num_frames, max_positions) for size in rows}
    needs = {size: size * num_rows for size, num_rows in rows.items()}
    device_shares = split_by_need(table_memory_bytes, needs)
    inclusive = choose_inclusive(host_memory_bytes, needs)
    others = {size: need for size, need in needs.items() if size not in inclusive}
    left_bytes = host_memory_bytes - sum(needs[size] for size in inclusive)
    left_bytes -= sum(num_frames * positions[size] * size for size in others)
    host_shares = split_by_need(max(0, left_bytes), others)
    layouts = []
    for size, num_rows in rows.items():
        is_inclusive = size in inclusive
        num_staging_slots = num_frames * positions[size]
        num_host_slots = max(0, host_shares.get(size, 0) // size - num_staging_slots)
        if num_host_slots:
            num_staging_slots *= 2  # for the rows that are spilled
        layouts.append(
            SlabLayout(
                slot_bytes=size,
                num_device_slots=min(num_rows, device_shares[size] // size, MAX_SLOTS),
                num_host_slots=num_rows if is_inclusive else min(num_host_slots, MAX_SLOTS // 2),
                num_staging_slots=0 if is_inclusive else num_staging_slots,
                max_positions=positions[size],
                is_inclusive=is_inclusive,
            )
        )
    return layouts


def split_by_need(total: int, needs: Mapping[int, int]) -> dict[int, int]:
    """Divide `total` in proportion to the needs; nobody gets more than it needs."""
    sum_of_needs = sum(needs.values())
    if sum_of_needs <= total:
        return dict(needs)
    return {name: total * need // sum_of_needs for name, need in needs.items()}


def choose_inclusive(total: int, needs: Mapping[int, int]) -> set[int]:
    """Those who need no more than an equal share of what the smaller ones leave of `total`."""
    chosen: set[int] = set()
    for num_chosen, (name, need) in enumerate(sorted(needs.items(), key=lambda item: item[1])):
        if need * (len(needs) - num_chosen) > total:
            break
        chosen.add(name)
        total -= need
    return chosen


def _positions_of_a_part(slot_bytes: int, num_frames: int, max_positions: int) -> int:
    return max(1, min(max_positions, _MAX_STAGING_BYTES // (2 * num_frames * slot_bytes)))
