"""How large a launch of `kernels.cu` is; the kernel finds each thread's work by the same rules."""

from __future__ import annotations

BLOCK_THREADS = 256
_WARP_THREADS = 32
_THREAD_BYTES = 16  # of a slot, that one thread takes at a time
_UNITS_IN_FLIGHT = 4  # of one group of threads, where a group takes several
# About what a large GPU runs at once. Up to here each output row gets threads of its own; beyond, a
# thread has several loads on their way, to hide more of the memory's latency. Chosen by arithmetic,
# not measured.
MAX_RESIDENT_THREADS = 1 << 17


def group_lanes(slot_bytes: int) -> int:
    """Threads of one warp that do an item together: a power of two, 16 bytes each where it can."""
    lanes = 1
    while lanes < _WARP_THREADS and lanes * _THREAD_BYTES < slot_bytes:
        lanes *= 2
    return lanes


def grid_blocks(
    num_units: int,
    num_copies: int,
    slot_bytes: int,
    max_resident_threads: int = MAX_RESIDENT_THREADS,
) -> int:
    """Blocks of `BLOCK_THREADS` threads for so many output rows (units), and free fills plus moves.

    The kernel gives a group one unit where the grid has a group for each, else four.
    """
    lanes = group_lanes(slot_bytes)
    groups_per_warp = _WARP_THREADS // lanes
    units_per_group = 1 if num_units * lanes <= max_resident_threads else _UNITS_IN_FLIGHT
    num_copy_warps = -(-num_copies // groups_per_warp)
    num_unit_warps = -(-num_units // (groups_per_warp * units_per_group))
    return -(-(num_copy_warps + num_unit_warps) * _WARP_THREADS // BLOCK_THREADS)
