"""One slab: a device tier and a host tier of equal slots above a source."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache import lru, slab_index
from cache.arena import Arena
from cache.device import Device, DeviceError, Event, Output, PlanBuffer, SlabMemory
from cache.layout import SlabLayout
from cache.plan import Plan
from cache.profiling import nvtx_range
from cache.slab_index import (
    FETCHED,
    HOST_ROWS,
    JOINED,
    Missing,
    Tiers,
    admit,
    new_missing,
    new_tiers,
    probe,
)
from cache.sources import Source
from cache.table import Table


@dataclass(eq=False, slots=True)
class Flight:
    """Rows that one lookup is fetching; others wait for it."""

    is_over: threading.Event = field(default_factory=threading.Event)
    has_failed: bool = True  # until it has not


class SlabFrame:
    """Everything that one lookup on a slab needs until the device is done with it."""

    def __init__(self, max_positions: int, buffer: PlanBuffer) -> None:
        self.keys = np.zeros(max_positions, dtype=np.int64)
        self.rows = np.zeros(max_positions, dtype=np.int64)
        self.table_of = np.zeros(max_positions, dtype=np.int32)
        self.origin = np.zeros(max_positions, dtype=np.uint8)
        self.buffer = buffer
        self.plan: Plan = buffer.plan
        self.missing: Missing = new_missing(max_positions)
        self.number = 0  # of the lookup, and of its flight
        self.num_missing = 0
        self.num_fills = 0
        self.event: Event | None = None


class RowCache:
    """The rows of several tables of one slot size, in two tiers above a source.

    `lookup` is `probe`, `fetch`, `admit` and `execute`. The mutex is held for the compiled index
    calls and the enqueuing of the plan, never while the source is read. A row is in one tier at a
    time, except that an inclusive host tier has them all. Callable from any thread; a `SlabFrame`
    belongs to one lookup at a time.
    """

    def __init__(
        self, tables: Sequence[Table], layout: SlabLayout, device: Device, source: Source
    ) -> None:
        self.tables = list(tables)
        self.layout = layout
        self._device = device
        self._source = source
        self._stream = device.new_stream()
        self._mutex = threading.Lock()
        self._flights: dict[int, Flight] = {}
        self._flight_numbers = itertools.count(1)
        first_row = np.cumsum([0] + [table.num_rows for table in tables]).astype(np.int64)
        self.first_row: NDArray[np.int64] = first_row
        self._tiers: Tiers = new_tiers(
            first_row,
            num_device_slots=layout.num_device_slots,
            num_host_slots=layout.num_host_slots,
            num_staging_slots=layout.num_staging_slots,
            max_positions=layout.max_positions,
            is_inclusive=layout.is_inclusive,
        )
        self._arenas: list[Arena] = []
        self._plan_buffers: list[PlanBuffer] = []
        self._fault: BaseException | None = None
        self._memory = self._new_memory()

    def __repr__(self) -> str:
        return (
            f"<RowCache slot_bytes={self.layout.slot_bytes} mode={self.layout.mode} "
            f"device={self.num_device_rows}/{self.layout.num_device_slots} "
            f"host={self.num_host_rows}/{self.layout.num_host_slots} leases={self.num_leases}>"
        )

    @property
    def num_device_rows(self) -> int:
        """Rows in the device tier."""
        return int(self._tiers.device.state[lru.NUM_USED])

    @property
    def num_host_rows(self) -> int:
        """Rows in the host tier."""
        if self.layout.is_inclusive:
            return self.layout.num_host_slots
        return int(self._tiers.host.state[lru.NUM_USED])

    @property
    def num_leases(self) -> int:
        """Leases on slots of both tiers; 0 when no lookup is under way."""
        device, host = self._tiers.device, self._tiers.host
        return int(device.state[lru.NUM_LEASES] + host.state[lru.NUM_LEASES])

    def counts(self) -> NDArray[np.int64]:
        """Counts by table since the start, [num_tables, NUM_COUNTS]; see `slab_index`."""
        with self._mutex:
            counts = self._tiers.counts.copy()
        if self.layout.is_inclusive:
            counts[:, HOST_ROWS] = np.diff(self.first_row)
        return counts

    def rows_by_recency(self) -> tuple[list[int], list[int]]:
        """The rows of the device tier and of a spilling host tier, oldest first. Slow."""
        with self._mutex:
            return (
                lru.rows_by_recency(self._tiers.device),
                lru.rows_by_recency(self._tiers.host),
            )

    def check_integrity(self) -> None:
        """Assert that the index agrees with itself. Slow; for tests."""
        with self._mutex:
            slab_index.check_integrity(self._tiers)

    def new_frame(self) -> SlabFrame:
        """A frame for lookups of at most `layout.max_positions` positions."""
        buffer = self._device.new_plan_buffer(self.layout.max_positions)
        self._plan_buffers.append(buffer)
        return SlabFrame(self.layout.max_positions, buffer)

    def load_host_tier(self, on_progress: Callable[[int], object]) -> None:
        """Read every row into an inclusive host tier; blocks. Raises `SourceError`."""
        assert self.layout.is_inclusive
        self._source.read_all(self._memory.host, on_progress)

    def lookup(self, frame: SlabFrame, num_positions: int, outputs: Sequence[Output]) -> None:
        """Look up `frame.rows[:num_positions]` and enqueue the copying of their rows to `outputs`.

        Blocks while rows are fetched. `frame.event` is set, and the outputs are written when it is
        done. Raises `SourceError`, and then nothing is admitted or counted.
        """
        # A lookup that joined another's failed flight has lost only time: its own rows may be fine.
        while not self._bring_to_host(frame, num_positions):
            pass
        with self._mutex:
            with nvtx_range("admit"):
                frame.num_fills = admit(
                    self._tiers, frame.table_of, frame.plan, frame.missing, frame.origin,
                    num_positions, frame.num_missing,
                )  # fmt: skip
            self._flights.pop(frame.number, None)
            with nvtx_range("execute"):
                self._execute(frame, num_positions, outputs)

    def _execute(self, frame: SlabFrame, num_positions: int, outputs: Sequence[Output]) -> None:
        try:
            self._device.execute(
                self._stream, frame.buffer, num_positions, frame.num_fills, self._memory, outputs
            )
            frame.event = self._stream.record()
        except BaseException as error:
            # The index now finds rows whose bytes were never written, so nobody may look again.
            self._fault = error
            if self._device.fault is None:
                self._device.fault = f"a plan could not be executed ({error}); restart the server"
            raise

    def _bring_to_host(self, frame: SlabFrame, num_positions: int) -> bool:
        """Probe and fetch; False where a flight that was joined failed, and all is undone."""
        frame.number = next(self._flight_numbers)
        with self._mutex:
            if self._fault is not None:
                raise DeviceError(f"a plan could not be executed: {self._fault}")
            with nvtx_range("probe"):
                frame.num_missing = probe(
                    self._tiers, frame.rows[:num_positions], frame.table_of, frame.number,
                    frame.plan, frame.missing, frame.origin,
                )  # fmt: skip
            flight, joined = self._open_flight(frame)
        try:
            if flight is not None:
                with nvtx_range("fetch"):
                    self._fetch(flight, frame)
        except BaseException:  # whatever it was, no lease may outlive it
            self._abandon(frame, num_positions)
            raise
        for other in joined:
            with nvtx_range("wait for a flight"):
                other.is_over.wait()
        if any(other.has_failed for other in joined):
            self._abandon(frame, num_positions)
            return False
        return True

    def _abandon(self, frame: SlabFrame, num_positions: int) -> None:
        with self._mutex:
            slab_index.abandon(
                self._tiers, frame.plan, frame.missing, num_positions, frame.num_missing
            )
            self._flights.pop(frame.number, None)
        frame.num_missing = 0

    def finish(self, frame: SlabFrame) -> None:
        """Wait for the device and end the frame's leases."""
        if frame.event is None:
            return
        frame.event.wait()
        if frame.num_missing:
            with self._mutex:
                slab_index.release_host_slots(
                    self._tiers, frame.plan, frame.missing, frame.num_missing, frame.num_fills
                )
        frame.event = None
        frame.num_missing = frame.num_fills = 0

    def close(self) -> None:
        """Give back memory and files; no lookup may be running."""
        self._source.close()
        for buffer in self._plan_buffers:
            buffer.close()
        for arena in self._arenas:
            arena.close()

    def _open_flight(self, frame: SlabFrame) -> tuple[Flight | None, list[Flight]]:
        """Announce the flight of the rows that this lookup fetches; find those that it joins."""
        if frame.num_missing == 0 or self.layout.is_inclusive:
            return None, []
        kinds = frame.missing.kind[: frame.num_missing]
        flight = None
        if (kinds == FETCHED).any():
            flight = self._flights[frame.number] = Flight()
        joined_slots = frame.missing.host_slot[: frame.num_missing][kinds == JOINED]
        joined = np.unique(self._tiers.flight[joined_slots]).tolist()
        return flight, [self._flights[number] for number in joined]

    def _fetch(self, flight: Flight, frame: SlabFrame) -> None:
        """Read this lookup's rows into their host slots, and tell those who wait for them."""
        is_fetched = frame.missing.kind[: frame.num_missing] == FETCHED
        rows = frame.missing.row[: frame.num_missing][is_fetched]
        slots = frame.missing.host_slot[: frame.num_missing][is_fetched]
        try:
            self._source.read(rows, slots, self._memory.host)
            flight.has_failed = False
        finally:
            flight.is_over.set()

    def _new_memory(self) -> SlabMemory:
        layout = self.layout
        owner = f"slab of {layout.slot_bytes} B slots"
        defaults = [table.default_value for table in self.tables]
        device_arena = self._device.reserve(owner, layout.num_device_slots * layout.slot_bytes)
        num_host_slots = layout.num_host_slots + layout.num_staging_slots
        host_arena = self._device.reserve_host(owner, num_host_slots * layout.slot_bytes)
        self._arenas = [device_arena, host_arena]
        return SlabMemory(
            device=_slots(device_arena, layout.num_device_slots, layout.slot_bytes),
            host=_slots(host_arena, num_host_slots, layout.slot_bytes),
            default_of=self._device.to_device(np.array(defaults, dtype=np.float32)),
        )


def _slots(arena: Arena, num_slots: int, slot_bytes: int) -> Any:
    """Commit the arena and return its slots, float32 [num_slots, slot_bytes / 4]."""
    if num_slots:
        arena.commit(0, arena.max_bytes)
    return arena.array(0, (num_slots, slot_bytes // 4), np.float32)
