"""Random interleavings of lookups, fetches and a GPU that works late: rows are always right."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from cache.cuda import CudaDevice
from cache.device import Output
from cache.row_cache import RowCache, SlabFrame
from tests.cache_fixtures import (
    MemorySource,
    ReadFailedError,
    Rows,
    machine_of,
    new_row_cache,
    opened_device,
    rows_of,
)

NUM_FRAMES = 4
MAX_POSITIONS = 8
ABSENT = -1
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "spill": {"host_slots": 4},
    "inclusive": {"is_inclusive": True},
}


class Gate:
    """A read that waits until it is told how it ends."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.thread = threading.get_ident()
        self._may_end = threading.Event()
        self._is_left = threading.Event()
        self._is_failing = False

    def open(self, is_failing: bool) -> None:
        self._is_failing = is_failing
        self._may_end.set()
        assert self._is_left.wait(30)

    def wait(self) -> None:
        assert self._may_end.wait(30)
        self._is_left.set()
        if self._is_failing:
            raise ReadFailedError(f"rows {self.rows} cannot be read by {self.thread}")


class OpenLookup:
    """A lookup in a thread of its own, and the frame that it holds."""

    def __init__(self, device: CudaDevice, cache: RowCache) -> None:
        self.frame: SlabFrame = cache.new_frame()
        self.memory = Rows(device, MAX_POSITIONS)
        self.rows: list[int] = []
        self.thread = 0
        self.future: Future[None]

    @property
    def expected(self) -> NDArray[np.float32]:
        rows = np.array(self.rows, dtype=np.int64)
        return np.where((rows == ABSENT)[:, None], np.float32(0), rows_of(rows))

    def run(self, cache: RowCache) -> None:
        self.thread = threading.get_ident()
        self.frame.rows[: len(self.rows)] = self.rows
        outputs = [Output(0, self.memory.array[: len(self.rows)])]
        cache.lookup(self.frame, len(self.rows), outputs)


class CacheMachine(RuleBasedStateMachine):
    """Up to four lookups at once on a slab of four device slots.

    Rules that cannot be followed do nothing: what is drawn must not depend on threads.
    """

    mode: str

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        device = self._stack.enter_context(opened_device("cuda-double"))
        assert isinstance(device, CudaDevice)
        self._device = device
        self._machine = machine_of(device)
        self._gates: list[Gate] = []
        self._cache = new_row_cache(
            31, device_slots=4, max_positions=MAX_POSITIONS, num_frames=NUM_FRAMES,
            source=MemorySource(self._read), device=device, **MODES[self.mode],
        )  # fmt: skip
        self._free = [OpenLookup(device, self._cache) for _ in range(NUM_FRAMES)]
        self._running: list[OpenLookup] = []
        self._pool = self._stack.enter_context(ThreadPoolExecutor(NUM_FRAMES))

    def _read(self, rows: list[int]) -> None:
        gate = Gate(rows)
        self._gates.append(gate)
        gate.wait()

    @rule(rows=st.lists(st.integers(ABSENT, 30), max_size=MAX_POSITIONS))
    def start(self, rows: list[int]) -> None:
        if not self._free:
            return
        lookup = self._free.pop()
        lookup.rows = rows
        lookup.thread = 0
        lookup.future = self._pool.submit(lookup.run, self._cache)
        self._running.append(lookup)
        self._settle()

    @rule(index=st.integers(0, NUM_FRAMES), is_failing=st.sampled_from([False, False, True]))
    def end_a_read(self, index: int, is_failing: bool) -> None:
        if self._gates:
            self._gates.pop(index % len(self._gates)).open(is_failing)
            self._settle()

    @rule(index=st.integers(0, 3), num_items=st.integers(1, 4))
    def work_ahead(self, index: int, num_items: int) -> None:
        if streams := self._machine.busy_streams:
            self._machine.run_some(streams[index % len(streams)], num_items)

    @rule(index=st.integers(0, NUM_FRAMES))
    def run_a_model(self, index: int) -> None:
        """Another stream reads the rows after the lookup's event; the frame is still held."""
        if not self._looked_up():
            return
        lookup = self._looked_up()[index % len(self._looked_up())]
        if lookup.frame.event is not None:
            self._device.compute.wait_for(lookup.frame.event)
        self._check(lookup)

    @rule(index=st.integers(0, NUM_FRAMES))
    def finish(self, index: int) -> None:
        if not self._looked_up():
            return
        lookup = self._looked_up()[index % len(self._looked_up())]
        self._cache.finish(lookup.frame)
        self._check(lookup)
        self._running.remove(lookup)
        self._free.append(lookup)

    @invariant()
    def is_sound(self) -> None:
        self._cache.check_integrity()
        if not self._running:
            assert self._cache.num_leases == 0

    def teardown(self) -> None:
        try:
            self._end_all()
            self.is_sound()
            self._cache.close()
        finally:
            while self._gates:
                self._gates.pop().open(is_failing=False)
            self._stack.close()

    def _end_all(self) -> None:
        while self._running:
            if self._gates:
                self.end_a_read(0, is_failing=False)
            elif self._looked_up():
                self.finish(0)
            else:
                self._settle()

    def _looked_up(self) -> list[OpenLookup]:
        return [lookup for lookup in self._running if lookup.future.done()]

    def _check(self, lookup: OpenLookup) -> None:
        values = lookup.memory.values()[: len(lookup.rows)]
        np.testing.assert_array_equal(values, lookup.expected)

    def _settle(self) -> None:
        """Until every lookup has come to its end or waits, for a read or for another's read."""
        deadline_s = time.monotonic() + 30
        num_times = 0
        while num_times < 2:  # as one that is just woken looks like one that waits
            is_settled = all(one.future.done() or is_waiting(one) for one in self._running)
            num_times = num_times + 1 if is_settled else 0
            assert time.monotonic() < deadline_s
            time.sleep(0.0002)
        for lookup in list(self._running):
            if lookup.future.done() and (error := lookup.future.exception()) is not None:
                # Nobody gets the failure of another's read.
                assert isinstance(error, ReadFailedError), error
                assert str(error).endswith(f"by {lookup.thread}")
                self._running.remove(lookup)
                self._free.append(lookup)


def is_waiting(lookup: OpenLookup) -> bool:
    """Whether its thread waits for an event of Python."""
    stack = sys._current_frames().get(lookup.thread)
    return stack is not None and stack.f_code is threading.Condition.wait.__code__


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_right_whatever_the_interleaving(mode: str) -> None:
    machine = type("CacheMachine", (CacheMachine,), {"mode": mode})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
