"""A feature cache whose lookups wait, like those on a disk that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache import FeatureCache, open_device
from cache.feature_cache import Frame
from tests import model_zoo


class StuckCache(FeatureCache):
    """Lookups wait for `gate`; `entered` and `num_entered` tell how many have begun."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.num_entered = 0
        self.entered = threading.Event()
        self.gate = threading.Event()

    @contextmanager
    def frame(self) -> Iterator[Frame]:
        self.num_entered += 1
        self.entered.set()
        assert self.gate.wait(timeout=10)
        with super().frame() as frame:
            yield frame


@contextmanager
def stuck_cache(repository: Path) -> Iterator[StuckCache]:
    """A stuck cache of the table `feat`, written to `repository`."""
    model_zoo.feature_table(repository)
    device = open_device("cpu", max_bytes=1 << 20, max_host_bytes=1 << 20)
    features = StuckCache.open(
        repository / "tables", device, table_memory_bytes=1 << 16, host_memory_bytes=1 << 16
    )
    assert isinstance(features, StuckCache)
    yield features
    features.close()
