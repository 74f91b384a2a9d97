"""A slab under concurrency, failures and a device that works late."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.device import Device, DeviceError
from cache.row_cache import RowCache
from tests.cache_fixtures import (
    DEVICES,
    MemorySource,
    OpenLookup,
    ReadFailedError,
    look_up,
    machine_of,
    new_row_cache,
    opened_device,
    rows_of,
)
from tests.cuda_double.machine import LAUNCH_FAILURE

MODES = {
    "none": {},
    "spill": {"host_slots": 256},
    "inclusive": {"is_inclusive": True},
}
modes = pytest.mark.parametrize("mode", MODES)
devices = pytest.mark.parametrize("kind", DEVICES)
# None: streams work as late as they may; a number: out of phase.
seeds = st.none() | st.integers(0, 1000)


def open_cache(mode: str, device: Device | None = None, **options: object) -> RowCache:
    return new_row_cache(device=device, **MODES[mode], **options)  # type: ignore[arg-type]


@modes
@pytest.mark.parametrize(
    "rows", [[7, 7], [7, 3, 7, 3, 7], [7] * 500, list(range(65)), list(range(500)), []]
)
@devices
def test_one_row_comes_back_for_every_position(kind: str, mode: str, rows: list[int]) -> None:
    with opened_device(kind) as device:
        cache = open_cache(mode, device)
        for _ in range(2):
            np.testing.assert_array_equal(look_up(cache, rows, device)[0], rows_of(rows))
        assert cache.num_leases == 0
        assert cache.num_device_rows == min(64, len(set(rows)))
        cache.check_integrity()


def test_a_repeated_row_is_fetched_once_and_its_repeats_are_hits() -> None:
    source = MemorySource()
    cache = new_row_cache(source=source)
    assert look_up(cache, [7, 3, 7, 3, 7])[1] == ["source", "source", "device", "device", "device"]
    assert source.reads == [[7, 3]]


def test_a_lookup_larger_than_the_device_tier_reads_the_rest_from_the_host() -> None:
    cache = open_cache("spill")
    look_up(cache, range(100))
    assert repr(cache) == ("<RowCache slot_bytes=16 mode=spill device=64/64 host=36/256 leases=0>")
    rows, origin = look_up(cache, range(100))
    assert origin == ["device"] * 64 + ["host"] * 36
    np.testing.assert_array_equal(rows, rows_of(range(100)))


def test_a_row_goes_down_the_tiers_and_comes_back_up() -> None:
    cache = new_row_cache(device_slots=1, host_slots=1)
    look_up(cache, [1])
    look_up(cache, [2])
    assert cache.rows_by_recency() == ([2], [1])
    assert look_up(cache, [1])[1] == ["host"]
    assert cache.rows_by_recency() == ([1], [2])
    look_up(cache, [3])
    assert cache.rows_by_recency() == ([3], [1])
    assert look_up(cache, [2])[1] == ["source"]


@modes
@devices
def test_many_clients_on_a_small_tier_always_get_their_rows(mode: str, kind: str) -> None:
    with opened_device(kind, seed=1) as device:
        cache = open_cache(mode, device, num_frames=16)

        def client(seed: int) -> None:
            random = np.random.default_rng(seed)
            for _ in range(200 if kind == "cpu" else 40):
                rows = random.choice(1000, 48, replace=False).tolist()
                np.testing.assert_array_equal(look_up(cache, rows, device)[0], rows_of(rows))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(client, range(16)))
        assert cache.num_leases == 0
        assert cache.num_device_rows == 64
        cache.check_integrity()


def wait_for_leases(cache: RowCache, num_leases: int) -> None:
    """Until lookups in other threads have come that far."""
    deadline_s = time.monotonic() + 30
    while cache.num_leases < num_leases:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_second_lookup_waits_for_the_row_that_the_first_is_fetching() -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    def block(rows: list[int]) -> None:
        is_reading.set()
        assert may_end.wait(10)

    source = MemorySource(block)
    cache = new_row_cache(source=source)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(look_up, cache, [5])
        assert is_reading.wait(10)
        second = pool.submit(look_up, cache, [5, 5])
        wait_for_leases(cache, 2)
        assert cache.num_device_rows == 0  # nothing is found before its bytes are there
        may_end.set()
        np.testing.assert_array_equal(first.result()[0], rows_of([5]))
        np.testing.assert_array_equal(second.result()[0], rows_of([5, 5]))
    assert source.reads == [[5]]
    assert cache.num_leases == 0


def test_a_failed_read_admits_nothing_and_those_who_joined_read_for_themselves() -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    def fail_at_six(rows: list[int]) -> None:
        is_reading.set()
        assert may_end.wait(10)
        if 6 in rows:
            raise ReadFailedError("row 6 cannot be read")

    source = MemorySource(fail_at_six)
    cache = new_row_cache(source=source, host_slots=8)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(look_up, cache, [5, 6])
        assert is_reading.wait(10)
        second = pool.submit(look_up, cache, [5])
        wait_for_leases(cache, 3)  # two rows of the first, one of the second
        may_end.set()
        with pytest.raises(ReadFailedError, match="row 6 cannot be read"):
            first.result()
        rows, origin = second.result()
    np.testing.assert_array_equal(rows, rows_of([5]))
    assert origin == ["source"]
    assert source.reads == [[5, 6], [5]]
    assert cache.rows_by_recency() == ([5], [])
    assert cache.counts()[0, :4].tolist() == [0, 0, 1, 0]  # only what did not fail
    assert cache.num_leases == 0
    cache.check_integrity()


@pytest.mark.parametrize("mode", ["none", "spill"])
@devices
@given(
    seed=seeds,
    before=st.lists(st.integers(0, 30), max_size=8),
    outer=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    inner=st.lists(st.lists(st.integers(0, 30), max_size=8), max_size=4),
)
@settings(deadline=None)
def test_others_run_between_probe_and_admit(
    kind: str,
    mode: str,
    seed: int | None,
    before: list[int],
    outer: list[int],
    inner: list[list[int]],
) -> None:
    """While a lookup waits for the source, others evict what it found and admit what it lacks."""
    source = MemorySource()
    host_slots = 4 if mode == "spill" else 0
    with opened_device(kind, seed) as device:
        cache = new_row_cache(
            31, device_slots=4, host_slots=host_slots, source=source, max_positions=8,
            device=device,
        )  # fmt: skip
        look_up(cache, before, device)

        def run_others(fetched: list[int]) -> None:
            source.on_read = lambda rows: None
            for batch in inner:
                others = [row for row in batch if row not in fetched]
                np.testing.assert_array_equal(look_up(cache, others, device)[0], rows_of(others))

        source.on_read = run_others
        np.testing.assert_array_equal(look_up(cache, outer, device)[0], rows_of(outer))
        cache.check_integrity()
        assert cache.num_leases == 0


@pytest.mark.parametrize("mode", ["none", "spill", "inclusive"])
@devices
@given(
    seed=seeds,
    steps=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 30), max_size=8))),
)
@settings(deadline=None)
def test_no_slot_is_reused_before_its_event(
    kind: str, mode: str, seed: int | None, steps: list[tuple[bool, list[int]]]
) -> None:
    """Four frames are in flight on a device that works late."""
    with opened_device(kind, seed) as device:
        cache = new_row_cache(
            31, device_slots=4, host_slots=4 if mode == "spill" else 0, max_positions=8,
            is_inclusive=mode == "inclusive", device=device,
        )  # fmt: skip
        open_lookups: list[OpenLookup] = []
        for is_oldest_first, rows in steps:
            if len(open_lookups) == 4:
                finish(open_lookups.pop(0 if is_oldest_first else -1))
            open_lookups.append(OpenLookup(cache, rows, device))
        while open_lookups:
            finish(open_lookups.pop(0))
        assert cache.num_leases == 0
        cache.check_integrity()


def finish(lookup: OpenLookup) -> None:
    np.testing.assert_array_equal(lookup.finish()[0], rows_of(lookup.rows))


def test_closing_gives_everything_back() -> None:
    with opened_device("cuda-double") as device:
        cache = open_cache("spill", device)
        look_up(cache, [1, 2, 3], device)
        cache.close()
        device.close()
        assert device.budget.charges() == {}
        assert device.host_budget.charges() == {}
        assert list(machine_of(device).registered) == []


def test_a_kernel_that_fails_ends_the_lookups_and_not_the_process() -> None:
    with opened_device("cuda-double") as device:
        cache = open_cache("spill", device)
        lookups = [OpenLookup(cache, [number], device) for number in range(2)]
        machine_of(device).fail("kernel", LAUNCH_FAILURE)
        for lookup in lookups:
            with pytest.raises(DeviceError, match="restart the server"):
                lookup.finish()
