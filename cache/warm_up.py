"""Compiles everything before the first request, by using it on a tiny table."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from cache.device import open_device
from cache.errors import SourceError
from cache.feature_cache import FeatureCache, Lookup
from cache.table import ROW_FILE, write_table

log = logging.getLogger(__name__)


@functools.cache
def warm_up() -> None:
    """Compile all that a lookup can call; blocks for seconds once, then reads Numba's cache."""
    started = time.monotonic()
    log.info("compiling the cache index and kernels")
    for host_memory_bytes in (0, 512, 1024):  # no host tier, a spilling and an inclusive one
        with tempfile.TemporaryDirectory(prefix="hotshelf-") as folder:
            _use(Path(folder), host_memory_bytes)
    log.info("compiled in %.1f s", time.monotonic() - started)


def _use(root: Path, host_memory_bytes: int) -> None:
    """Hit, miss, evict, spill, and lose a read."""
    rows = np.zeros((64, 4), dtype=np.float32)
    write_table(root / "warm-up", [rows], dim=4)
    device = open_device("cpu", max_bytes=1 << 20, max_host_bytes=host_memory_bytes)
    cache = FeatureCache.open(
        root, device, table_memory_bytes=256, host_memory_bytes=host_memory_bytes,
        is_direct_io=False, num_frames=1, max_positions=8,
    )  # fmt: skip
    for first_key in (0, 0, 4, 8, 16, 0):
        _look_up(cache, first_key)
    os.truncate(root / "warm-up" / ROW_FILE, 0)
    with contextlib.suppress(SourceError):
        _look_up(cache, 32)
    cache.close()


def _look_up(cache: FeatureCache, first_key: int) -> None:
    keys = np.array([0, 1, 1, -1, 47], dtype=np.int64) + first_key
    with cache.frame() as frame:
        frame.lookup([Lookup(("warm-up",), keys, np.zeros((len(keys), 4), dtype=np.float32))])
