"""Memory full of words that tell where they are, plans that read it, and copies to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.check import MIB, WrongResultError
from cache.arena import Arena
from cache.cuda import CudaDevice
from cache.cuda_buffers import CudaPlanBuffer
from cache.device import Output, PlanBuffer, SlabMemory
from cache.plan import TIER_BITS, TIER_FILLED

_CHUNK_BYTES = 32 * MIB
_NUM_CHECKED_PARTS = 16
_CHECKED_ROWS = 512  # of each part


def words_at(first: int, stop: int) -> NDArray[np.uint32]:
    """What the words of a slab hold: the bits of a float32 from 1 to 2, by the word's number."""
    return _mixed(np.arange(first, stop, dtype=np.uint32))


def rows_at(slots: NDArray[np.int64], num_words: int) -> NDArray[np.uint32]:
    """The words of the slots, [n, num_words]."""
    numbers = slots[:, None] * num_words + np.arange(num_words)
    return _mixed(numbers.astype(np.uint32))


def _mixed(numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    numbers *= np.uint32(2654435761)  # odd, so that different numbers stay different
    numbers >>= np.uint32(9)
    numbers |= np.uint32(0x3F800000)
    return numbers


def distinct_slots(random: np.random.Generator, num_slots: int, count: int) -> NDArray[np.int64]:
    """`count` slots all over the slab, in random order: one of each of `count` equal parts."""
    width = num_slots // count
    slots = np.arange(count, dtype=np.int64) * width
    slots += random.integers(0, width, count)
    random.shuffle(slots)
    return slots


def fill_host(memory: NDArray[np.uint32]) -> None:
    """Write the words."""
    for first, stop in _chunks(len(memory)):
        memory[first:stop] = words_at(first, stop)


def fill_device(device: CudaDevice, address: int, num_words: int) -> None:
    """Write the words to device memory; blocks."""
    stage = device.reserve_staging("words", min(_CHUNK_BYTES, 4 * num_words))
    words = stage.array(0, (stage.max_bytes // 4,), np.uint32)
    for first, stop in _chunks(num_words):
        words[: stop - first] = words_at(first, stop)
        device.copy_to_device(address + 4 * first, words.ctypes.data, 4 * (stop - first))
        device.copies.record().wait()
    stage.close()


def _chunks(num_words: int) -> Iterator[tuple[int, int]]:
    size = _CHUNK_BYTES // 4
    return ((first, min(first + size, num_words)) for first in range(0, num_words, size))


class Reads(NamedTuple):
    """A plan that reads `slots` in order; fills, if any, are of device slots 0, 1, ..."""

    buffer: PlanBuffer
    slots: NDArray[np.int64]
    num_fills: int


class SlabReader:
    """Plans over one slab whose rows go to one output."""

    def __init__(
        self,
        device: CudaDevice,
        memory: SlabMemory,
        output: Any,
        slots: Sequence[NDArray[np.int64]],
        tier: int,
    ) -> None:
        """`slots` is those of each plan; `output` float32 [n, dim] of device memory.

        With the tier TIER_FILLED the slots are of the host, and the rows go to the device tier too.
        """
        self._device = device
        self._memory = memory
        self.output = output
        self.plans = []
        for plan_slots in slots:
            buffer = device.new_plan_buffer(len(plan_slots))
            num_fills = len(plan_slots) if tier == TIER_FILLED else 0
            entries = np.arange(num_fills)
            buffer.plan.reads[:] = (entries if num_fills else plan_slots) << TIER_BITS | tier
            buffer.plan.fill_slot[:num_fills] = entries
            buffer.plan.fill_from[:num_fills] = plan_slots[:num_fills]
            buffer.plan.spill_slot[:num_fills] = -1
            self.plans.append(Reads(buffer, plan_slots, num_fills))

    def launches(self) -> list[Callable[[], object]]:
        """Calls that enqueue the kernel, with the plans on the device from now on."""
        return [self._launch(plan) for plan in self.plans]

    def executions(self) -> list[Callable[[], object]]:
        """Calls that enqueue what a lookup does: the copy of a plan and the kernel."""
        return [self._execution(plan) for plan in self.plans]

    def check(self, calls: Sequence[Callable[[], object]]) -> None:
        """Run the call of each plan and compare rows all over its output.

        Raises `WrongResultError`.
        """
        for call, plan in zip(calls, self.plans, strict=True):
            self._check(call, plan.slots)

    def close(self) -> None:
        """Give the plans' memory back."""
        self._device.compute.record().wait()
        for plan in self.plans:
            plan.buffer.close()

    def _check(self, call: Callable[[], object], slots: NDArray[np.int64]) -> None:
        num_rows, num_words = self.output.shape
        with self._device.calls():
            self._device.cupy.cuda.runtime.memsetAsync(
                self.output.data.ptr, 0xFF, self.output.nbytes, self._device.compute.pointer
            )
        call()
        count = min(_CHECKED_ROWS, num_rows)
        firsts = np.unique(np.linspace(0, num_rows - count, _NUM_CHECKED_PARTS).astype(np.int64))
        parts = self._device.read_back(
            [
                (self.output[first:].data.ptr, (count, num_words), np.dtype(np.uint32))
                for first in firsts.tolist()
            ]
        )
        for first, part in zip(firsts.tolist(), parts, strict=True):
            expected = rows_at(slots[first : first + count], num_words)
            if not np.array_equal(part, expected):
                raise WrongResultError(
                    f"rows of {4 * num_words} bytes from position {first} on are not those of "
                    "their slots"
                )

    def _launch(self, plan: Reads) -> Callable[[], object]:
        stream = self._device.compute
        assert isinstance(plan.buffer, CudaPlanBuffer)
        launch = self._device.upload(
            stream, plan.buffer, len(plan.slots), plan.num_fills, self._memory,
            [Output(0, self.output)],
        )  # fmt: skip
        return lambda: self._device.launch(stream, launch)

    def _execution(self, plan: Reads) -> Callable[[], object]:
        outputs = [Output(0, self.output)]
        return lambda: self._device.execute(
            self._device.compute, plan.buffer, len(plan.slots), plan.num_fills, self._memory,
            outputs,
        )  # fmt: skip


def copies(
    device: CudaDevice, target: int, sources: Sequence[int], num_bytes: int, kind: int
) -> list[Callable[[], object]]:
    """Calls that enqueue a plain copy of `num_bytes` from each of the addresses."""
    runtime = device.cupy.cuda.runtime

    def copy(source: int) -> None:
        with device.calls():
            runtime.memcpyAsync(target, source, num_bytes, kind, device.compute.pointer)

    return [partial(copy, source) for source in sources]


def committed(arena: Arena) -> Arena:
    """The arena, with all its memory."""
    arena.commit(0, arena.max_bytes)
    return arena
