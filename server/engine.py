"""One batch through the feature cache and the model, in two stages that overlap with others'."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from cache import Device, Lookup, LookupResult
from cache.device import Buffers, Event
from cache.plan import TIER_ABSENT
from cache.profiling import nvtx_range
from models.repository import LoadedModel
from server.errors import InferenceError
from server.requests import InferenceRequest, InferenceResponse, Tensors
from server.statistics import BatchTimings

Keys = NDArray[np.int64]


class LookupFrame(Protocol):
    """A frame of the feature cache, held for one batch."""

    def lookup(self, lookups: Sequence[Lookup]) -> Sequence[LookupResult]:
        """Fills the `out` array of each lookup by the time of `events`; blocks for the source."""

    def events(self) -> list[Event]:
        """When all are done, the rows are there."""


class FrameSource(Protocol):
    """What the engine needs of the feature cache."""

    def frame(self) -> AbstractContextManager[LookupFrame]:
        """Blocks until a frame is free. Leaving it waits for the device's work on it."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The responses in the order of the requests, and what the run took."""

    responses: list[InferenceResponse]
    timings: BatchTimings


@dataclass(slots=True, eq=False)
class PreparedBatch:
    """A batch with its inputs where the model reads them; they are there after `ready`.

    It holds a frame of the feature cache and the memory of the inputs until it is closed.
    """

    requests: Sequence[InferenceRequest]
    num_rows: list[int]
    inputs: dict[str, Any]
    ready: list[Event]
    absent: NDArray[np.int64] | None  # absent keys of each row, None when there are none
    wait_s: float
    join_s: float
    lookup_s: float | None
    prepared_s: float
    held: ExitStack

    def close(self) -> None:
        """Waits for the device's work on the inputs, and gives back what is held, once."""
        self.held.close()


