"""Memory that batches use on a GPU: plans, inputs, and outputs on their way to the host.

What is used again is kept: pinning memory and growing a pool are slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.arena import Arena
from cache.device import Event, Output, Pooling
from cache.errors import OutOfMemoryError
from cache.plan import new_plan

if TYPE_CHECKING:
    from cache.cuda import CudaDevice

_MIN_BLOCK_BYTES = 4096
_NUM_OUTPUT_WORDS = 6  # of an output's descriptor; see kernels.cu


def plan_bytes(max_positions: int) -> int:
    """The size of a plan buffer, in each of the two memories."""
    # Of each position: its read, a fill, a bag's offset, and at worst an output of its own.
    return 8 * (max_positions * (1 + 3 + 1 + _NUM_OUTPUT_WORDS) + 64)


class CudaPlanBuffer:
    """A plan in pinned memory, as the words that `kernels.cu` describes, and its device copy.

    The reads are in their place from the start; `execute` puts the rest behind them, so that one
    copy brings everything to the GPU.
    """

    def __init__(self, device: CudaDevice, max_positions: int) -> None:
        num_bytes = plan_bytes(max_positions)
        self._device = device.reserve("plans", num_bytes)
        self._device.commit(0, num_bytes)
        try:
            self._host = device.reserve_staging("plans", num_bytes)
        except BaseException:  # whatever it was, nobody else can give the device's half back
            self._device.close()
            raise
        self.words: NDArray[np.int64] = self._host.array(0, (num_bytes // 8,), np.int64)
        self.device_words = self._device.array(0, (num_bytes // 8,), np.int64)
        self.plan = new_plan(max_positions, self.words)

    def close(self) -> None:
        """Give both memories back."""
        del self.words, self.device_words, self.plan
        self._host.close()
        self._device.close()


class CudaBuffers:
    """Inputs of one batch at a time, in VRAM or in pinned memory."""

    def __init__(self, device: CudaDevice, *, is_on_host: bool) -> None:
        self._device = device
        self._is_on_host = is_on_host
        self._name_to_host: dict[str, Arena] = {}
        self._name_to_device: dict[str, Arena] = {}

    def rows(self, name: str, num_keys: int, dim: int) -> Any:
        """A CuPy array, or a pinned NumPy array."""
        blocks = self._host_block if self._is_on_host else self._device_block
        return blocks(name, num_keys * dim * 4).array(0, (num_keys, dim), np.float32)

    def put(self, name: str, parts: Sequence[NDArray[Any]]) -> Any:
        """A CuPy array; bfloat16, which CuPy does not know, as its bits in uint16."""
        if self._is_on_host or parts[0].dtype == np.object_:
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        shape = parts[0].shape
        if len(parts) > 1:
            shape = (sum(len(part) for part in parts), *shape[1:])
        num_bytes = sum(part.nbytes for part in parts)
        dtype = parts[0].dtype
        staged = self._host_block(name, num_bytes).array(0, shape, dtype)
        if len(parts) == 1:
            staged[...] = parts[0]
        else:
            np.concatenate(parts, out=staged)
        dtype = np.dtype(np.uint16) if dtype.kind == "V" else dtype
        array = self._device_block(name, num_bytes).array(0, shape, dtype)
        if num_bytes:
            self._device.copy_to_device(array.data.ptr, staged.ctypes.data, num_bytes)
        return array

    def copied(self) -> Event:
        """An event of the copy stream."""
        return self._device.copies.record()

    def close(self) -> None:
        """Give the memory back."""
        for blocks in (self._name_to_host, self._name_to_device):
            while blocks:
                blocks.popitem()[1].close()

    def _host_block(self, name: str, num_bytes: int) -> Arena:
        return _grown(self._name_to_host, name, num_bytes, self._device.reserve_staging)

    def _device_block(self, name: str, num_bytes: int) -> Arena:
        return _grown(self._name_to_device, name, num_bytes, self._device.reserve)


class PinnedBlocks:
    """Pinned memory for outputs on their way to the host, used again and again."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free: list[Arena] = []
        self._mutex = threading.Lock()

    def acquire(self, num_bytes: int) -> Arena:
        """A block of at least that size: the smallest, or a new one in the largest one's place.

        So there are never more blocks than there were uses at once.
        """
        with self._mutex:
            self._free.sort(key=lambda arena: arena.max_bytes)
            for index, arena in enumerate(self._free):
                if arena.max_bytes >= num_bytes:
                    return self._free.pop(index)
            too_small = self._free.pop() if self._free else None
        if too_small is not None:
            too_small.close()
        return self._device.reserve_staging("outputs", _block_bytes(num_bytes))

    def release(self, arena: Arena) -> None:
        """End the use of a block."""
        with self._mutex:
            self._free.append(arena)


