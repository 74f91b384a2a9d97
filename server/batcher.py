"""Dynamic batching: the workers that carry out the policy of `server/batch_queue.py`."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from server.batch_queue import BatchQueue, Queued
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
from server.pacing import Pace
from server.requests import InferenceRequest, InferenceResponse
from server.statistics import BatchTimings, ModelStatistics, RequestTimings

Prepared = TypeVar("Prepared", bound="Closable")


class Closable(Protocol):
    """A prepared batch as the batcher sees it."""

    def close(self) -> None:
        """Gives back what the batch holds, once; blocks. Nothing happens when it is computed."""


class BatchEngine(Protocol[Prepared]):
    """What the batcher needs of the engine. Both stages block, and raise for the whole batch."""

    @property
    def can_overlap(self) -> bool:
        """Whether it is worth it to prepare a batch while another one computes."""

    def prepare(self, requests: Sequence[InferenceRequest]) -> Prepared:
        """Gets everything that the batch needs; holds nothing when it raises."""

    def compute(self, batch: Prepared) -> BatchResult:
        """Runs the model on a prepared batch and closes the batch, also when it raises."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Batch(Generic[Prepared]):
    """A batch that is prepared."""

    requests: list[_Pending]
    num_rows: int
    started_s: float
    prepared: Prepared


Outcome = Answer | ServerError


