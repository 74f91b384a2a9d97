"""What a small batch costs in torch: 26 embedding calls on tables that are all on the GPU."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu.batch_tables import (
    NUM_SAMPLES,
    NUM_TABLES,
    TABLES,
    Keys,
    random_batches,
    table_rows,
)
from benchmarks.gpu.check import Check, WrongResultError

_NUM_TRIED = 200  # batches, of each way to copy the keys


class TorchEmbeddings:
    """26 calls of `torch.nn.functional.embedding`, after one copy of all keys to the device.

    The keys are there as torch likes them, one table after the other, in memory that is not pinned,
    as they come from a request. The copy through pinned memory and the direct one are both tried.
    """

    def __init__(self, torch: Any, device: str, num_rows: int) -> None:
        self._torch = torch
        self._torch_device = torch.device(device)
        self._is_cuda = self._torch_device.type == "cuda"
        self._is_pinned = self._is_cuda
        self._pinned = torch.empty(
            (NUM_TABLES, NUM_SAMPLES), dtype=torch.int64, pin_memory=self._is_cuda
        )
        self._tables = [
            torch.from_numpy(table_rows(number, num_rows, np.arange(num_rows))).to(device)
            for number in range(NUM_TABLES)
        ]

    def choose_copy(self, batches: Sequence[Keys]) -> str:
        """Take the faster copy of the keys, and say which it is."""
        medians = {}
        for is_pinned in (True, False) if self._is_cuda else (False,):
            self._is_pinned = is_pinned
            times = [self.time_us(keys) for keys in batches]
            medians[is_pinned] = float(np.median(times[len(times) // 4 :]))
        self._is_pinned = min(medians, key=lambda is_pinned: medians[is_pinned])
        return "through pinned memory" if self._is_pinned else "directly"

    def run(self, keys: Keys) -> list[Any]:
        """One batch; the rows are there at the end."""
        return self._embed(self._by_table(keys))

    def time_us(self, keys: Keys) -> float:
        """Microseconds of a batch; laying out its keys is not counted."""
        by_table = self._by_table(keys)
        return microseconds(partial(self._embed, by_table))

    def _by_table(self, keys: Keys) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(keys.T))

    def _embed(self, keys: Any) -> list[Any]:
        with self._torch.inference_mode():
            if self._is_pinned:
                self._pinned.copy_(keys)
                keys = self._pinned
            on_device = keys.to(self._torch_device, non_blocking=self._is_pinned)
            embedding = self._torch.nn.functional.embedding
            rows = [
                embedding(column, table)
                for column, table in zip(on_device.unbind(0), self._tables, strict=True)
            ]
            if self._is_cuda:
                event = self._torch.cuda.Event()
                event.record()
                event.synchronize()
            return rows

    def check(self, keys: Keys, num_rows: int) -> None:
        """Compare all rows of a batch. Raises `WrongResultError`."""
        for number, rows in enumerate(self.run(keys)):
            expected = table_rows(number, num_rows, keys[:, number])
            if rows.cpu().numpy().tobytes() != expected.tobytes():
                raise WrongResultError(f"torch has wrong rows of {TABLES[number]}")


def microseconds(call: Callable[[], object]) -> float:
    """What a call takes."""
    started_s = time.perf_counter()
    call()
    return (time.perf_counter() - started_s) * 1e6


def torch_contender(check: Check, num_rows: int) -> TorchEmbeddings | None:
    """Torch with all tables on the device; None, with a note, where it cannot be used."""
    if importlib.util.find_spec("torch") is None:
        check.note("torch is not installed: no comparison with its embedding calls")
        return None
    torch = importlib.import_module("torch")
    if check.torch_device.startswith("cuda") and not torch.cuda.is_available():
        check.note("this torch cannot use the GPU: no comparison with its embedding calls")
        return None
    if check.torch_device.startswith("cuda"):
        torch.cuda.set_device(check.torch_device)
    contender = TorchEmbeddings(torch, check.torch_device, num_rows)
    count = min(_NUM_TRIED, check.scale.num_batches)
    batches = random_batches(num_rows, count, np.random.default_rng(1))
    contender.check(batches[0], num_rows)
    how = contender.choose_copy(batches)
    check.note(f"torch {torch.__version__} copies the keys {how}, the faster way here")
    return contender
