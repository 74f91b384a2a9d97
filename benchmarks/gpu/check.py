"""What every part is given: the GPU, how much to do, until when, and where results go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.report import Figure, ResultsFile
from cache.cuda import CudaDevice

MIB, GIB = 1 << 20, 1 << 30

DeviceT = TypeVar("DeviceT", bound=CudaDevice)


class SkippedError(Exception):
    """A part, or the rest of it, cannot be measured here; the text says why."""


class WrongResultError(Exception):
    """What was measured gave wrong rows or scores; the text says which."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done. The defaults are for a GPU; on a smaller one, less memory is taken."""

    slab_bytes: int = 4 * GIB  # many times the L2, so that rows come from memory
    launch_bytes: int = 256 * MIB  # rows read by one launch
    host_bytes: int = GIB
    host_launch_bytes: int = 64 * MIB
    managed_bytes: int = GIB
    min_free_for_managed_bytes: int = 8 * GIB
    max_positions: int = 1 << 21  # of a plan
    num_rounds: int = 15
    sample_ms: float = 8.0  # of device work between two events
    table_rows: int = 40_000  # of each of the 26 tables of a small batch
    num_batches: int = 2000
    demo_rows: int = 1_000_000
    demo_batches: int = 400


# So little that nothing is learnt of a GPU: to try the check itself.
QUICK = Scale(
    slab_bytes=MIB,
    launch_bytes=MIB // 32,
    host_bytes=MIB // 8,
    host_launch_bytes=MIB // 64,
    managed_bytes=MIB // 4,
    min_free_for_managed_bytes=MIB,
    max_positions=256,
    num_rounds=3,
    sample_ms=1.0,
    table_rows=40,
    num_batches=4,
    demo_rows=2000,
    demo_batches=4,
)


class Check:
    """One part's run."""

    def __init__(
        self,
        results: ResultsFile,
        *,
        work: Path,
        deadline_s: float,
        scale: Scale = Scale(),
        cupy: Any = None,
        index: int = 0,
        torch_device: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`work` is a folder for files; `deadline_s` is a time of the clock.

        `cupy` and `torch_device` are what a test puts in the place of CuPy and of torch's GPU.
        """
        self.work = work
        self.scale = scale
        self.cupy = cupy
        self.index = index
        self.torch_device = f"cuda:{index}" if torch_device is None else torch_device
        self._results = results
        self._deadline_s = deadline_s
        self._clock = clock

    @property
    def is_late(self) -> bool:
        """Whether the part should come to its end."""
        return self._clock() > self._deadline_s

    def add(self, figure: Figure) -> None:
        """Report a figure at once."""
        self._results.add("figure", figure.as_json())

    def note(self, text: str) -> None:
        """Report something that a reader of the figures must know."""
        self._results.add("note", text)

    def skip(self, reason: str) -> None:
        """Say why the part, or the rest of it, is not measured."""
        self._results.add("skipped", reason)

    def fail(self, text: str) -> None:
        """Say what went wrong."""
        self._results.add("failure", text)

    @contextmanager
    def open_device(
        self, *, max_bytes: int, max_host_bytes: int = 0, kind: type[DeviceT]
    ) -> Iterator[DeviceT]:
        """The GPU, with budgets of exactly these sizes. Raises `DeviceError`."""
        device = kind(
            self.index,
            max_bytes=max_bytes,
            max_host_bytes=max_host_bytes,
            reserve_fraction=0.0,
            cupy=self.cupy,
        )
        try:
            yield device
        finally:
            device.close()
