"""Table lookups in threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from server.lookup import TableLookup
from tests.stuck_cache import StuckCache, stuck_cache


@pytest.fixture
def features(tmp_path: Path) -> Iterator[StuckCache]:
    with stuck_cache(tmp_path) as features:
        yield features


def test_a_lookup_that_does_not_end_is_told_and_those_behind_it_are_dropped(
    features: StuckCache,
) -> None:
    async def story() -> None:
        lookup = TableLookup(features, max_answer_bytes=1000, num_threads=1)
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
        lookup = TableLookup(features, max_answer_bytes=1000, num_threads=2)
        body = b'{"keys": [3]}'
        stuck = [asyncio.create_task(lookup.answer("feat", body, None)) for _ in range(50)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), timeout=10) == 1
        features.gate.set()
        await asyncio.gather(*stuck)
        assert lookup.stop()

    asyncio.run(story())
