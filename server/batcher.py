"""Dynamic batching: the policy, and the worker that carries it out."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from server.engine import BatchResult
from server.errors import (
    InferenceError,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
    ShuttingDownError,
    as_server_error,
)
from server.requests import InferenceRequest, InferenceResponse
from server.statistics import BatchTimings, ModelStatistics, RequestTimings


@dataclass(slots=True, eq=False)
class Queued:
    """A request as the policy sees it; times are in seconds of the caller's clock.

    Only requests with equal `shape_key` share a batch. After `deadline_s` it is never taken.
    """

    num_rows: int
    shape_key: Hashable
    arrived_s: float
    deadline_s: float = math.inf


Item = TypeVar("Item", bound=Queued)


@dataclass(frozen=True, slots=True)
class Take(Generic[Item]):
    """What to do now: run `batch`, or when it is empty, ask again after `wait_s`.

    `wait_s` is None when nothing is queued. `expired` items have left the queue unexecuted.
    """

    batch: list[Item]
    expired: list[Item]
    wait_s: float | None = None


class _Group(OrderedDict[Item, None]):
    """Items of one shape key in order of arrival, and their rows in all."""

    num_rows = 0

    def head(self) -> Item:
        return next(iter(self))


class BatchQueue(Generic[Item]):
    """The batching policy: what runs next, and what it waits for.

    Whole requests leave in order of arrival within one shape key, up to `max_batch_size` rows; one
    that does not fit ends the batch. The oldest head goes first. A batch that is not full waits
    until its head is `max_queue_delay_s` old; one without rows does not wait. With a
    `max_batch_size` of 0 each request runs alone and at once. It has no clock and no lock.
    """

    def __init__(
        self, max_batch_size: int, max_queue_size: int, max_queue_delay_s: float = 0.0
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_queue_size = max_queue_size
        self.max_queue_delay_s = max_queue_delay_s
        self._key_to_group: dict[Hashable, _Group[Item]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __repr__(self) -> str:
        groups = [[item.num_rows for item in group] for group in self._key_to_group.values()]
        return f"BatchQueue(rows={groups})"

    def is_full(self) -> bool:
        """Whether no further request may be added."""
        return self._num_requests >= self.max_queue_size

    def add(self, item: Item) -> bool:
        """Queues a request; returns whether the answer of `take` may have changed by it."""
        assert not self.is_full()
        assert not self.max_batch_size or item.num_rows <= self.max_batch_size
        group = self._key_to_group.setdefault(item.shape_key, _Group())
        group[item] = None
        group.num_rows += item.num_rows
        self._num_requests += 1
        return len(group) == 1 or self._cannot_grow(group)

    def cancel(self, item: Item) -> bool:
        """Takes a request out of the queue; False when it is not (or no longer) queued."""
        group = self._key_to_group.get(item.shape_key)
        if group is None or item not in group:
            return False
        self._remove(group, item)
        return True

    def take(self, now_s: float, *, is_draining: bool = False) -> Take[Item]:
        """The next batch, if one is due; with `is_draining` nothing waits for more to come."""
        expired: list[Item] = []
        while groups := self._key_to_group.values():
            due = [g for g in groups if is_draining or self._due_s(g) <= now_s]
            if not due:
                wait_s = min(self._due_s(group) for group in groups) - now_s
                return Take([], expired, wait_s)
            oldest = min(due, key=lambda group: group.head().arrived_s)
            if batch := self._take_from(oldest, now_s, expired):
                return Take(batch, expired)
        return Take([], expired)

    def _cannot_grow(self, group: _Group[Item]) -> bool:
        # Rows beyond the limit, too, mean that the next request does not fit.
        return group.num_rows >= self.max_batch_size

    def _due_s(self, group: _Group[Item]) -> float:
        if self._cannot_grow(group) or not group.num_rows:
            return -math.inf
        return group.head().arrived_s + self.max_queue_delay_s

    def _take_from(self, group: _Group[Item], now_s: float, expired: list[Item]) -> list[Item]:
        batch: list[Item] = []
        num_rows = 0
        while group:
            item = group.head()
            is_expired = item.deadline_s <= now_s
            if not is_expired and batch and num_rows + item.num_rows > self.max_batch_size:
                break
            self._remove(group, item)
            if is_expired:
                expired.append(item)
            else:
                batch.append(item)
                num_rows += item.num_rows
        return batch

    def _remove(self, group: _Group[Item], item: Item) -> None:
        del group[item]
        group.num_rows -= item.num_rows
        self._num_requests -= 1
        if not group:
            del self._key_to_group[item.shape_key]


class BatchEngine(Protocol):
    """What the batcher needs of the engine."""

    def run(self, requests: Sequence[InferenceRequest]) -> BatchResult:
        """Computes a batch, or raises for all of it; blocks."""

    def answer_empty(self, request: InferenceRequest) -> InferenceResponse | None:
        """The response to a request of zero rows, when the model need not run for it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response and what it took."""

    response: InferenceResponse
    timings: RequestTimings


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending(Queued):
    request: InferenceRequest
    future: asyncio.Future[Answer]


Outcome = Answer | ServerError


class Batcher:
    """One worker thread that runs batches of a queue, and the event loop's side of it.

    While the worker is busy the queue grows and becomes the next batch. `start`, `submit` and
    `stop` are called on one event loop.
    """

    def __init__(
        self,
        name: str,
        engine: BatchEngine,
        queue: BatchQueue[_Pending],
        statistics: ModelStatistics,
        *,
        request_timeout_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._name = name
        self._engine = engine
        self._queue = queue
        self._statistics = statistics
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._wakeup = threading.Condition()  # guards the queue and the two flags
        self._is_closed = False
        self._is_running = False
        self._thread = threading.Thread(target=self._work, name=f"batcher {name}", daemon=False)
        self._loop: asyncio.AbstractEventLoop
        self._unanswered: set[_Pending] = set()  # touched on the event loop only
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Starts the worker; its results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(self, request: InferenceRequest) -> Answer:
        """Queues a request and waits for its answer.

        `request.timeout_ms`, when it is above 0, stands in for the model's `request_timeout_ms`; it
        may be shorter or longer. Both limit the time in the queue only: a request that has begun
        to run is answered. A request whose awaiting task is cancelled is not executed when it is
        still queued, else its result is dropped. A request of zero rows skips the queue when its
        outputs' shapes are known.
        Raises at once ShuttingDownError, InvalidRequestError (more rows than `max_batch_size`) and
        QueueFullError; later RequestTimeoutError, and what `as_server_error` makes of a failed run.
        """
        if not request.num_rows and (empty := self._engine.answer_empty(request)) is not None:
            return Answer(empty, RequestTimings(0, 0.0, BatchTimings(0.0, None, 0.0, 0.0)))
        timeout_s = request.timeout_ms / 1000 or self._request_timeout_s
        pending = self._enqueue(request, timeout_s or math.inf)
        timer = self._loop.call_later(timeout_s, self._expire, pending) if timeout_s else None
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._dequeue(pending)
            raise
        finally:
            self._unanswered.discard(pending)
            if timer is not None:
                timer.cancel()

    async def stop(self, grace_s: float | None = None) -> bool:
        """Refuses new requests, finishes the accepted ones and ends the worker.

        After `grace_s` (None: no limit) those left are answered ShuttingDownError. Returns False
        when the engine still runs then; the worker ends when it returns. May be called again.
        """
        with self._wakeup:
            self._is_closed = True
            self._wakeup.notify()
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._abandon(ShuttingDownError("the server stopped before this request was answered"))
            if self._is_running:
                return False
            await self._ended.wait()
        self._thread.join()
        return True

    def _enqueue(self, request: InferenceRequest, timeout_s: float) -> _Pending:
        now_s = self._clock()
        limit = self._queue.max_batch_size
        if limit and request.num_rows > limit:
            raise InvalidRequestError(
                f"the request has {request.num_rows} rows, model {self._name!r} takes at most "
                f"{limit} (max_batch_size)"
            )
        pending = _Pending(
            num_rows=request.num_rows,
            shape_key=_shape_key(request),
            arrived_s=now_s,
            deadline_s=now_s + timeout_s,
            request=request,
            future=self._loop.create_future(),
        )
        with self._wakeup:
            if self._is_closed:
                raise ShuttingDownError(f"model {self._name!r} is closing")
            if self._queue.is_full():
                raise QueueFullError(
                    f"the queue of model {self._name!r} is full with {len(self._queue)} requests"
                )
            self._statistics.add_pending(1)
            if self._queue.add(pending):
                self._wakeup.notify()
        self._unanswered.add(pending)
        return pending

    def _dequeue(self, pending: _Pending) -> bool:
        with self._wakeup:
            is_dequeued = self._queue.cancel(pending)
            if is_dequeued:
                self._statistics.add_pending(-1)
                self._wakeup.notify()
        return is_dequeued

    def _expire(self, pending: _Pending) -> None:
        if self._dequeue(pending):
            _settle(pending, self._timeout_error(pending))

    def _abandon(self, error: ServerError) -> None:
        for pending in self._unanswered:
            self._dequeue(pending)
            _settle(pending, error)

    def _timeout_error(self, pending: _Pending) -> RequestTimeoutError:
        timeout_ms = (pending.deadline_s - pending.arrived_s) * 1000
        return RequestTimeoutError(
            f"the request waited for model {self._name!r} longer than its timeout of "
            f"{timeout_ms:.4g} ms; it was not executed"
        )

    def _work(self) -> None:
        try:
            while batch := self._next_batch():
                self._run(batch)
        finally:
            self._call_on_loop(self._end)

    def _end(self) -> None:
        # Nothing is unanswered here unless the worker died of a fault of our own.
        self._is_closed = True
        self._abandon(InferenceError("the model's worker ended"))
        self._ended.set()

    def _next_batch(self) -> list[_Pending] | None:
        with self._wakeup:
            self._is_running = False
            while True:
                take = self._queue.take(self._clock(), is_draining=self._is_closed)
                self._statistics.add_pending(-len(take.batch) - len(take.expired))
                if take.expired:
                    self._post([(item, self._timeout_error(item)) for item in take.expired])
                if take.batch:
                    self._is_running = True
                    return take.batch
                if self._is_closed:
                    return None
                self._wakeup.wait(take.wait_s)

    def _run(self, batch: list[_Pending]) -> None:
        """Runs a batch; when it fails, each of its requests alone, so that only the faulty fail."""
        started_s = self._clock()
        try:
            result = self._engine.run([pending.request for pending in batch])
        except Exception as error:
            if len(batch) == 1:
                self._post([(batch[0], as_server_error(error, f"model {self._name!r}"))])
                return
        else:
            num_rows = sum(pending.num_rows for pending in batch)
            self._statistics.record_execution(num_rows, result.timings)
            self._post(_answers(batch, result, started_s))
            return
        for pending in batch:
            if not pending.future.done():
                self._run([pending])

    def _post(self, outcomes: list[tuple[_Pending, Outcome]]) -> None:
        self._call_on_loop(_settle_all, outcomes)

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # A run that outlived `stop` may end after the loop; nobody waits for it any more.
            if not self._loop.is_closed():
                raise


def _answers(
    batch: list[_Pending], result: BatchResult, started_s: float
) -> list[tuple[_Pending, Outcome]]:
    return [
        (
            pending,
            Answer(
                response,
                RequestTimings(pending.num_rows, started_s - pending.arrived_s, result.timings),
            ),
        )
        for pending, response in zip(batch, result.responses, strict=True)
    ]


def _settle_all(outcomes: list[tuple[_Pending, Outcome]]) -> None:
    for pending, outcome in outcomes:
        _settle(pending, outcome)


def _settle(pending: _Pending, outcome: Outcome) -> None:
    if pending.future.done():  # cancelled, or given up by `stop`
        return
    if isinstance(outcome, Answer):
        pending.future.set_result(outcome)
    else:
        pending.future.set_exception(outcome)


def _shape_key(request: InferenceRequest) -> Hashable:
    inputs = request.inputs.items()
    return tuple(sorted((name, array.dtype, array.shape[1:]) for name, array in inputs))
