"""A small batch end to end: 26 tables, 64 keys of each, from keys on the host to rows on the GPU.

The feature cache plans on the CPU and enqueues one copy and one kernel; torch copies the keys and
enqueues 26 kernels on tables that are all on the GPU. Both end with a wait for an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.batch_tables import (
    DIM,
    NUM_SAMPLES,
    NUM_TABLES,
    ROW_BYTES,
    TABLES,
    Keys,
    batches_with_misses,
    random_batches,
    table_rows,
    write_tables,
)
from benchmarks.gpu.check import MIB, Check, WrongResultError
from benchmarks.gpu.report import Aim, Figure
from benchmarks.gpu.timing import Samples
from benchmarks.gpu.torch_embedding import TorchEmbeddings, microseconds, torch_contender
from cache import FeatureCache, Lookup, warm_up
from cache.cuda import CudaDevice, CudaStream
from cache.device import Output, PlanBuffer, SlabMemory, Stream

HOT_SHARE = 0.1  # of a table's rows: what all keys but the misses are drawn from
DEVICE_SHARE = 0.3  # of all rows, in the device tier, where some keys miss
AIM = Aim(is_at_least=False, ratio=1.0)  # where all keys hit, as torch has all rows on the GPU

_NUM_POSITIONS = 8192
_NUM_DISTINCT = 64  # batches of hits, used in turn
_MIN_BATCHES = 20

_TORCH = "torch, 26 embedding calls"


class MeasuredDevice(CudaDevice):
    """A GPU that notes when plans are enqueued, and between which events they are executed."""

    spans: list[Span]
    is_measuring = False

    def execute(
        self,
        stream: Stream,
        buffer: PlanBuffer,
        num_reads: int,
        num_fills: int,
        memory: SlabMemory,
        outputs: Sequence[Output],
    ) -> None:
        """As of any GPU."""
        assert isinstance(stream, CudaStream)
        arguments = (stream, buffer, num_reads, num_fills, memory, outputs)
        if not self.is_measuring:
            super().execute(*arguments)
            return
        with self.calls():
            start, stop = self.cupy.cuda.Event(), self.cupy.cuda.Event()
            stream.stream.record(start)
        started_s = time.perf_counter()
        super().execute(*arguments)
        enqueued_s = time.perf_counter()
        with self.calls():
            stream.stream.record(stop)
        self.spans.append(Span(started_s, enqueued_s, start, stop))


@dataclass(frozen=True, slots=True)
class Span:
    """One plan: host times around its enqueuing, and events around its execution."""

    started_s: float
    enqueued_s: float
    start: Any
    stop: Any


@dataclass(slots=True)
class Stages:
    """Microseconds of each batch."""

    planning: list[float] = field(default_factory=list)
    enqueuing: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    on_device: list[float] = field(default_factory=list)


def run(check: Check) -> None:
    """Batches that hit, then batches of which a tenth misses."""
    root = check.work / "batch-tables"
    num_rows = check.scale.table_rows
    write_tables(root, num_rows)
    warm_up()
    contender = torch_contender(check, num_rows)
    all_bytes = NUM_TABLES * num_rows * ROW_BYTES
    random = np.random.default_rng(26)
    hits = random_batches(num_rows, _NUM_DISTINCT, random)
    what = "26 x 64 keys, all hits"
    _measure(check, root, what, all_bytes, num_rows, hits, contender, AIM)
    num_hot = max(1, int(HOT_SHARE * num_rows))
    misses = batches_with_misses(num_rows, num_hot, 3 * check.scale.num_batches, random)
    device_bytes = int(DEVICE_SHARE * all_bytes)
    what = "26 x 64 keys, 10 % misses"
    _measure(check, root, what, device_bytes, num_hot, misses, contender, None)


def _measure(
    check: Check,
    root: Path,
    what: str,
    device_bytes: int,
    num_hot: int,
    batches: Sequence[Keys],
    contender: TorchEmbeddings | None,
    aim: Aim | None,
) -> None:
    """Measure with the first `num_hot` rows of each table in the device tier at the start."""
    host_bytes = NUM_TABLES * check.scale.table_rows * ROW_BYTES
    with check.open_device(
        max_bytes=device_bytes + 64 * MIB, max_host_bytes=host_bytes, kind=MeasuredDevice
    ) as device:
        device.spans = []
        cache = FeatureCache.open(
            root,
            device,
            table_memory_bytes=device_bytes,
            host_memory_bytes=host_bytes,
            is_direct_io=False,
            num_frames=2,
        )
        try:
            with closing(_Lookups(device, cache)) as lookup:
                lookup.bring_to_device(num_hot)
                _measure_lookup(check, what, lookup, batches, contender, aim)
        finally:
            cache.close()


def _measure_lookup(
    check: Check,
    what: str,
    lookup: _Lookups,
    batches: Sequence[Keys],
    contender: TorchEmbeddings | None,
    aim: Aim | None,
) -> None:
    count = check.scale.num_batches
    turns = [batches[number % len(batches)] for number in range(3 * count)]
    for keys in turns[:count]:  # warms up, and fills the device tier with what is hot
        lookup.run(keys)
        if contender is not None:
            contender.run(keys)
    lookup.check(turns[0], check.scale.table_rows)
    before = lookup.counts()
    ours, theirs = _take_turns(check, lookup, contender, turns[count : 2 * count])
    num_hits, num_positions = (lookup.counts() - before).tolist()
    check.note(f"{what}: {100 * num_hits / num_positions:.1f} % were in the device tier")
    stages = lookup.stages(turns[2 * count :], lambda: check.is_late)
    lookup.check(turns[-1], check.scale.table_rows)
    _report(check, what, ours, theirs, aim)
    for name in ("planning", "enqueuing", "waiting", "on_device"):
        _add(check, f"{what}: {name.replace('_', ' ')}", Samples(tuple(getattr(stages, name))))


def _report(
    check: Check, what: str, ours: Samples, theirs: Samples | None, aim: Aim | None
) -> None:
    """The median is judged by the aim."""
    details = {"num_batches": len(ours.values)}
    median = Figure(f"{what}: end to end, p50", ours.median, "us", details=details)
    tail = Figure(f"{what}: end to end, p99", ours.percentile(99), "us", details=details)
    median = replace(median, low=ours.percentile(10), high=ours.percentile(90))
    if theirs is not None:
        median = replace(
            median,
            ceiling=theirs.median,
            ceiling_is=_TORCH,
            ratio=ours.over(theirs),
            aim=aim,
        )
        ceiling = theirs.percentile(99)
        tail = replace(tail, ceiling=ceiling, ceiling_is=_TORCH, ratio=tail.value / ceiling)
    check.add(median)
    check.add(tail)


def _add(check: Check, what: str, samples: Samples) -> None:
    check.add(
        Figure(
            what,
            samples.median,
            "us",
            low=samples.percentile(10),
            high=samples.percentile(90),
            details={"p99": samples.percentile(99), "num_batches": len(samples.values)},
        )
    )


def _take_turns(
    check: Check,
    lookup: _Lookups,
    contender: TorchEmbeddings | None,
    batches: Sequence[Keys],
) -> tuple[Samples, Samples | None]:
    """Microseconds of each batch, by the cache and by torch."""
    ours, theirs = [], []
    for number, keys in enumerate(batches):
        if number >= _MIN_BATCHES and check.is_late:
            break
        ours.append(microseconds(partial(lookup.run, keys)))
        if contender is not None:
            theirs.append(contender.time_us(keys))
    return Samples(tuple(ours)), Samples(tuple(theirs)) if theirs else None


def tier_counts(cache: FeatureCache) -> NDArray[np.int64]:
    """Positions so far that were found in the device tier, and all."""
    tables = cache.stats().tables
    hits = sum(table.device_hits for table in tables)
    return np.array([hits, hits + sum(t.host_hits + t.source_rows for t in tables)])


class _Lookups:
    """Lookups of keys [64, 26] into one output on the GPU."""

    def __init__(self, device: MeasuredDevice, cache: FeatureCache) -> None:
        self._device = device
        self._cache = cache
        self._buffers = device.new_buffers()
        self._out = self._buffers.rows("embeddings", NUM_SAMPLES * NUM_TABLES, DIM)

    def close(self) -> None:
        """Give the output's memory back."""
        self._buffers.close()

    def bring_to_device(self, num_rows: int) -> None:
        """Ask for the first rows of every table once."""
        for name in TABLES:
            for first in range(0, num_rows, _NUM_POSITIONS):
                keys = np.arange(first, min(first + _NUM_POSITIONS, num_rows))
                with self._cache.frame() as frame:
                    out = self._buffers.rows("all", len(keys), DIM)
                    frame.lookup([Lookup((name,), keys, out)])

    def run(self, keys: Keys) -> None:
        """One batch; the rows are there at the end."""
        with self._cache.frame() as frame:
            frame.lookup([Lookup(TABLES, keys.reshape(-1), self._out)])

    def stages(self, batches: Sequence[Keys], is_late: Callable[[], bool]) -> Stages:
        """Each batch taken apart; the events in between cost a little time of their own."""
        stages = Stages()
        self._device.is_measuring = True
        for number, keys in enumerate(batches):
            if number >= _MIN_BATCHES and is_late():
                break
            started_s = time.perf_counter()
            with self._cache.frame() as frame:
                frame.lookup([Lookup(TABLES, keys.reshape(-1), self._out)])
                looked_up_s = time.perf_counter()
            ended_s = time.perf_counter()
            [span] = self._device.spans
            self._device.spans.clear()
            enqueuing_s = span.enqueued_s - span.started_s
            stages.planning.append((looked_up_s - started_s - enqueuing_s) * 1e6)
            stages.enqueuing.append(enqueuing_s * 1e6)
            stages.waiting.append((ended_s - looked_up_s) * 1e6)
            stages.on_device.append(self._elapsed_us(span))
        self._device.is_measuring = False
        return stages

    def check(self, keys: Keys, num_rows: int) -> None:
        """Compare all rows of a batch. Raises `WrongResultError`."""
        self.run(keys)
        source = (self._out.data.ptr, self._out.shape, np.dtype(np.float32))
        [got] = self._device.read_back([source])
        for number in range(NUM_TABLES):
            expected = table_rows(number, num_rows, keys[:, number])
            if got[number::NUM_TABLES].tobytes() != expected.tobytes():
                raise WrongResultError(f"a batch has wrong rows of {TABLES[number]}")

    def counts(self) -> NDArray[np.int64]:
        """As `tier_counts`."""
        return tier_counts(self._cache)

    def _elapsed_us(self, span: Span) -> float:
        with self._device.calls():
            span.stop.synchronize()
            elapsed_ms = self._device.cupy.cuda.get_elapsed_time(span.start, span.stop)
        return float(elapsed_ms) * 1e3
