"""All tables of a repository behind one budget: slabs, frames and lookups by table name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from cache.device import Device, Event, Output
from cache.errors import AbsentKeyError, CacheError, OutOfMemoryError, UnknownTableError
from cache.layout import SlabLayout, plan_layouts
from cache.plan import TIER_ABSENT, TIER_DEVICE, TIER_HOST, TIER_SOURCE
from cache.row_cache import RowCache, SlabFrame
from cache.slab_index import (
    DEVICE_EVICTIONS,
    DEVICE_ROWS,
    HOST_EVICTIONS,
    HOST_ROWS,
    SPILLS,
    locate_keys,
)
from cache.sources import FileSource
from cache.table import Table, read_tables

log = logging.getLogger(__name__)

MAX_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class Lookup:
    """Keys to look up, and where their rows go.

    `keys` is int64 [n]; key p is of table `tables[p % len(tables)]`; all the tables have the same
    `dim`. `out` is a C-contiguous float32 array [n, dim] of the device's buffers.
    """

    tables: tuple[str, ...]
    keys: NDArray[np.int64]
    out: Any


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Where the rows came from, by position: `tiers` is uint8 [n] of TIER_DEVICE, ... TIER_ABSENT.

    The first position of a row that the device tier lacks counts for the tier that has it; its
    repeats in the same lookup count as device hits, because they cost no fetch.
    """

    tiers: NDArray[np.uint8]
    num_device: int
    num_host: int
    num_source: int
    num_absent: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """Counts of one table since the start; lookups in positions, the rest in rows."""

    name: str
    num_rows: int
    dim: int
    device_hits: int
    host_hits: int
    source_rows: int
    absent_keys: int
    device_evictions: int
    host_evictions: int
    spills: int
    device_rows: int
    host_rows: int


@dataclass(frozen=True, slots=True)
class SlabStats:
    """Sizes and fill of one slab, in slots."""

    slot_bytes: int
    tables: tuple[str, ...]
    mode: str
    device_slots: int
    host_slots: int
    leases: int


@dataclass(frozen=True, slots=True)
class FeatureCacheStats:
    """Everything that is counted, at one moment."""

    slabs: tuple[SlabStats, ...]
    tables: tuple[TableStats, ...]


