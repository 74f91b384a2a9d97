"""Kernel launches of the double: arguments checked as a GPU cannot, then the shim's kernels."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.plan import TIER_ABSENT, TIER_BITS, TIER_DEVICE, TIER_FILLED, TIER_HOST, TIER_MASK
from cache.row_format import RowFormat
from tests.cuda_double.machine import Machine
from tests.cuda_double.memory import bytes_at
from tests.cuda_shim import KernelTrap, Shim, load_shim

SOURCE = Path(__file__).parents[2] / "cache" / "kernels.cu"
NAME_TO_FORMAT = {f"execute_{row_format.value}": row_format for row_format in RowFormat}
_OUTPUT_WORDS = 6


class Arguments(NamedTuple):
    """The parameters of every kernel of `kernels.cu`, in their order."""

    words: int
    num_outputs: int
    outputs_at: int
    num_units: int
    fills_at: int
    num_free_fills: int
    moves_at: int
    num_moves: int
    device_slots: int
    host_slots: int
    slot_bytes: int
    device_scales: int
    host_scales: int
    default_of: int
    device_marks: int
    host_marks: int


def used_memory(machine: Machine, arguments: Arguments) -> tuple[tuple[int, int], ...]:
    """The memory that a launch uses whatever its plan is; raises `MisuseError`."""
    on_device = {
        "words": arguments.words,
        "device slots": arguments.device_slots,
        "default rows": arguments.default_of,
        "device scales": arguments.device_scales,
        "device marks": arguments.device_marks,
        "host marks": arguments.host_marks,
    }
    on_host = {"host slots": arguments.host_slots, "host scales": arguments.host_scales}
    ranges = []
    for name, address in {**on_device, **on_host}.items():
        if address == 0:
            continue
        found = machine.known(address, 1, name)
        if (found.device is None) != (name in on_host):
            raise machine.misuse(f"{name} are in {found}")
        ranges.append((found.start, found.stop))
    return tuple(ranges)


def check_plan_in_memory(machine: Machine, name: str, arguments: Arguments) -> None:
    """Assert that the words on the device describe a plan that stays in known memory.

    Here, because on the CPU a kernel that follows poisoned words ends the whole process.
    """
    _Check(machine, arguments, NAME_TO_FORMAT[name].dtype.itemsize).run()


@cache
def _shim(is_debug: bool) -> Shim:
    return load_shim(is_debug)


def launch(
    machine: Machine,
    name: str,
    num_blocks: int,
    num_threads: int,
    arguments: Arguments,
    is_debug: bool,
) -> None:
    """Run a kernel with its threads in an order drawn by the machine's seed."""
    seed = machine.random.randrange(1 << 31)
    try:
        _shim(is_debug).launch(name, num_blocks, num_threads, arguments, seed)
    except KernelTrap:
        raise machine.misuse(f"{name} found that the plan breaks the rules of Plan") from None


class _Check:
    def __init__(self, machine: Machine, arguments: Arguments, itemsize: int) -> None:
        self._machine = machine
        self._arguments = arguments
        self._itemsize = itemsize
        self._named_fills: list[NDArray[np.int64]] = []
        memory = machine.known(arguments.words, 8, "words")
        self._words: NDArray[np.int64] = bytes_at(
            arguments.words, (memory.stop - arguments.words) // 8 * 8
        ).view(np.int64)

    def run(self) -> None:
        used_memory(self._machine, self._arguments)
        arguments = self._arguments
        width = self._section(arguments.outputs_at, arguments.num_outputs, _OUTPUT_WORDS)
        first_units = [*width[:, 0].tolist(), arguments.num_units]
        self._assert(arguments.num_outputs == 0 or first_units[0] == 0, "output 0 begins late")
        for index, output in enumerate(width.tolist()):
            self._check_output(output, first_units[index + 1] - first_units[index])
        # The moves come right behind the fills.
        num_fills = (arguments.moves_at - arguments.fills_at) // 3
        self._assert(arguments.num_free_fills <= num_fills, "a free fill is not in the plan")
        fills = self._section(arguments.fills_at, num_fills, 3)
        named = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *self._named_fills]))
        expected = np.arange(arguments.num_free_fills, num_fills)
        self._assert(np.array_equal(named, expected), f"reads name fills {named.tolist()}")
        moves = self._section(arguments.moves_at, arguments.num_moves, 2)
        self._check_slots("filled", fills[:, 0], arguments.device_slots)
        self._check_slots("filled from", fills[:, 1], arguments.host_slots)
        self._check_slots("spilled to", fills[fills[:, 2] != -1, 2], arguments.host_slots)
        self._check_slots("moved", moves, arguments.device_slots)
        self._check_marks(arguments.device_marks, arguments.device_slots)
        self._check_marks(arguments.host_marks, arguments.host_slots)

    def _check_output(self, output: list[int], num_units: int) -> None:
        _, first, rows, dim, pooling, offsets_at = output
        self._assert(num_units >= 0, "outputs are out of order")
        self._assert(0 < dim * self._itemsize <= self._arguments.slot_bytes, f"dim is {dim}")
        self._assert(pooling in (0, 1, 2), f"pooling is {pooling}")
        if num_units == 0:
            return
        self._machine.known(rows, num_units * dim * 4, "rows of an output")
        num_positions = num_units
        if pooling:
            offsets = self._section(offsets_at, num_units + 1, 1)[:, 0]
            self._assert(bool((np.diff(offsets) >= 0).all()), "offsets of bags go back")
            first, num_positions = first + int(offsets[0]), int(offsets[-1] - offsets[0])
        else:
            self._assert(offsets_at == -1, "offsets without pooling")
        reads = self._section(first, num_positions, 1)[:, 0]
        tiers, slots = reads & TIER_MASK, reads >> TIER_BITS
        self._assert(bool((tiers <= TIER_FILLED).all()), "a read is of no tier")
        is_absent, is_near = tiers == TIER_ABSENT, tiers == TIER_DEVICE
        self._named_fills.append(slots[tiers == TIER_FILLED])
        self._check_slots("read", slots[is_near], self._arguments.device_slots)
        self._check_slots("read", slots[tiers == TIER_HOST], self._arguments.host_slots)
        self._check_slots("defaulted", slots[is_absent], self._arguments.default_of, 4)

    def _check_slots(
        self, what: str, slots: NDArray[np.int64], base: int, slot_bytes: int | None = None
    ) -> None:
        if slots.size == 0:
            return
        num_slots = self._num_slots(base, slot_bytes or self._arguments.slot_bytes)
        is_inside = ((slots >= 0) & (slots < num_slots)).all()
        self._assert(bool(is_inside), f"a slot that is {what} is beyond {num_slots} slots")

    def _check_marks(self, marks: int, slots: int) -> None:
        if marks:
            num_slots = self._num_slots(slots, self._arguments.slot_bytes)
            self._machine.known(marks, 4 * num_slots, "marks")

    def _num_slots(self, base: int, slot_bytes: int) -> int:
        memory = self._machine.known(base, 1, "slots")
        return (memory.stop - base) // slot_bytes

    def _section(self, start: int, count: int, width: int) -> NDArray[np.int64]:
        is_inside = 0 <= start <= start + count * width <= len(self._words) and count >= 0
        self._assert(count == 0 or is_inside, f"words {start}+{count * width} are not in the plan")
        if count == 0:
            return self._words[:0].reshape(0, width)
        return self._words[start : start + count * width].reshape(count, width)

    def _assert(self, is_right: bool, text: str) -> None:
        if not is_right:
            raise self._machine.misuse(f"plan on the device: {text}")
