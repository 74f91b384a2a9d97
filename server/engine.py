"""One batch through the feature cache and the model: join, look up, run, check, split."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from cache import Lookup, LookupResult
from cache.plan import TIER_ABSENT
from models.repository import LoadedModel
from server.errors import InferenceError
from server.requests import InferenceRequest, InferenceResponse, Tensors
from server.statistics import BatchTimings

Array = NDArray[np.generic]


class LookupFrame(Protocol):
    """A frame of the feature cache, held for one batch."""

    def lookup(self, lookups: Sequence[Lookup]) -> Sequence[LookupResult]:
        """Fills the `out` array of each lookup; blocks."""


class FrameSource(Protocol):
    """What the engine needs of the feature cache."""

    def frame(self) -> AbstractContextManager[LookupFrame]:
        """Blocks until a frame is free."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The responses in the order of the requests, and what the run took."""

    responses: list[InferenceResponse]
    timings: BatchTimings


class Engine:
    """Runs batches of one model version, one at a time, from one thread.

    A batch of one request is joined without a copy. Outputs are split into views, which keep the
    arrays of the whole batch alive. Feature rows are looked up into buffers that the next batch
    reuses; no response sees them, because a backend's outputs never share memory with its inputs.
    """

    def __init__(
        self,
        model: LoadedModel,
        features: FrameSource,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._features = features
        self._clock = clock
        self._buffers = {feature.spec.name: _Buffer() for feature in model.features}

    def answer_empty(self, request: InferenceRequest) -> InferenceResponse | None:
        """The response to a request of zero rows, or None when the model must run to shape it."""
        assert self._model.max_batch_size
        assert not request.num_rows
        wanted = {output.name for output in request.outputs}
        specs = [spec for spec in self._model.outputs if spec.name in wanted]
        if any(size < 0 for spec in specs for size in spec.shape[1:]):
            return None
        return InferenceResponse(
            {spec.name: np.empty((0, *spec.shape[1:]), spec.dtype) for spec in specs}
        )

    def run(self, requests: Sequence[InferenceRequest]) -> BatchResult:
        """Computes a batch of requests with equal shape keys; blocks.

        All fail together: with AbsentKeyError of a strict table, BackendError, SourceError,
        or InferenceError for an output that has not one row for each input row.
        """
        num_rows = [request.num_rows for request in requests]
        started_s = self._clock()
        joined = _join_inputs(requests)
        joined_s = self._clock()
        with self._frame() as frame:
            inputs, absent = self._look_up(frame, joined, sum(num_rows))
            looked_up_s = self._clock()
            outputs = self._model.backend.run(inputs, self._wanted(requests))
            computed_s = self._clock()
        self._check_rows(outputs, sum(num_rows))
        responses = _split(requests, num_rows, outputs, absent)
        timings = BatchTimings(
            join_s=joined_s - started_s,
            lookup_s=looked_up_s - joined_s if self._model.features else None,
            compute_infer_s=computed_s - looked_up_s,
            compute_output_s=self._clock() - computed_s,
        )
        return BatchResult(responses, timings)

    def _frame(self) -> AbstractContextManager[LookupFrame | None]:
        return self._features.frame() if self._model.features else nullcontext()

    def _look_up(
        self, frame: LookupFrame | None, joined: Tensors, num_rows: int
    ) -> tuple[dict[str, Array], NDArray[np.int64] | None]:
        """The model's inputs, and the absent keys of each row, None when there are none."""
        inputs = {s.name: joined[s.name] for s in self._model.backend.inputs if s.name in joined}
        if frame is None:
            return inputs, None
        lookups = []
        for feature in self._model.features:
            keys = cast(NDArray[np.int64], joined[feature.keys.name])
            rows = self._buffers[feature.spec.name].take(keys.size, feature.dim)
            inputs[feature.spec.name] = rows.reshape(*keys.shape, feature.dim)
            lookups.append(Lookup(feature.tables, keys.reshape(-1), rows))
        return inputs, _absent_by_row(frame.lookup(lookups), num_rows)

    def _wanted(self, requests: Sequence[InferenceRequest]) -> list[str]:
        names = {output.name for request in requests for output in request.outputs}
        return [spec.name for spec in self._model.outputs if spec.name in names]

    def _check_rows(self, outputs: Tensors, num_rows: int) -> None:
        if not self._model.max_batch_size:
            return
        for name, output in outputs.items():
            if output.shape[:1] != (num_rows,):
                raise InferenceError(
                    f"output {name!r} has shape {list(output.shape)}, expected {num_rows} rows, "
                    "one for each input row"
                )


class _Buffer:
    """Memory for the rows of one feature input; grows to the largest batch and stays."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def take(self, num_keys: int, dim: int) -> NDArray[np.float32]:
        """A [num_keys, dim] view, valid until the next `take`."""
        size = num_keys * dim
        if size > self._memory.size:
            self._memory = np.empty(size, np.float32)
        return self._memory[:size].reshape(num_keys, dim)


def _join_inputs(requests: Sequence[InferenceRequest]) -> Tensors:
    if len(requests) == 1:
        return requests[0].inputs
    return {
        name: np.concatenate([request.inputs[name] for request in requests])
        for name in requests[0].inputs
    }


def _absent_by_row(results: Sequence[LookupResult], num_rows: int) -> NDArray[np.int64] | None:
    absent = [result.tiers == TIER_ABSENT for result in results if result.num_absent]
    if not absent:
        return None
    counts = np.zeros(num_rows, np.int64)
    for is_absent in absent:
        counts += is_absent.reshape(num_rows, -1).sum(axis=1)
    return counts


def _split(
    requests: Sequence[InferenceRequest],
    num_rows: Sequence[int],
    outputs: Tensors,
    absent: NDArray[np.int64] | None,
) -> list[InferenceResponse]:
    bounds = pairwise(accumulate(num_rows, initial=0))
    is_alone = len(requests) == 1
    return [
        InferenceResponse(
            {
                output.name: outputs[output.name] if is_alone else outputs[output.name][begin:end]
                for output in request.outputs
            },
            _parameters(0 if absent is None else int(absent[begin:end].sum())),
        )
        for request, (begin, end) in zip(requests, bounds, strict=True)
    ]


def _parameters(num_absent: int) -> Mapping[str, int]:
    return {"absent_keys": num_absent} if num_absent else {}
