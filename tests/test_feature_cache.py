"""Tables by name: shared slabs, budgets, absent keys and lookups in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache import FeatureCache, Lookup, LookupResult
from cache.device import Device
from cache.errors import AbsentKeyError, UnknownTableError
from cache.table import write_table
from tests.cache_fixtures import DEVICES, Rows, machine_of, opened_device, rows_of

NUM_ROWS = 1000


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with opened_device(request.param) as opened:
        yield opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, dim, default in (("a", 4, 0.0), ("b", 4, 9.0), ("narrow", 3, 0.0), ("wide", 32, 0.0)):
        rows = rows_of(np.arange(NUM_ROWS) + 10_000 * ord(name[0]), dim)
        write_table(tmp_path / name, [rows], dim=dim, default_value=default)
    write_table(tmp_path / "strict", [rows_of(range(10))], dim=4, absent="error")
    return tmp_path


def expected(names: list[str], keys: list[int], dim: int) -> NDArray[np.float32]:
    numbers = [key + 10_000 * ord(names[i % len(names)][0]) for i, key in enumerate(keys)]
    return rows_of(numbers, dim)


def open_cache(root: Path, device: Device, **options: Any) -> FeatureCache:
    defaults = {"table_memory_bytes": 4096, "host_memory_bytes": 0, "max_positions": 64}
    return FeatureCache.open(root, device, **(defaults | options))


def look_up(
    device: Device, cache: FeatureCache, names: list[str], keys: list[int], dim: int = 4
) -> tuple[NDArray[np.float32], LookupResult]:
    memory = Rows(device, len(keys), dim)
    with cache.frame() as frame:
        lookup = Lookup(tuple(names), np.array(keys, dtype=np.int64), memory.array)
        (result,) = frame.lookup([lookup])
    rows = memory.values()
    memory.close()
    return rows, result


def test_keys_of_several_tables_alternate_by_column(root: Path, device: Device) -> None:
    cache = open_cache(root, device)
    keys = [3, 3, 3, 500, 999, 3]
    rows, result = look_up(device, cache, ["a", "b"], keys)
    np.testing.assert_array_equal(rows, expected(["a", "b"], keys, 4))
    assert (result.num_source, result.num_device) == (4, 2)


def test_tables_of_one_slot_size_share_a_slab(root: Path, device: Device) -> None:
    slabs = open_cache(root, device).stats().slabs
    assert [(slab.slot_bytes, slab.tables) for slab in slabs] == [
        (16, ("a", "b", "narrow", "strict")),
        (128, ("wide",)),
    ]


def test_slabs_divide_the_memories_by_the_bytes_of_their_rows(root: Path, device: Device) -> None:
    """176 kB are 48,160 B of 16 B slots and 128,000 B of 128 B slots."""
    slabs = open_cache(root, device, table_memory_bytes=17_616).stats().slabs
    assert [slab.device_slots for slab in slabs] == [4816 // 16, 12_800 // 128]
    everything = open_cache(root, device, table_memory_bytes=1 << 20, host_memory_bytes=1 << 20)
    slabs = everything.stats().slabs
    assert [(slab.device_slots, slab.mode) for slab in slabs] == [
        (3010, "inclusive"), (1000, "inclusive"),
    ]  # fmt: skip


@pytest.mark.parametrize("host_memory_bytes", [0, 100_000, 1 << 20])
def test_one_batch_asks_several_slabs(root: Path, device: Device, host_memory_bytes: int) -> None:
    cache = open_cache(root, device, host_memory_bytes=host_memory_bytes, num_frames=1)
    random = np.random.default_rng(1)
    for _ in range(30):
        keys = [random.integers(0, NUM_ROWS, n).tolist() for n in (7, 200, 0, 64)]
        names = [["a"], ["wide"], ["b"], ["narrow"]]
        memories = [Rows(device, len(k), dim) for k, dim in zip(keys, (4, 32, 4, 3), strict=True)]
        with cache.frame() as frame:
            results = frame.lookup(
                [
                    Lookup(tuple(n), np.array(k, dtype=np.int64), memory.array)
                    for n, k, memory in zip(names, keys, memories, strict=True)
                ]
            )
        for n, k, memory, result in zip(names, keys, memories, results, strict=True):
            out = memory.values()
            memory.close()
            np.testing.assert_array_equal(out, expected(n, k, out.shape[1]))
            assert len(result.tiers) == len(k)
    cache.check_integrity()
    assert [slab.leases for slab in cache.stats().slabs] == [0, 0]


def test_the_host_memory_decides_the_mode(root: Path, device: Device) -> None:
    for host_memory_bytes, mode in ((0, "none"), (60_000, "spill"), (200_000, "inclusive")):
        cache = open_cache(root, device, host_memory_bytes=host_memory_bytes, num_frames=1)
        assert {slab.mode for slab in cache.stats().slabs} == {mode}
        _, result = look_up(device, cache, ["a"], [1, 2])
        assert (result.num_host, result.num_source) == ((2, 0) if mode == "inclusive" else (0, 2))


def test_a_small_slab_is_inclusive_beside_a_large_one(root: Path, device: Device) -> None:
    write_table(root / "huge", [np.zeros((100_000, 64), np.float32)], dim=64)
    cache = open_cache(root, device, host_memory_bytes=1 << 20, num_frames=1)
    assert [slab.mode for slab in cache.stats().slabs] == ["inclusive", "inclusive", "spill"]


@pytest.mark.parametrize("host_memory_bytes", [0, 1, 2000, 100_000, 2_000_000, 3_000_000])
def test_any_mix_of_tables_opens_with_any_host_memory(
    tmp_path: Path, device: Device, host_memory_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "long", [np.zeros((200_000, 4), np.float32)], dim=4)
    write_table(tmp_path / "wide", [np.ones((300, 64), np.float32)], dim=64)
    device.host_budget.max_bytes = host_memory_bytes
    cache = FeatureCache.open(
        tmp_path, device, table_memory_bytes=1 << 20, host_memory_bytes=host_memory_bytes,
        max_positions=512,
    )  # fmt: skip
    assert (look_up(device, cache, ["wide"], list(range(300)), 64)[0] == 1).all()
    assert ("have no host tier" in caplog.text) == (host_memory_bytes in (1, 2000, 100_000))


def test_absent_keys_give_the_default_row_in_their_place(root: Path, device: Device) -> None:
    cache = open_cache(root, device)
    rows, result = look_up(device, cache, ["b"], [5, 1_234_567, 7, -1])
    np.testing.assert_array_equal(rows[[0, 2]], expected(["b"], [5, 7], 4))
    assert (rows[[1, 3]] == 9.0).all()
    assert result.num_absent == 2
    assert result.tiers.tolist() == [2, 3, 2, 3]


def test_absent_keys_evict_nothing(root: Path, device: Device) -> None:
    cache = open_cache(root, device, table_memory_bytes=17_616)
    look_up(device, cache, ["a"], list(range(50)))
    look_up(device, cache, ["a"], list(range(5_000_000, 5_010_000)))
    _, result = look_up(device, cache, ["a"], list(range(50)))
    assert result.num_device == 50
    table = cache.stats().tables[0]
    assert (table.name, table.absent_keys, table.device_rows) == ("a", 10_000, 50)


def test_a_strict_table_refuses_an_absent_key(root: Path, device: Device) -> None:
    cache = open_cache(root, device)
    with pytest.raises(AbsentKeyError, match="'strict' has no key 10: expected 0 to 9"):
        look_up(device, cache, ["strict"], [3, 10])
    assert cache.stats().slabs[0].leases == 0
    np.testing.assert_array_equal(look_up(device, cache, ["strict"], [3])[0], rows_of([3]))


def test_a_strict_lookup_in_parts_is_refused_before_its_first_part(
    root: Path, device: Device
) -> None:
    cache = open_cache(root, device)
    with pytest.raises(AbsentKeyError, match="'strict' has no key 77"):
        look_up(device, cache, ["strict"], [1] * 200 + [77])
    (strict,) = (table for table in cache.stats().tables if table.name == "strict")
    assert (strict.device_rows, strict.device_hits, strict.source_rows) == (0, 0, 0)


def test_a_small_slab_needs_no_share_of_the_staging(root: Path, device: Device) -> None:
    """48 kB of rows fit in a half of 100 kB; the staging of the wide slab comes from its half."""
    cache = open_cache(root, device, host_memory_bytes=100_000, num_frames=1)
    assert [slab.mode for slab in cache.stats().slabs] == ["inclusive", "spill"]


def test_an_unknown_table_is_named(root: Path, device: Device) -> None:
    with pytest.raises(UnknownTableError, match="no table is called 'c'"):
        look_up(device, open_cache(root, device), ["c"], [1])


@pytest.mark.parametrize("host_memory_bytes", [0, 100_000, 1 << 20])
def test_a_lookup_larger_than_a_part_is_done_in_parts(
    root: Path, device: Device, host_memory_bytes: int
) -> None:
    cache = open_cache(root, device, host_memory_bytes=host_memory_bytes, num_frames=1)
    keys = np.random.default_rng(3).integers(0, NUM_ROWS, 1001).tolist()
    rows, result = look_up(device, cache, ["a", "b", "strict"], [k % 10 for k in keys])
    np.testing.assert_array_equal(rows[::3], expected(["a"], [k % 10 for k in keys[::3]], 4))
    np.testing.assert_array_equal(rows[2::3], rows_of([k % 10 for k in keys[2::3]]))
    rows, result = look_up(device, cache, ["a", "b"], keys)
    np.testing.assert_array_equal(rows, expected(["a", "b"], keys, 4))
    assert len(result.tiers) == 1001
    cache.check_integrity()


def test_counts_are_by_table_and_position(root: Path, device: Device) -> None:
    cache = open_cache(root, device, table_memory_bytes=17_616)
    look_up(device, cache, ["a", "b"], [1, 1, 1, 2])
    look_up(device, cache, ["a"], [1, 1, -5])
    a, b = cache.stats().tables[:2]
    assert (a.device_hits, a.host_hits, a.source_rows, a.absent_keys) == (3, 0, 1, 1)
    assert (b.device_hits, b.source_rows, b.device_rows) == (0, 2, 2)


def test_a_model_waits_for_the_events_of_the_frame_and_for_nothing_else(
    root: Path, device: Device
) -> None:
    cache = open_cache(root, device)
    memories = [Rows(device, 3), Rows(device, 3, 32)]
    keys = np.array([5, 700, 5])
    with cache.frame() as frame:
        lookups = [
            Lookup((name,), keys, memory.array)
            for name, memory in zip(("a", "wide"), memories, strict=True)
        ]
        frame.lookup(lookups)
        for event in frame.events():
            device.compute.wait_for(event)
        for name, memory in zip(("a", "wide"), memories, strict=True):
            rows = expected([name], keys.tolist(), memory.array.shape[1])
            np.testing.assert_array_equal(memory.values(), rows)


def test_a_lookup_has_no_copy_that_waits_for_a_stream(root: Path) -> None:
    with opened_device("cuda-double") as device:
        cache = open_cache(root, device)
        num_copies = machine_of(device).num_pageable_copies
        for _ in range(3):
            look_up(device, cache, ["a", "b"], list(range(100)))
        assert machine_of(device).num_pageable_copies == num_copies


def test_closing_gives_the_memory_back(root: Path, device: Device) -> None:
    cache = FeatureCache.open(root, device, table_memory_bytes=4096, host_memory_bytes=1 << 20)
    assert device.budget.used_bytes > 4000
    cache.close()
    assert (device.budget.used_bytes, device.host_budget.used_bytes) == (0, 0)
