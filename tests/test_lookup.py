"""Table lookups in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from cache import FeatureCache, open_device
from cache.feature_cache import Frame
from server.lookup import TableLookup
from tests import model_zoo


class StuckCache(FeatureCache):
    """Lookups wait for `gate`, like those on a disk that does not answer."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.entered = threading.Event()
        self.gate = threading.Event()

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        self.entered.set()
        assert self.gate.wait(timeout=10)
        with super().frame() as frame:
            yield frame


@pytest.fixture
def features(tmp_path: Path) -> Iterator[StuckCache]:
    model_zoo.feature_table(tmp_path)
    device = open_device("cpu", max_bytes=1 << 20, max_host_bytes=1 << 20)
    features = StuckCache.open(
        tmp_path / "tables", device, table_memory_bytes=1 << 16, host_memory_bytes=1 << 16
    )
    assert isinstance(features, StuckCache)
    yield features
    features.close()


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