class WordLayout(NamedTuple):
    """Where the parts of a plan lie in its words."""

    num_outputs: int
    outputs_at: int
    num_units: int
    fills_at: int
    moves_at: int
    num_moves: int
    num_words: int


def write_words(
    buffer: CudaPlanBuffer, num_reads: int, num_fills: int, outputs: Sequence[Output]
) -> WordLayout:
    """Put outputs, offsets, fills and moves behind the reads."""
    words, plan = buffer.words, buffer.plan
    used = [output for output in outputs if len(output.rows)]
    outputs_at = num_reads
    offsets_at = outputs_at + _NUM_OUTPUT_WORDS * len(used)
    fills_at = offsets_at + sum(len(output.rows) + 1 for output in used if output.pooling)
    moves_at = fills_at + 3 * num_fills
    num_moves = len(plan.move_to)
    num_words = moves_at + 2 * num_moves
    assert num_words <= len(words), "the plan is larger than its buffer"
    descriptors = []
    num_units = 0
    for output in used:
        num_rows, dim = output.rows.shape
        bag_offsets_at = -1
        if output.pooling is not Pooling.NONE:
            bag_offsets_at, offsets_at = offsets_at, offsets_at + num_rows + 1
            assert output.offsets is not None, "bags need offsets"
            words[bag_offsets_at:offsets_at] = output.offsets
        address = _address(output.rows)
        descriptors.append(
            (num_units, output.first, address, dim, output.pooling, bag_offsets_at)
        )  # fmt: skip
        num_units += num_rows
    if descriptors:
        table = np.array(descriptors, dtype=np.int64).ravel()
        words[outputs_at : outputs_at + table.size] = table
    fills = words[fills_at:moves_at].reshape(num_fills, 3)
    fills[:, 0] = plan.fill_slot[:num_fills]
    fills[:, 1] = plan.fill_from[:num_fills]
    fills[:, 2] = plan.spill_slot[:num_fills]
    moves = words[moves_at:num_words].reshape(num_moves, 2)
    moves[:, 0] = plan.move_from
    moves[:, 1] = plan.move_to
    return WordLayout(len(used), outputs_at, num_units, fills_at, moves_at, num_moves, num_words)


def _address(array: Any) -> int:
    """Of a CuPy array, or of pinned memory, which the GPU knows by the same address."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def _grown(
    blocks: dict[str, Arena], name: str, num_bytes: int, reserve: Callable[[str, int], Arena]
) -> Arena:
    """The block of that name, replaced by a larger one where it is too small."""
    if name not in blocks or blocks[name].max_bytes < num_bytes:
        if name in blocks:
            blocks.pop(name).close()
        try:
            arena = reserve("inputs", _block_bytes(num_bytes))
            arena.commit(0, arena.max_bytes)
        except OutOfMemoryError:  # what is asked for may fit all the same
            arena = reserve("inputs", num_bytes)
            arena.commit(0, num_bytes)
        blocks[name] = arena
    return blocks[name]


def _block_bytes(num_bytes: int) -> int:
    """A power of two, so that a growing batch changes its block a few times only."""
    return max(_MIN_BLOCK_BYTES, 1 << max(0, num_bytes - 1).bit_length())
