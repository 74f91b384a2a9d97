"""Table lookups in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from cache import Device, FeatureCache
from cache.device import CpuBuffers
from server.lookup import MAX_KEPT_BYTES, TableLookup
from server.oip_encode import EncodedResponse
from tests.cache_fixtures import (
    DEVICES,
    new_device,
    new_row_cache,
    opened_device,
    rows_of,
)
from tests.stuck_cache import StuckCache, stuck_cache


@pytest.fixture
def features(tmp_path: Path) -> Iterator[StuckCache]:
    with stuck_cache(tmp_path) as features:
        yield features


def test_a_lookup_that_does_not_end_is_told_and_those_behind_it_are_dropped(
    features: StuckCache,
) -> None:
    async def story() -> None:
        lookup = TableLookup(features, new_device(), max_answer_bytes=1000, num_threads=1)
        running, waiting = (
            asyncio.create_task(lookup.answer("feat", b'{"keys": [3]}', None)) for _ in range(2)
        )
        assert await asyncio.to_thread(features.entered.wait, timeout=10)
        assert not lookup.stop()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        features.gate.set()
        encoded = await running
        assert orjson.loads(b"".join(encoded.parts))["rows"] == [[3.0, 3.25, 3.5, 3.75]]
        assert lookup.stop()

    asyncio.run(story())


def test_lookups_leave_the_threads_of_others_alone(features: StuckCache) -> None:
    async def story() -> None:
        lookup = TableLookup(features, new_device(), max_answer_bytes=1000, num_threads=2)
        body = b'{"keys": [3]}'
        stuck = [asyncio.create_task(lookup.answer("feat", body, None)) for _ in range(50)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), timeout=10) == 1
        features.gate.set()
        await asyncio.gather(*stuck)
        assert lookup.stop()

    asyncio.run(story())


def new_lookup_body(keys: list[int]) -> bytes:
    """A request in the protocol's form that asks for binary rows."""
    return orjson.dumps(
        {
            "inputs": [
                {"name": "keys", "datatype": "INT64", "shape": [len(keys)], "data": keys},
            ],
            "outputs": [{"name": "rows", "parameters": {"binary_data": True}}],
        }
    )


def binary_rows(encoded: EncodedResponse) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.frombuffer(encoded.parts[-1], np.float32).reshape(-1, 4)


async def look_up_all(
    features: FeatureCache, device: Device, batches: list[list[int]]
) -> list[EncodedResponse]:
    lookup = TableLookup(features, device, max_answer_bytes=1 << 24, num_threads=2)
    try:
        return await asyncio.gather(
            *(lookup.answer("feat", new_lookup_body(keys), None) for keys in batches)
        )
    finally:
        assert lookup.stop()


@pytest.mark.parametrize("kind", DEVICES)
def test_an_answer_keeps_its_rows_when_later_lookups_use_the_memory_again(kind: str) -> None:
    with opened_device(kind) as device:
        features = FeatureCache([new_row_cache(device=device, num_frames=2)], num_frames=2)
        batches = [list(range(first, first + 5)) for first in range(0, 50, 5)]
        answers = asyncio.run(look_up_all(features, device, batches))
        for keys, encoded in zip(batches, answers, strict=True):
            np.testing.assert_array_equal(binary_rows(encoded), rows_of(keys))
        features.close()


class HostMemory:
    """Buffers of a device, and how many of them are open."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_opened = 0

    def opened(self) -> CpuBuffers:
        memory = self
        self.num_open += 1
        self.num_opened += 1

        class CountedBuffers(CpuBuffers):
            def close(self) -> None:
                super().close()
                memory.num_open -= 1

        return CountedBuffers()


def test_a_small_lookup_leaves_its_memory_to_the_next_and_a_large_one_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, memory = new_device(), HostMemory()
    monkeypatch.setattr(device, "new_buffers", lambda *, is_on_host: memory.opened())
    features = FeatureCache([new_row_cache(device=device)], num_frames=1)

    async def story() -> None:
        lookup = TableLookup(features, device, max_answer_bytes=1 << 24, num_threads=1)
        for _ in range(3):
            await lookup.answer("feat", b'{"keys": [3]}', None)
        assert (memory.num_opened, memory.num_open) == (1, 1)
        large = orjson.dumps({"keys": [3] * (1 + MAX_KEPT_BYTES // 16)})
        await lookup.answer("feat", large, None)
        assert memory.num_open == 0
        await lookup.answer("feat", b'{"keys": [3]}', None)
        assert memory.num_open == 1
        assert lookup.stop()
        assert memory.num_open == 0

    asyncio.run(story())
    features.close()