class Frame:
    """What one batch holds until its model has run: the plans, leases and events of its lookups."""

    def __init__(self, cache: FeatureCache, slabs: Sequence[RowCache]) -> None:
        self._cache = cache
        # All memory from the start, so that a request cannot be the one for which there is none.
        self.slab_frames = [slab.new_frame() for slab in slabs]

    def lookup(self, lookups: Sequence[Lookup]) -> list[LookupResult]:
        """Look up all keys of a batch and enqueue the writing of the rows to the lookups' `out`.

        The rows are there when `events` are done, or when the frame is left. Blocks while rows are
        read from the source. Keys of one slab are one lookup of it, in order
        of the list; more than `max_positions` of them are looked up in parts, one after the other.
        Raises `UnknownTableError`, `AbsentKeyError` and `SourceError`.
        """
        return self._cache._lookup(lookups, self)

    def events(self) -> list[Event]:
        """When all are done, the rows of the frame's lookups are there."""
        events = [slab_frame.event for slab_frame in self.slab_frames]
        return [event for event in events if event is not None]

    def finish(self, slabs: Sequence[RowCache]) -> None:
        """Wait for the device and end all leases."""
        for slab, slab_frame in zip(slabs, self.slab_frames, strict=True):
            slab.finish(slab_frame)


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions `first`..`stop` of one lookup."""

    index: int
    first: int
    stop: int


class FeatureCache:
    """The tables of a repository; tables of one slot size share a slab."""

    def __init__(self, slabs: Sequence[RowCache], num_frames: int) -> None:
        self._slabs = list(slabs)
        self._table_to_slab = {
            table.name: (number, index)
            for number, slab in enumerate(slabs)
            for index, table in enumerate(slab.tables)
        }
        tables = {table.name: table for slab in slabs for table in slab.tables}
        self.tables: Mapping[str, Table] = MappingProxyType(dict(sorted(tables.items())))
        self._free_frames = [Frame(self, slabs) for _ in range(num_frames)]
        self._has_free_frame = threading.Condition()

    @classmethod
    def open(
        cls,
        root: Path,
        device: Device,
        *,
        table_memory_bytes: int,
        host_memory_bytes: int,
        is_direct_io: bool = True,
        num_frames: int = 4,
        max_positions: int = MAX_POSITIONS,
        show_progress: bool = False,
    ) -> FeatureCache:
        """Open the tables in the folders of `root`, and fill inclusive host tiers.

        Slabs share `table_memory_bytes` of the device by the bytes of their rows. Of
        `host_memory_bytes`, small slabs get all that they need and large ones share the rest. A
        slab whose rows all fit in its share of the host is loaded there. Raises `TableError`,
        `OutOfMemoryError` and `SourceError`.
        """
        groups = _tables_by_slot_bytes(read_tables(root))
        layouts = plan_layouts(
            groups,
            table_memory_bytes=table_memory_bytes,
            host_memory_bytes=host_memory_bytes,
            num_frames=num_frames,
            max_positions=max_positions,
        )
        _make_room_for_staging(device, layouts, host_memory_bytes)
        slabs = [
            RowCache(tables, layout, device, FileSource(tables, is_direct_io=is_direct_io))
            for tables, layout in zip(groups.values(), layouts, strict=True)
        ]
        _load_host_tiers([slab for slab in slabs if slab.layout.is_inclusive], show_progress)
        try:
            return cls(slabs, num_frames)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{error}; lower --table-memory, --max-lookup-keys or --pipeline-depth"
            ) from error

    def __repr__(self) -> str:
        return f"<FeatureCache {len(self.tables)} tables {self._slabs!r}>"

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        """Take a frame, for one batch; blocks until one is free.

        Leaving waits for the device's work on it and ends its leases.
        """
        with self._has_free_frame:
            self._has_free_frame.wait_for(lambda: bool(self._free_frames))
            frame = self._free_frames.pop()
        try:
            yield frame
        finally:
            try:
                frame.finish(self._slabs)
            finally:  # a device that has failed must not leave others waiting for a frame
                with self._has_free_frame:
                    self._free_frames.append(frame)
                    self._has_free_frame.notify()

    def stats(self) -> FeatureCacheStats:
        """Counts and sizes now."""
        tables = [stats for slab in self._slabs for stats in _table_stats(slab)]
        return FeatureCacheStats(
            slabs=tuple(_slab_stats(slab) for slab in self._slabs),
            tables=tuple(sorted(tables, key=lambda stats: stats.name)),
        )

    def check_integrity(self) -> None:
        """Assert that every slab's index agrees with itself. Slow; for tests."""
        for slab in self._slabs:
            slab.check_integrity()

    def close(self) -> None:
        """Give back memory and files; no frame may be out."""
        for slab in self._slabs:
            slab.close()

    def _lookup(self, lookups: Sequence[Lookup], frame: Frame) -> list[LookupResult]:
        slab_to_parts: dict[int, list[_Part]] = {}
        for index, lookup in enumerate(lookups):
            number = self._check(lookup)
            slab_to_parts.setdefault(number, []).append(_Part(index, 0, len(lookup.keys)))
        tiers = [np.zeros(len(lookup.keys), dtype=np.uint8) for lookup in lookups]
        for number, parts in slab_to_parts.items():
            slab = self._slabs[number]
            slab_frame = frame.slab_frames[number]
            for round_parts in _rounds(parts, slab.layout.max_positions):
                slab.finish(slab_frame)
                self._lookup_parts(slab, slab_frame, round_parts, lookups, tiers)
        return [_result(positions) for positions in tiers]

    def _lookup_parts(
        self,
        slab: RowCache,
        frame: SlabFrame,
        parts: Sequence[_Part],
        lookups: Sequence[Lookup],
        tiers: Sequence[NDArray[np.uint8]],
    ) -> None:
        """Look up at most `max_positions` positions of one slab."""
        num_positions = 0
        outputs = []
        for part in parts:
            lookup = lookups[part.index]
            self._locate(slab, frame, num_positions, part, lookup)
            outputs.append(Output(num_positions, lookup.out[part.first : part.stop]))
            num_positions += part.stop - part.first
        slab.lookup(frame, num_positions, outputs)
        for part, output in zip(parts, outputs, strict=True):
            stop = output.first + part.stop - part.first
            tiers[part.index][part.first : part.stop] = frame.origin[output.first : stop]

    def _locate(
        self, slab: RowCache, frame: SlabFrame, offset: int, part: _Part, lookup: Lookup
    ) -> None:
        """Write the part's rows and tables to the frame, from `offset` on."""
        where = slice(offset, offset + part.stop - part.first)
        # A copy, because keys may be a read-only view, which would be compiled for once more.
        frame.keys[where] = lookup.keys[part.first : part.stop]
        indices = [self._table_to_slab[name][1] for name in lookup.tables]
        locate_keys(
            frame.keys[where],
            np.array(indices, dtype=np.int32),
            part.first % len(indices),
            slab.first_row,
            frame.rows[where],
            frame.table_of[where],
        )

    def _check(self, lookup: Lookup) -> int:
        """Return the number of the lookup's slab; raise before anything is looked up."""
        for name in lookup.tables:
            if name not in self._table_to_slab:
                raise UnknownTableError(f"no table is called {name!r}")
        tables = [self.tables[name] for name in lookup.tables]
        dims = {table.dim for table in tables}
        if len(dims) != 1:
            raise CacheError(f"tables of one lookup have one dim, got {sorted(dims)}")
        assert lookup.keys.dtype == np.int64
        assert lookup.out.shape == (len(lookup.keys), tables[0].dim)
        assert lookup.out.dtype == np.float32
        for column, table in enumerate(tables):
            if table.is_strict:
                _refuse_absent_keys(table, lookup.keys[column :: len(tables)])
        return self._table_to_slab[lookup.tables[0]][0]