class Batcher(Generic[Prepared]):
    """Two worker threads that run batches of a queue, and the event loop's side of it.

    A batch is prepared and then computed. One batch at a time is computed, and one is ahead:
    it is prepared while the other computes. It is closed when it is full, or just in time to be
    ready (`Pace`), or when nothing computes. Whichever worker is free takes it. The one
    that computes goes on with the batch that is ahead when that is ready, so an idle model and a
    busy one have no hand-over between threads on the way of a request. An engine that gains nothing
    by it has one worker.

    When a batch fails, its requests are run again one by one, before the queue, so that only the
    faulty one fails. They are prepared anew in their turn: whoever has the turn to compute never
    waits for a frame, so that one frame is enough.

    `start`, `submit` and `stop` are called on one event loop.
    """

    def __init__(
        self,
        name: str,
        engine: BatchEngine[Prepared],
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
        self._pace = Pace()
        self._lock = threading.Lock()  # guards the queue, and all from here to the workers
        self._waiting: list[threading.Condition] = []  # of workers; a stack, see `_wake`
        self._retries: deque[_Pending] = deque()
        self._is_closed = False
        self._has_died = False  # a worker, of a fault of our own: the other one ends too
        self._is_ahead = False  # a batch is being prepared, or is `_next`
        self._next: _Batch[Prepared] | None = None
        self._computing: _Batch[Prepared] | None = None
        self._computing_since_s = 0.0
        self._workers = [
            threading.Thread(target=self._work, name=f"batcher {name}", daemon=False)
            for _ in range(2 if engine.can_overlap else 1)
        ]
        self._num_working = len(self._workers)
        self._loop: asyncio.AbstractEventLoop
        self._unanswered: set[_Pending] = set()  # touched on the event loop only
        self._ended = asyncio.Event()

    def start(self) -> None:
        """Starts the workers; their results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        for worker in self._workers:
            worker.start()

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
        """Refuses new requests, finishes the accepted ones and ends the workers.

        After `grace_s` (None: no limit) those left are answered ShuttingDownError. Returns False
        when the engine still runs then; the workers end when it returns. May be called again.
        """
        with self._lock:
            self._is_closed = True
            self._wake_all()
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._abandon(ShuttingDownError("the server stopped before this request was answered"))
            with self._lock:
                is_running = self._is_ahead or self._computing is not None
            if is_running:
                return False
            await self._ended.wait()
        for worker in self._workers:
            worker.join()
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
        with self._lock:
            if self._is_closed:
                raise ShuttingDownError(f"model {self._name!r} is closing")
            if self._queue.is_full():
                raise QueueFullError(
                    f"the queue of model {self._name!r} is full with {len(self._queue)} requests"
                )
            self._statistics.add_pending(1)
            if self._queue.add(pending):
                self._wake()
        self._unanswered.add(pending)
        return pending

    def _dequeue(self, pending: _Pending) -> bool:
        with self._lock:
            is_dequeued = self._queue.cancel(pending)
            if is_dequeued:
                self._statistics.add_pending(-1)
                self._wake()
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
        has_died = True
        wakeup = threading.Condition(self._lock)
        try:
            while requests := self._take(wakeup):
                batch = self._prepare(requests)
                while batch is not None:
                    batch = self._compute(batch)
            has_died = False
        finally:
            with self._lock:
                self._num_working -= 1
                self._is_closed = True
                self._has_died = self._has_died or has_died
                self._wake_all()
                is_last = not self._num_working
            if is_last:
                try:
                    self._close_left()
                finally:
                    self._call_on_loop(self._end)

    def _close_left(self) -> None:
        """Closes the batches with which no worker goes on, since one has died."""
        left = [self._computing, self._next]
        self._computing = self._next = None
        with ExitStack() as held:  # the memory and the frames are wanted by other models
            for batch in left:
                if batch is not None:
                    held.callback(batch.prepared.close)

    def _end(self) -> None:
        # Nothing is unanswered here unless a worker died of a fault of our own.
        self._is_closed = True
        self._abandon(InferenceError("the model's worker ended"))
        self._ended.set()

    def _take(self, wakeup: threading.Condition) -> list[_Pending] | None:
        """Waits for a batch to prepare; None when no more can come. Each worker has a `wakeup`."""
        with self._lock:
            while not self._has_died:
                wait_s = None
                if not self._is_ahead:
                    if retry := self._next_retry():
                        self._is_ahead = True
                        return [retry]
                    take = self._queue.take(
                        self._clock(), is_draining=self._is_closed, not_before_s=self._close_at_s
                    )
                    self._statistics.add_pending(-len(take.batch) - len(take.expired))
                    if take.expired:
                        self._post([(item, self._timeout_error(item)) for item in take.expired])
                    if take.batch:
                        self._is_ahead = True
                        return take.batch
                    if self._is_closed and self._computing is None:
                        return None
                    wait_s = take.wait_s
                self._waiting.append(wakeup)
                wakeup.wait(None if wait_s == math.inf else wait_s)
                if wakeup in self._waiting:  # the time is over, and nobody called
                    self._waiting.remove(wakeup)
        return None

    def _wake(self) -> None:
        """Has a worker look at the queue; the caller holds the lock.

        It is the one that began to wait last: an idle model stays on one thread, whose memory is in
        the caches. Nobody is woken while another batch is ahead, whose worker wakes one when it is
        its turn, or while a worker is on its way to the queue by itself.
        """
        are_all_idle = len(self._waiting) == self._num_working
        if self._waiting and not self._is_ahead and (self._computing is not None or are_all_idle):
            self._waiting.pop().notify()

    def _wake_all(self) -> None:
        while self._waiting:
            self._waiting.pop().notify()

    def _next_retry(self) -> _Pending | None:
        while self._retries:
            if not (pending := self._retries.popleft()).future.done():
                return pending
        return None

    def _close_at_s(self, num_rows: int) -> float:
        """When to close a batch that has `num_rows` so far."""
        if self._computing is None:
            return -math.inf
        return self._pace.close_at_s(self._computing_since_s, self._computing.num_rows, num_rows)

    def _prepare(self, requests: list[_Pending]) -> _Batch[Prepared] | None:
        """Prepares a batch; None when it failed, or when the other worker goes on with it."""
        started_s = self._clock()
        try:
            prepared = self._engine.prepare([pending.request for pending in requests])
        except BaseException as error:  # the code of a model may even ask the process to end
            self._fail(requests, error)
            with self._lock:
                self._is_ahead = False
            return None
        num_rows = sum(pending.num_rows for pending in requests)
        batch = _Batch(requests, num_rows, started_s, prepared)
        with self._lock:
            if self._computing is not None:
                self._next = batch
                return None
            self._begin(batch)
        return batch

    def _begin(self, batch: _Batch[Prepared]) -> None:
        """Gives a batch its turn to compute; the caller holds the lock."""
        self._computing, self._computing_since_s = batch, self._clock()
        self._is_ahead = False
        if self._queue or self._retries:
            self._wake()  # the other worker may prepare the next one now

    def _compute(self, batch: _Batch[Prepared]) -> _Batch[Prepared] | None:
        """Computes a batch, and returns the next one when it is ready."""
        result = None
        try:
            if all(pending.future.done() for pending in batch.requests):
                batch.prepared.close()  # nobody waits for it any more
            else:
                result = self._engine.compute(batch.prepared)
        except BaseException as error:  # as above
            self._fail(batch.requests, error)
        with self._lock:
            if result is not None and len(self._workers) > 1:
                self._pace.record(batch.num_rows, result.timings)
            following, self._next = self._next, None
            self._computing = None
            if following is not None:
                self._begin(following)
        # Answered at last, so that the next request of an idle model finds nothing computing.
        if result is not None:
            self._statistics.record_execution(batch.num_rows, result.timings)
            self._post(_answers(batch, result))
        return following

    def _fail(self, requests: list[_Pending], error: BaseException) -> None:
        """Answers a request that failed alone; has those of a batch run once more, one by one.

        The caller goes on with them, so nobody need be woken.
        """
        if len(requests) == 1:
            self._post([(requests[0], as_server_error(error, f"model {self._name!r}"))])
            return
        with self._lock:
            self._retries.extend(requests)

    def _post(self, outcomes: list[tuple[_Pending, Outcome]]) -> None:
        self._call_on_loop(_settle_all, outcomes)

    def _call_on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # A run that outlived `stop` may end after the loop; nobody waits for it any more.
            if not self._loop.is_closed():
                raise


def _answers(batch: _Batch[Any], result: BatchResult) -> list[tuple[_Pending, Outcome]]:
    begun_s = batch.started_s + result.timings.wait_s
    return [
        (
            pending,
            Answer(
                response,
                RequestTimings(pending.num_rows, begun_s - pending.arrived_s, result.timings),
            ),
        )
        for pending, response in zip(batch.requests, result.responses, strict=True)
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