class Engine:
    """Runs batches of one model version, in two stages that any thread may call.

    While one batch is in `compute`, the next may be in `prepare`: each batch has memory of its own
    for its inputs, which a later one uses again. No response sees it, because a backend's
    outputs never share memory with its inputs. On the host the inputs of a request alone are not
    copied. Outputs are split into views, which keep the arrays of the whole batch alive.
    """

    def __init__(
        self,
        model: LoadedModel,
        features: FrameSource,
        device: Device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._features = features
        self._device = device
        self._clock = clock
        self._buffers: list[Buffers] = []
        self._free_buffers: list[Buffers] = []  # used as a stack: what was used last is in caches
        fed = {feature.spec.name for feature in model.features}
        self._other_inputs = [s.name for s in model.backend.inputs if s.name not in fed]

    @property
    def can_overlap(self) -> bool:
        """Whether `prepare` does anything worth doing while another batch computes."""
        return bool(self._model.features) or self._model.backend.takes_device_arrays

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
        """Both stages, one after the other."""
        return self.compute(self.prepare(requests))

    def prepare(self, requests: Sequence[InferenceRequest]) -> PreparedBatch:
        """Takes a frame, joins the inputs of requests with equal shape keys, and looks up rows.

        Blocks while no frame is free and while rows are read. All requests fail together: with
        AbsentKeyError of a strict table, SourceError, or DeviceError; then nothing is held.
        """
        num_rows = [request.num_rows for request in requests]
        started_s = self._clock()
        with ExitStack() as held, nvtx_range("prepare"):
            # Taken first, to be given back last: leaving the frame waits for what writes rows.
            buffers = self._take_buffers(held)
            frame = held.enter_context(self._features.frame()) if self._model.features else None
            framed_s = self._clock()
            with nvtx_range("join"):
                inputs, name_to_keys, copied = self._join(requests, buffers, held)
            joined_s = self._clock()
            absent, ready = None, [copied]
            if frame is not None:
                with nvtx_range("lookup"):
                    absent = self._look_up(frame, buffers, name_to_keys, inputs, sum(num_rows))
                ready += frame.events()
            prepared_s = self._clock()
            return PreparedBatch(
                requests,
                num_rows,
                inputs,
                ready,
                absent,
                wait_s=framed_s - started_s,
                join_s=joined_s - framed_s,
                lookup_s=None if frame is None else prepared_s - joined_s,
                prepared_s=prepared_s,
                held=held.pop_all(),
            )

    def compute(self, batch: PreparedBatch) -> BatchResult:
        """Runs the model on a prepared batch and closes it; blocks.

        All its requests fail together: with BackendError, or InferenceError for an output that has
        not one row for each input row.
        """
        with batch.held:
            started_s = self._clock()
            with nvtx_range("compute"):
                outputs = self._model.backend.run(batch.inputs, self._wanted(batch), batch.ready)
            computed_s = self._clock()
        self._check_rows(outputs, sum(batch.num_rows))
        responses = _split(batch, outputs)
        timings = BatchTimings(
            wait_s=batch.wait_s + started_s - batch.prepared_s,
            join_s=batch.join_s,
            lookup_s=batch.lookup_s,
            compute_infer_s=computed_s - started_s,
            compute_output_s=self._clock() - computed_s,
        )
        return BatchResult(responses, timings)

    def close(self) -> None:
        """Gives back the memory of inputs; no batch may be in work."""
        while self._buffers:
            self._buffers.pop().close()
        self._free_buffers.clear()

    def _take_buffers(self, held: ExitStack) -> Buffers:
        try:
            buffers = self._free_buffers.pop()
        except IndexError:
            is_on_host = not self._model.backend.takes_device_arrays
            buffers = self._device.new_buffers(is_on_host=is_on_host)
            self._buffers.append(buffers)
        held.callback(self._free_buffers.append, buffers)
        return buffers

    def _join(
        self, requests: Sequence[InferenceRequest], buffers: Buffers, held: ExitStack
    ) -> tuple[dict[str, Any], dict[str, Keys], Event]:
        """The inputs that the requests bring, and when they are there; the keys, on the host."""
        try:
            inputs = {
                name: buffers.put(name, [request.inputs[name] for request in requests])
                for name in self._other_inputs
            }
        finally:
            copied = buffers.copied()
            held.callback(copied.wait)  # before the buffers are free again
        names = {feature.keys.name for feature in self._model.features}
        return inputs, {name: _joined_keys(name, requests) for name in names}, copied

    def _look_up(
        self,
        frame: LookupFrame,
        buffers: Buffers,
        name_to_keys: Mapping[str, Keys],
        inputs: dict[str, Any],
        num_rows: int,
    ) -> NDArray[np.int64] | None:
        """Adds the feature inputs; returns the absent keys of each row."""
        lookups = []
        for feature in self._model.features:
            keys = name_to_keys[feature.keys.name]
            rows = buffers.rows(feature.spec.name, keys.size, feature.dim)
            inputs[feature.spec.name] = rows.reshape(*keys.shape, feature.dim)
            lookups.append(Lookup(feature.tables, keys.reshape(-1), rows))
        return _absent_by_row(frame.lookup(lookups), num_rows)

    def _wanted(self, batch: PreparedBatch) -> list[str]:
        names = {output.name for request in batch.requests for output in request.outputs}
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


def _joined_keys(name: str, requests: Sequence[InferenceRequest]) -> Keys:
    parts = [cast(Keys, request.inputs[name]) for request in requests]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _absent_by_row(results: Sequence[LookupResult], num_rows: int) -> NDArray[np.int64] | None:
    absent = [result.tiers == TIER_ABSENT for result in results if result.num_absent]
    if not absent:
        return None
    counts = np.zeros(num_rows, np.int64)
    for is_absent in absent:
        counts += is_absent.reshape(num_rows, -1).sum(axis=1)
    return counts


def _split(batch: PreparedBatch, outputs: Tensors) -> list[InferenceResponse]:
    bounds = pairwise(accumulate(batch.num_rows, initial=0))
    is_alone = len(batch.requests) == 1
    absent = batch.absent
    return [
        InferenceResponse(
            {
                output.name: outputs[output.name] if is_alone else outputs[output.name][begin:end]
                for output in request.outputs
            },
            _parameters(0 if absent is None else int(absent[begin:end].sum())),
        )
        for request, (begin, end) in zip(batch.requests, bounds, strict=True)
    ]


def _parameters(num_absent: int) -> Mapping[str, int]:
    return {"absent_keys": num_absent} if num_absent else {}