def _refuse_absent_keys(table: Table, keys: NDArray[np.int64]) -> None:
    absent = keys[(keys < 0) | (keys >= table.num_rows)]
    if len(absent):
        raise AbsentKeyError(
            f"table {table.name!r} has no key {absent[0]}: expected 0 to {table.num_rows - 1}"
        )


def _tables_by_slot_bytes(tables: Sequence[Table]) -> dict[int, list[Table]]:
    groups: dict[int, list[Table]] = {}
    for table in tables:
        groups.setdefault(table.slot_bytes, []).append(table)
    return dict(sorted(groups.items()))


def _make_room_for_staging(
    device: Device, layouts: Sequence[SlabLayout], host_memory_bytes: int
) -> None:
    """Staging buffers are needed whatever the host memory is; say so where they take it all."""
    num_bytes = 0
    for layout in layouts:
        num_bytes += (layout.num_host_slots + layout.num_staging_slots) * layout.slot_bytes
        if host_memory_bytes and layout.mode == "none":
            log.warning(
                "rows of %d bytes have no host tier: staging buffers take their share of the %d "
                "bytes of host memory",
                layout.slot_bytes, host_memory_bytes,
            )  # fmt: skip
    device.host_budget.make_room(num_bytes)


def _load_host_tiers(slabs: Sequence[RowCache], show_progress: bool) -> None:
    num_bytes = sum(table.num_rows * table.row_bytes for slab in slabs for table in slab.tables)
    with tqdm(
        total=num_bytes, unit="B", unit_scale=True, desc="host tier", disable=not show_progress
    ) as progress:
        for slab in slabs:
            slab.load_host_tier(progress.update)


def _rounds(parts: Sequence[_Part], max_positions: int) -> Iterator[list[_Part]]:
    """Cut the parts so that each round has at most `max_positions` positions."""
    current: list[_Part] = []
    room = max_positions
    for part in parts:
        first = part.first
        while part.stop - first > room:
            if room:
                current.append(_Part(part.index, first, first + room))
                first += room
            yield current
            current, room = [], max_positions
        current.append(_Part(part.index, first, part.stop))
        room -= part.stop - first
    if current:
        yield current


def _result(tiers: NDArray[np.uint8]) -> LookupResult:
    counts = np.bincount(tiers, minlength=4).tolist()
    return LookupResult(
        tiers=tiers,
        num_device=counts[TIER_DEVICE],
        num_host=counts[TIER_HOST],
        num_source=counts[TIER_SOURCE],
        num_absent=counts[TIER_ABSENT],
    )


def _table_stats(slab: RowCache) -> list[TableStats]:
    return [
        TableStats(
            name=table.name,
            num_rows=table.num_rows,
            dim=table.dim,
            device_hits=count[TIER_DEVICE],
            host_hits=count[TIER_HOST],
            source_rows=count[TIER_SOURCE],
            absent_keys=count[TIER_ABSENT],
            device_evictions=count[DEVICE_EVICTIONS],
            host_evictions=count[HOST_EVICTIONS],
            spills=count[SPILLS],
            device_rows=count[DEVICE_ROWS],
            host_rows=count[HOST_ROWS],
        )
        for table, count in zip(slab.tables, slab.counts().tolist(), strict=True)
    ]


def _slab_stats(slab: RowCache) -> SlabStats:
    return SlabStats(
        slot_bytes=slab.layout.slot_bytes,
        tables=tuple(table.name for table in slab.tables),
        mode=slab.layout.mode,
        device_slots=slab.layout.num_device_slots,
        host_slots=slab.layout.num_host_slots,
        leases=slab.num_leases,
    )
