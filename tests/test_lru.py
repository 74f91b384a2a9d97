"""The index against two oracles: a plain-Python model, and libCacheSim's LRU."""

from __future__ import annotations

from collections.abc import Iterator

import libcachesim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import lru
from cache.slab_index import DEVICE_EVICTIONS, SPILLS
from tests.cache_fixtures import look_up, new_row_cache, rows_of
from tests.plain_cache import PlainCache

batches = st.lists(st.lists(st.integers(0, 19), max_size=12), max_size=30)


@pytest.mark.parametrize("mode", ["none", "spill", "inclusive"])
@given(batches=batches, device_slots=st.integers(0, 8), host_slots=st.integers(1, 8))
@settings(deadline=None)
def test_every_batch_agrees_with_the_plain_model(
    mode: str, batches: list[list[int]], device_slots: int, host_slots: int
) -> None:
    is_inclusive = mode == "inclusive"
    host_slots = host_slots if mode == "spill" else 0
    cache = new_row_cache(
        20, device_slots=device_slots, host_slots=host_slots, is_inclusive=is_inclusive,
        max_positions=12,
    )  # fmt: skip
    model = PlainCache(device_slots, host_slots, is_inclusive)
    for batch in batches:
        rows, origin = look_up(cache, batch)
        assert origin == model.lookup(batch)
        np.testing.assert_array_equal(rows, rows_of(batch))
        assert cache.rows_by_recency() == (list(model.device), list(model.host))
        cache.check_integrity()
        assert cache.num_leases == 0
    assert cache.counts()[0, DEVICE_EVICTIONS] == model.hits["evictions"]
    assert cache.counts()[0, SPILLS] == model.hits["spills"]
    cache.close()


def traces() -> Iterator[tuple[str, list[int]]]:
    random = np.random.default_rng(7)
    yield "uniform", random.integers(0, 300, 20_000).tolist()
    yield "skewed", (random.zipf(1.2, 20_000) % 1000).tolist()
    yield "scan", [row % 150 for row in range(5_000)]
    phases = [random.integers(first, first + 120, 4_000) for first in (0, 60, 500)]
    yield "phases", np.concatenate(phases).tolist()


TRACES = dict(traces())


def libcachesim_hits(trace: list[int], num_slots: int) -> int:
    simulated = libcachesim.LRU(cache_size=num_slots)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for row in trace:
        request.obj_id = row
        hits += simulated.get(request)
    return hits


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("num_slots", [1, 17, 100])
def test_hits_equal_those_of_libcachesim(trace: list[int], num_slots: int) -> None:
    cache = new_row_cache(1000, device_slots=num_slots, max_positions=1)
    hits = sum(look_up(cache, [row])[1] == ["device"] for row in trace)
    assert hits == libcachesim_hits(trace, num_slots)
    cache.close()


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_device_and_host_together_are_one_longer_lru(trace: list[int]) -> None:
    """Key by key, spilling makes the two tiers one exact LRU list."""
    cache = new_row_cache(1000, device_slots=30, host_slots=50, max_positions=1)
    hits = sum(look_up(cache, [row])[1] != ["source"] for row in trace)
    assert hits == libcachesim_hits(trace, 80)
    cache.close()


def test_a_leased_slot_is_no_victim_and_returns_when_the_lease_ends() -> None:
    index = lru.new_index(num_rows=10, num_slots=2, max_used=2, max_touches=2)
    for row in (3, 4):
        lru.insert(index, row, lru.take_free(index))
    oldest = int(index.slot_of[3])
    lru.acquire(index, oldest)
    tail = int(index.state[lru.TAIL])
    assert lru.oldest(index) == oldest
    assert lru.find_victim(index, tail) == index.slot_of[4]
    assert lru.remove(index, oldest) == 3
    assert lru.take_free(index) == lru.NONE  # it is held by its lease
    lru.release(index, oldest)
    assert lru.take_free(index) == oldest
