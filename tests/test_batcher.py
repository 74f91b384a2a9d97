"""The batching policy on tiny integers, and the worker that carries it out."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from models.errors import BackendError
from server.batch_queue import BatchQueue, Queued
from server.batcher import Answer, Batcher
from server.engine import BatchResult
from server.errors import (
    InferenceError,
    InternalError,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
    ShuttingDownError,
)
from server.requests import InferenceRequest, InferenceResponse, RequestedOutput
from server.statistics import BatchTimings, ModelStatistics

T = TypeVar("T")


# The policy.


def new_queue(max_batch_size: int = 8, delay_s: float = 0.0) -> BatchQueue[Queued]:
    return BatchQueue(max_batch_size, max_queue_size=100, max_queue_delay_s=delay_s)


def add(
    queue: BatchQueue[Queued],
    *row_counts: int,
    key: str = "k",
    now_s: float = 0.0,
    deadline_s: float = 1000.0,
) -> list[Queued]:
    items = [Queued(num_rows, key, now_s, deadline_s) for num_rows in row_counts]
    for item in items:
        queue.add(item)
    return items


def rows(items: Sequence[Queued]) -> list[int]:
    return [item.num_rows for item in items]


def test_an_empty_queue_has_nothing_to_run_or_to_wait_for() -> None:
    take = new_queue().take(0.0)
    assert (take.batch, take.expired, take.wait_s) == ([], [], None)


def test_without_a_delay_whatever_is_queued_runs_at_once() -> None:
    queue = new_queue()
    add(queue, 1, 2, 3)
    assert rows(queue.take(0.0).batch) == [1, 2, 3]
    assert len(queue) == 0


def test_a_batch_counts_rows_and_ends_before_the_request_that_does_not_fit() -> None:
    queue = new_queue()
    add(queue, 5, 5, 1, 8)
    assert rows(queue.take(0.0).batch) == [5]  # the 1 would fit, but nobody overtakes
    assert rows(queue.take(0.0).batch) == [5, 1]
    assert rows(queue.take(0.0).batch) == [8]


def test_shapes_never_mix_and_the_oldest_head_goes_first() -> None:
    queue = new_queue()
    add(queue, 1, key="a", now_s=1)
    add(queue, 2, key="b", now_s=2)
    add(queue, 3, key="a", now_s=3)
    assert repr(queue) == "BatchQueue(rows=[[1, 3], [2]])"
    assert rows(queue.take(4).batch) == [1, 3]
    assert rows(queue.take(4).batch) == [2]


def test_with_a_delay_a_batch_waits_until_its_head_is_that_old() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 1, now_s=0)
    add(queue, 1, now_s=4)
    assert queue.take(4).wait_s == 6
    assert rows(queue.take(10).batch) == [1, 1]


def test_a_full_batch_does_not_wait() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 4, 4)
    assert rows(queue.take(0).batch) == [4, 4]


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 5, 5)
    assert rows(queue.take(0).batch) == [5]
    assert queue.take(0).wait_s == 10


def test_a_full_batch_of_another_shape_goes_before_a_head_that_still_waits() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 1, key="a", now_s=0)
    add(queue, 8, key="b", now_s=1)
    assert rows(queue.take(1).batch) == [8]
    assert queue.take(1).wait_s == 9


def test_a_batch_without_rows_does_not_wait() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 0)
    assert rows(queue.take(0).batch) == [0]


def test_a_request_without_rows_shares_the_batch_of_its_neighbour() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 0, 3)
    assert queue.take(0).wait_s == 10
    assert rows(queue.take(10).batch) == [0, 3]


def test_a_draining_queue_waits_for_nothing() -> None:
    queue = new_queue(delay_s=10)
    add(queue, 1)
    assert rows(queue.take(0, is_draining=True).batch) == [1]


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_without_batching_each_request_runs_alone_and_at_once(max_batch_size: int) -> None:
    queue = new_queue(max_batch_size, delay_s=10)
    add(queue, 1, 1)
    assert [rows(queue.take(0).batch) for _ in range(3)] == [[1], [1], []]


def test_an_expired_request_leaves_the_queue_unexecuted() -> None:
    queue = new_queue()
    late, *_ = add(queue, 5, deadline_s=3)
    add(queue, 5)
    take = queue.take(3)
    assert (take.expired, rows(take.batch)) == ([late], [5])


def test_a_queue_of_expired_requests_gives_no_batch() -> None:
    queue = new_queue()
    add(queue, 1, key="a", deadline_s=3)
    add(queue, 2, key="b", deadline_s=3)
    take = queue.take(3)
    assert (take.batch, rows(take.expired), take.wait_s) == ([], [1, 2], None)


def test_a_cancelled_request_is_gone_and_only_once() -> None:
    queue = new_queue()
    first, second = add(queue, 1, 2)
    assert queue.cancel(first)
    assert not queue.cancel(first)
    assert queue.take(0).batch == [second]
    assert not queue.cancel(second)


def test_adding_says_whether_a_waiting_worker_must_look_again() -> None:
    queue = new_queue(delay_s=10)
    items = [Queued(num_rows, "k", 0.0) for num_rows in (1, 1, 1, 5)]
    # The second batch size is of another class than the first, and may be due at another time.
    assert [queue.add(item) for item in items] == [True, True, False, True]


class PolicyMachine(RuleBasedStateMachine):
    """The queue against a plain list that is searched anew each time."""

    max_batch_size = 4
    delay_s = 3

    def __init__(self) -> None:
        super().__init__()
        self.queue = new_queue(self.max_batch_size, self.delay_s)
        self.items: list[Queued] = []
        self.now_s = 0

    @rule(num_rows=st.integers(0, 4), key=st.sampled_from("ab"))
    def add(self, num_rows: int, key: str) -> None:
        self.now_s += 1
        item = Queued(num_rows, key, self.now_s)
        self.queue.add(item)
        self.items.append(item)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.items))
        self.items.remove(item)
        assert self.queue.cancel(item)
        assert not self.queue.cancel(item)

    @rule(is_draining=st.booleans())
    def take(self, is_draining: bool) -> None:
        take = self.queue.take(self.now_s, is_draining=is_draining)
        assert (take.batch, take.expired) == (self.expected_batch(is_draining), [])
        for item in take.batch:
            self.items.remove(item)
        assert (take.wait_s is None) == (bool(take.batch) or not self.items)
        if take.wait_s is not None:
            assert take.wait_s == self.items[0].arrived_s + self.delay_s - self.now_s > 0

    def expected_batch(self, is_draining: bool) -> list[Queued]:
        for head in self.items:
            group = [item for item in self.items if item.shape_key == head.shape_key]
            if head is not group[0]:
                continue
            total = sum(rows(group))
            is_due = self.now_s - head.arrived_s >= self.delay_s
            if is_draining or is_due or total >= self.max_batch_size or total == 0:
                while sum(rows(group)) > self.max_batch_size:
                    group.pop()
                return group
        return []

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.queue) == len(self.items)


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


# The worker.


class FakeBatch:
    """A prepared batch that knows whether it is still held."""

    def __init__(self, requests: Sequence[InferenceRequest]) -> None:
        self.requests = requests
        self.is_closed = False
        self.prepared_by = threading.get_ident()
        self.computed_by = 0

    def close(self) -> None:
        self.is_closed = True


class Gate:
    """Holds whoever passes until it is opened or lets one through; tells who has come."""

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self._passes = threading.Semaphore(0)
        self._arrivals = threading.Semaphore(0)

    def pass_through(self) -> None:
        self._arrivals.release()
        if not self.is_open:
            assert self._passes.acquire(timeout=10)

    async def wait_for_one(self) -> None:
        assert await asyncio.to_thread(self._arrivals.acquire, timeout=10)

    def let_one_through(self) -> None:
        self._passes.release()

    def open(self) -> None:
        self.is_open = True
        self._passes.release(100)


class GatedEngine:
    """`y` = `x` + 1; a negative value fails its batch, in `compute` or in `prepare`.

    The gates hold every batch until they are open. `prepared` and `batches` are the rows of each
    request of each batch that came to the two stages.
    """

    def __init__(
        self,
        *,
        is_gated: bool = False,
        knows_empty: bool = True,
        can_overlap: bool = True,
        fails_early: bool = False,
    ) -> None:
        self.prepared: list[list[int]] = []
        self.batches: list[list[int]] = []
        self.held: list[FakeBatch] = []
        self.preparing = Gate(is_open=True)
        self.computing = Gate(is_open=not is_gated)
        self.knows_empty = knows_empty
        self.can_overlap = can_overlap
        self.fails_early = fails_early
        self.timings = BatchTimings(0.0, None, 0.0, 0.0)
        self.error: BaseException = BackendError("negative value")

    def prepare(self, requests: Sequence[InferenceRequest]) -> FakeBatch:
        self.prepared.append([request.num_rows for request in requests])
        self.preparing.pass_through()
        if self.fails_early:
            self.refuse_negative(requests)
        self.held.append(FakeBatch(requests))
        return self.held[-1]

    def compute(self, batch: FakeBatch) -> BatchResult:
        assert not batch.is_closed
        batch.computed_by = threading.get_ident()
        self.batches.append([request.num_rows for request in batch.requests])
        self.computing.pass_through()
        batch.close()
        self.refuse_negative(batch.requests)
        responses = [
            InferenceResponse({"y": cast(Any, request.inputs["x"]) + 1})
            for request in batch.requests
        ]
        return BatchResult(responses, self.timings)

    def refuse_negative(self, requests: Sequence[InferenceRequest]) -> None:
        if any((cast(Any, request.inputs["x"]) < 0).any() for request in requests):
            raise self.error

    def answer_empty(self, request: InferenceRequest) -> InferenceResponse | None:
        return InferenceResponse({"y": np.empty((0, 4))}) if self.knows_empty else None

    async def wait_until_preparing(self) -> None:
        await self.preparing.wait_for_one()

    async def wait_until_running(self) -> None:
        await self.computing.wait_for_one()

    def end_one_run(self) -> None:
        self.computing.let_one_through()

    def open(self) -> None:
        self.preparing.open()
        self.computing.open()


class Bench:
    """A started batcher, its engine and its counters; `clock_s` stands in for the time."""

    def __init__(
        self, engine: GatedEngine, batcher: Batcher[FakeBatch], statistics: ModelStatistics
    ) -> None:
        self.engine = engine
        self.batcher = batcher
        self.statistics = statistics

    def send(self, value: float, num_rows: int = 1, **fields: Any) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.batcher.submit(new_request(value, num_rows, **fields)))

    async def send_and_queue(self, *values: float, num_rows: int = 1) -> list[asyncio.Task[Answer]]:
        tasks = [self.send(value, num_rows) for value in values]
        await asyncio.sleep(0)
        return tasks

    async def occupy(self) -> asyncio.Task[Answer]:
        """A request that runs until the gate lets it end, so that the next ones queue up."""
        running = self.send(0, timeout_ms=1e6)
        await self.engine.wait_until_running()
        return running

    @property
    def num_pending(self) -> int:
        return self.statistics.snapshot().num_pending


def new_request(
    value: float, num_rows: int = 1, width: int = 4, timeout_ms: float = 0.0
) -> InferenceRequest:
    x = np.full((num_rows, width), value, np.float32)
    return InferenceRequest({"x": x}, num_rows, (RequestedOutput("y", True),), None, timeout_ms)


def on_bench(
    story: Callable[[Bench], Awaitable[T]],
    *,
    engine: GatedEngine | None = None,
    max_batch_size: int = 8,
    max_queue_size: int = 1000,
    delay_s: float = 0.0,
    **options: Any,
) -> T:
    """Run a story with a started batcher, which is stopped at the end."""
    engine = engine or GatedEngine()

    async def run() -> T:
        statistics = ModelStatistics()
        queue: BatchQueue[Any] = BatchQueue(max_batch_size, max_queue_size, delay_s)
        batcher = Batcher("m", engine, queue, statistics, **options)
        batcher.start()
        try:
            return await story(Bench(engine, batcher, statistics))
        finally:
            engine.open()
            assert await batcher.stop()
            assert statistics.snapshot().num_pending == 0
            assert all(batch.is_closed for batch in engine.held)

    return asyncio.run(run())


def values(answers: Sequence[Any]) -> list[Any]:
    """The first value of each answer, or the class of its error."""
    return [
        type(answer)
        if isinstance(answer, BaseException)
        else float(answer.response.outputs["y"][0, 0])
        for answer in answers
    ]


def test_each_caller_gets_exactly_its_rows() -> None:
    async def story(bench: Bench) -> None:
        answers = await asyncio.gather(*(bench.send(i, num_rows=i % 4 + 1) for i in range(200)))
        for i, answer in enumerate(answers):
            expected = np.full((i % 4 + 1, 4), i + 1, np.float32)
            np.testing.assert_array_equal(answer.response.outputs["y"], expected)
            assert answer.timings.num_rows == i % 4 + 1
        assert all(sum(batch) <= 8 for batch in bench.engine.batches)
        assert bench.statistics.snapshot().num_executions == len(bench.engine.batches)

    on_bench(story)


def test_while_the_worker_is_busy_the_queue_becomes_the_next_batch() -> None:
    async def story(bench: Bench) -> None:
        first = bench.send(0)
        await bench.engine.wait_until_running()
        rest = await bench.send_and_queue(*range(1, 6))
        assert bench.num_pending == 5
        bench.engine.open()
        await asyncio.gather(first, *rest)
        assert bench.engine.batches == [[1], [1, 1, 1, 1, 1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_the_limit_counts_rows_and_a_larger_request_is_refused() -> None:
    async def story(bench: Bench) -> None:
        await asyncio.gather(bench.send(1, num_rows=5), bench.send(2, num_rows=5))
        await bench.send(1, num_rows=8)
        assert bench.engine.batches == [[5], [5], [8]]
        with pytest.raises(InvalidRequestError, match=r"has 9 rows.*at most 8"):
            await bench.send(1, num_rows=9)

    on_bench(story)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_without_batching_every_request_runs_alone(max_batch_size: int) -> None:
    async def story(bench: Bench) -> None:
        answers = await asyncio.gather(*(bench.send(i) for i in range(4)))
        assert values(answers) == [1, 2, 3, 4]
        assert bench.engine.batches == [[1]] * 4

    on_bench(story, max_batch_size=max_batch_size)


def test_only_equal_inner_shapes_share_a_batch() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        tasks = [bench.send(0, 1, width=3), bench.send(0, 1, width=5), bench.send(0, 2, width=3)]
        await asyncio.sleep(0)
        bench.engine.open()
        shapes = [answer.response.outputs["y"].shape for answer in await asyncio.gather(*tasks)]
        assert shapes == [(1, 3), (1, 5), (2, 3)]
        await running
        assert bench.engine.batches == [[1], [1, 2], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_a_second_input_of_another_inner_shape_or_datatype_keeps_requests_apart() -> None:
    masks = [np.zeros((1, 2), np.int8), np.zeros((1, 3), np.int8), np.zeros((1, 2), np.int16)]

    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        requests = [new_request(i) for i in range(4)]
        for request, mask in zip(requests, [*masks, masks[0]], strict=True):
            assert isinstance(request.inputs, dict)
            request.inputs["mask"] = mask
        tasks = [asyncio.create_task(bench.batcher.submit(request)) for request in requests]
        await asyncio.sleep(0)
        bench.engine.open()
        assert values(await asyncio.gather(running, *tasks)) == [1, 1, 2, 3, 4]
        assert bench.engine.batches == [[1], [1, 1], [1], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_a_full_batch_does_not_wait_for_the_delay() -> None:
    async def story(bench: Bench) -> None:
        await asyncio.gather(*(bench.send(0) for _ in range(8)))
        assert bench.engine.batches == [[1] * 8]

    on_bench(story, delay_s=1000)


@pytest.mark.parametrize("_round", range(10))
@pytest.mark.parametrize("can_overlap", [False, True])
@pytest.mark.parametrize("fails_early", [False, True])
def test_a_poison_request_fails_alone_with_its_own_message(
    fails_early: bool, can_overlap: bool, _round: int
) -> None:
    async def story(bench: Bench) -> None:
        tasks = [bench.send(value) for value in (0, 1, 2, -1, 4, 5, 6, 7)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert values(answers) == [1, 2, 3, InferenceError, 5, 6, 7, 8]
        assert str(answers[3]) == "negative value"
        assert bench.engine.prepared == [[1] * 8] + [[1]] * 8
        assert len(bench.engine.batches) == (7 if fails_early else 9)
        assert bench.statistics.snapshot().num_executions == 7  # those that succeeded

    engine = GatedEngine(fails_early=fails_early, can_overlap=can_overlap)
    on_bench(story, engine=engine, delay_s=1000)


def test_an_unknown_error_is_logged_and_answered_with_a_fixed_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = GatedEngine()
    engine.error = RuntimeError("secret path")

    async def story(bench: Bench) -> None:
        with pytest.raises(ServerError) as caught:
            await bench.send(-1)
        assert type(caught.value) is InternalError
        assert "secret" not in str(caught.value)
        assert values([await bench.send(1)]) == [2]

    with caplog.at_level(logging.ERROR):
        on_bench(story, engine=engine)
    assert "secret path" in caplog.text


@pytest.mark.parametrize("fails_early", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_model_that_asks_the_process_to_end_fails_its_request(
    error: BaseException, fails_early: bool
) -> None:
    engine = GatedEngine(fails_early=fails_early)
    engine.error = error

    async def story(bench: Bench) -> None:
        tasks = [bench.send(value) for value in (0, -1, 2)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert values(answers) == [1, InternalError, 3]
        assert values([await bench.send(1)]) == [2]

    on_bench(story, engine=engine, delay_s=0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_of_our_own_fault_takes_the_other_along() -> None:
    """Nobody hangs, and what was prepared gives back what it holds."""
    engine = GatedEngine(is_gated=True)

    async def story(bench: Bench) -> None:
        first = await bench.occupy()
        tasks = await bench.send_and_queue(*[1] * 8)  # full: it is prepared at once
        while len(engine.held) < 2:
            await asyncio.sleep(0.001)
        later = await bench.send_and_queue(2)
        with patch.object(ModelStatistics, "record_execution", side_effect=RuntimeError):
            engine.open()
            answers = await asyncio.gather(first, *tasks, *later, return_exceptions=True)
        assert values(answers) == [InferenceError] * 10
        assert {str(answer) for answer in answers} == {"the model's worker ended"}
        assert [len(batch) for batch in engine.batches][:1] == [1]
        with pytest.raises(ShuttingDownError):
            await bench.send(1)

    on_bench(story, engine=engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_prepared_after_the_other_worker_died_is_given_back() -> None:
    engine = GatedEngine(is_gated=True)
    may_die = threading.Event()

    def die(*_: object) -> None:
        assert may_die.wait(timeout=10)
        raise RuntimeError

    async def story(bench: Bench) -> None:
        first = await bench.occupy()
        tasks = await bench.send_and_queue(*[1] * 16)  # two full batches
        while len(engine.held) < 2:
            await asyncio.sleep(0.001)
        engine.preparing.is_open = False
        for _ in range(2):
            await engine.wait_until_preparing()
        with patch.object(ModelStatistics, "record_execution", side_effect=die):
            engine.end_one_run()
            await engine.wait_until_preparing()  # the third batch
            may_die.set()
            while [thread.name for thread in threading.enumerate()].count("batcher m") > 1:
                await asyncio.sleep(0.001)
            engine.open()
            answers = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert values(answers) == [InferenceError] * 17
        assert [batch.is_closed for batch in engine.held] == [True] * 3

    on_bench(story, engine=engine)


def test_a_timeout_fires_while_the_worker_is_busy_and_the_request_never_runs() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        with pytest.raises(RequestTimeoutError, match=" 20 ms; it was not executed"):
            await bench.send(1, num_rows=3)
        assert bench.num_pending == 0
        assert not running.done()
        bench.engine.open()
        assert values([await running, await bench.send(2, timeout_ms=1e6)]) == [1, 3]
        assert bench.engine.batches == [[1], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True), request_timeout_s=0.02)


def test_a_timeout_limits_the_time_in_the_queue_and_not_the_run() -> None:
    async def story(bench: Bench) -> None:
        await bench.occupy()
        (begun,) = await bench.send_and_queue(1)
        bench.engine.end_one_run()
        await bench.engine.wait_until_running()
        clock_s[0] = 2000.0
        bench.engine.open()
        assert values([await begun]) == [2]

    clock_s = [0.0]
    engine = GatedEngine(is_gated=True)
    on_bench(story, engine=engine, request_timeout_s=1000.0, clock=lambda: clock_s[0])


def test_a_request_may_shorten_or_lengthen_the_timeout_of_its_model() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        longer = bench.send(1, timeout_ms=100_000)
        with pytest.raises(RequestTimeoutError, match=" 5 ms"):
            await bench.send(2, timeout_ms=5)
        with pytest.raises(RequestTimeoutError, match=" 30 ms"):
            await bench.send(3)
        bench.engine.open()
        assert values(await asyncio.gather(running, longer)) == [1, 2]

    on_bench(story, engine=GatedEngine(is_gated=True), request_timeout_s=0.03)


def test_the_worker_itself_never_takes_a_request_past_its_deadline() -> None:
    clock_s = [0.0]

    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        (late,) = await bench.send_and_queue(1)
        clock_s[0] = 2000.0
        bench.engine.open()
        answers = await asyncio.gather(running, late, return_exceptions=True)
        assert values(answers) == [1, RequestTimeoutError]
        assert bench.engine.batches == [[1]]

    engine = GatedEngine(is_gated=True)
    on_bench(story, engine=engine, request_timeout_s=1000.0, clock=lambda: clock_s[0])


def test_abandoned_requests_are_not_executed() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        abandoned = await bench.send_and_queue(*range(50))
        for task in abandoned:
            task.cancel()
        normal = bench.send(1)
        await asyncio.wait(abandoned)
        assert bench.num_pending == 1
        bench.engine.open()
        assert values(await asyncio.gather(running, normal)) == [1, 2]
        assert bench.engine.batches == [[1], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_leaving_a_running_batch_harms_no_neighbour() -> None:
    async def story(bench: Bench) -> None:
        await bench.occupy()
        leaving, staying = await bench.send_and_queue(0, 1)
        bench.engine.end_one_run()
        await bench.engine.wait_until_running()
        leaving.cancel()
        await asyncio.wait([leaving])
        bench.engine.open()
        assert values([await staying]) == [2]
        assert leaving.cancelled()
        assert bench.engine.batches == [[1], [1, 1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_a_request_that_left_is_not_retried() -> None:
    async def story(bench: Bench) -> None:
        await bench.occupy()
        leaving, poison, staying = await bench.send_and_queue(0, -1, 1)
        bench.engine.end_one_run()
        await bench.engine.wait_until_running()
        leaving.cancel()
        await asyncio.wait([leaving])
        bench.engine.open()
        answers = await asyncio.gather(poison, staying, return_exceptions=True)
        assert values(answers) == [InferenceError, 2]
        assert bench.engine.batches == [[1], [1, 1, 1], [1], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_a_full_queue_refuses_at_once() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        queued = await bench.send_and_queue(1, 2)
        with pytest.raises(QueueFullError, match="full with 2 requests"):
            await bench.send(3)
        queued[0].cancel()
        await asyncio.wait(queued[:1])
        replacement = bench.send(4)
        await asyncio.sleep(0)
        bench.engine.open()
        assert values(await asyncio.gather(running, queued[1], replacement)) == [1, 3, 5]

    on_bench(story, engine=GatedEngine(is_gated=True), max_queue_size=2)


def test_zero_rows_are_answered_without_a_run_when_their_shape_is_known() -> None:
    async def story(bench: Bench) -> None:
        answer = await bench.send(0, num_rows=0)
        assert answer.response.outputs["y"].shape == (0, 4)
        assert bench.engine.batches == []

    on_bench(story, delay_s=1000)


def test_zero_rows_of_unknown_shape_run_without_waiting_for_a_window() -> None:
    async def story(bench: Bench) -> None:
        answer = await bench.send(0, num_rows=0)
        assert answer.response.outputs["y"].shape == (0, 4)
        assert bench.engine.batches == [[0]]

    on_bench(story, engine=GatedEngine(knows_empty=False), delay_s=1000)


def test_stop_answers_what_was_accepted_and_refuses_what_comes_later() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        queued = await bench.send_and_queue(1, 2)
        stopping = asyncio.create_task(bench.batcher.stop(grace_s=100))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDownError):
            await bench.send(3)
        bench.engine.open()
        assert await stopping
        assert values(await asyncio.gather(running, *queued)) == [1, 2, 3]

    on_bench(story, engine=GatedEngine(is_gated=True), delay_s=0.01)


def test_stop_does_not_wait_for_the_delay() -> None:
    async def story(bench: Bench) -> None:
        (queued,) = await bench.send_and_queue(1)
        assert await bench.batcher.stop(grace_s=100)
        assert values([await queued]) == [2]

    on_bench(story, delay_s=1000)


def test_what_outlives_the_grace_period_is_answered_as_shutting_down() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        queued = await bench.send_and_queue(1, 2)
        assert not await bench.batcher.stop(grace_s=0.01)  # the engine still runs
        answers = await asyncio.gather(running, *queued, return_exceptions=True)
        assert values(answers) == [ShuttingDownError] * 3
        bench.engine.open()
        assert await bench.batcher.stop()
        assert bench.engine.batches == [[1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


# Two batches in work.


def test_a_full_batch_is_prepared_while_another_one_computes() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        await bench.engine.wait_until_preparing()
        following = await bench.send_and_queue(*range(8))
        await bench.engine.wait_until_preparing()
        assert (bench.engine.prepared, bench.engine.batches) == ([[1], [1] * 8], [[1]])
        bench.engine.open()
        assert values(await asyncio.gather(running, *following)) == [1, *range(1, 9)]
        assert bench.engine.batches == [[1], [1] * 8]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_at_most_one_batch_is_ahead() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        following = await bench.send_and_queue(*range(24))
        for _ in range(2):
            await bench.engine.wait_until_preparing()
        assert bench.num_pending == 16
        bench.engine.end_one_run()
        await bench.engine.wait_until_running()
        await bench.engine.wait_until_preparing()
        assert bench.num_pending == 8
        bench.engine.open()
        await asyncio.gather(running, *following)
        assert bench.engine.batches == [[1], *[[1] * 8] * 3]

    on_bench(story, engine=GatedEngine(is_gated=True))


class HandClock:
    """A clock that the story sets; `looked_at` tells that a worker has asked for the time since."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.looked_at = threading.Event()
        self._thread = threading.get_ident()

    def __call__(self) -> float:
        now_s = self.now_s
        if threading.get_ident() != self._thread:
            self.looked_at.set()
        return now_s


def test_a_batch_that_can_grow_waits_for_its_time_and_takes_what_has_come_by_then() -> None:
    clock = HandClock()

    async def story(bench: Bench) -> None:
        first = bench.send(0, num_rows=3)
        await bench.engine.wait_until_running()
        bench.engine.end_one_run()
        await first  # from now on it is known how long two or three rows take
        running = bench.send(0, num_rows=3)
        await bench.engine.wait_until_running()
        clock.now_s = 500.0
        clock.looked_at.clear()
        tasks = await bench.send_and_queue(1, num_rows=2)
        assert await asyncio.to_thread(clock.looked_at.wait, timeout=10)
        tasks += await bench.send_and_queue(2)
        clock.now_s = 700.0  # past 1000 - 400
        tasks.append(bench.send(3, width=5))  # a new shape has the worker look again
        for _ in range(3):
            await bench.engine.wait_until_preparing()
        assert bench.engine.prepared == [[3], [3], [2, 1]]
        bench.engine.open()
        assert values(await asyncio.gather(running, *tasks)) == [1, 2, 3, 4]

    engine = GatedEngine(is_gated=True)
    engine.timings = BatchTimings(100.0, 300.0, 900.0, 100.0, wait_s=5000.0)
    on_bench(story, engine=engine, clock=clock)


def test_an_engine_that_cannot_overlap_has_one_batch_in_work() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        following = await bench.send_and_queue(*range(8))
        assert bench.engine.prepared == [[1]]
        bench.engine.open()
        await asyncio.gather(running, *following)
        assert len({batch.computed_by for batch in bench.engine.held}) == 1

    on_bench(story, engine=GatedEngine(is_gated=True, can_overlap=False))


def test_an_idle_model_has_no_hand_over_between_threads() -> None:
    async def story(bench: Bench) -> None:
        for i in range(20):
            await bench.send(i)
        assert all(batch.prepared_by == batch.computed_by for batch in bench.engine.held)

    on_bench(story)


def test_the_wait_of_a_prepared_batch_is_time_in_the_queue() -> None:
    async def story(bench: Bench) -> None:
        answer = await bench.send(1)
        assert answer.timings.queue_s == 16.0
        assert answer.timings.batch.compute_input_s == 3.0

    engine = GatedEngine()
    engine.timings = BatchTimings(1.0, 2.0, 4.0, 8.0, wait_s=16.0)
    on_bench(story, engine=engine, clock=lambda: 0.0)


def test_a_prepared_batch_that_nobody_waits_for_is_not_computed() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        abandoned = await bench.send_and_queue(*range(8))
        for _ in range(2):
            await bench.engine.wait_until_preparing()
        for task in abandoned:
            task.cancel()
        await asyncio.wait(abandoned)
        normal = bench.send(1)
        bench.engine.open()
        assert values(await asyncio.gather(running, normal)) == [1, 2]
        assert bench.engine.batches == [[1], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_what_is_prepared_when_the_grace_ends_is_not_computed() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        prepared = await bench.send_and_queue(*range(8))
        for _ in range(2):
            await bench.engine.wait_until_preparing()
        assert not await bench.batcher.stop(grace_s=0.01)
        answers = await asyncio.gather(running, *prepared, return_exceptions=True)
        assert values(answers) == [ShuttingDownError] * 9
        bench.engine.open()
        assert await bench.batcher.stop()
        assert bench.engine.batches == [[1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_a_batch_that_is_being_prepared_keeps_the_engine_running() -> None:
    async def story(bench: Bench) -> None:
        bench.engine.preparing.is_open = False
        (reading,) = await bench.send_and_queue(1)
        await bench.engine.wait_until_preparing()
        assert not await bench.batcher.stop(grace_s=0.01)
        with pytest.raises(ShuttingDownError):
            await reading
        bench.engine.open()
        assert await bench.batcher.stop()
        assert bench.engine.batches == []

    on_bench(story)


def test_stop_computes_what_is_prepared_and_prepares_what_is_queued() -> None:
    async def story(bench: Bench) -> None:
        running = await bench.occupy()
        following = await bench.send_and_queue(*range(11))
        stopping = asyncio.create_task(bench.batcher.stop(grace_s=100))
        await asyncio.sleep(0)
        bench.engine.open()
        assert await stopping
        assert values(await asyncio.gather(running, *following)) == [1, *range(1, 12)]
        assert bench.engine.batches == [[1], [1] * 8, [1] * 3]

    on_bench(story, engine=GatedEngine(is_gated=True))


def test_a_failed_batch_goes_on_after_the_one_that_is_prepared() -> None:
    async def story(bench: Bench) -> None:
        await bench.occupy()
        poisoned = await bench.send_and_queue(1, 2, -1)
        bench.engine.end_one_run()
        for _ in range(2):
            await bench.engine.wait_until_preparing()
        await bench.engine.wait_until_running()
        following = await bench.send_and_queue(*range(8))
        await bench.engine.wait_until_preparing()
        last = await bench.send_and_queue(100)
        bench.engine.open()
        answers = await asyncio.gather(*poisoned, *following, *last, return_exceptions=True)
        assert values(answers) == [2, 3, InferenceError, *range(1, 9), 101]
        assert bench.engine.batches == [[1], [1] * 3, [1] * 8, [1], [1], [1], [1]]

    on_bench(story, engine=GatedEngine(is_gated=True))


@pytest.mark.parametrize("fails_early", [False, True])
def test_poison_among_many_batches_harms_no_one_else(fails_early: bool) -> None:
    async def story(bench: Bench) -> None:
        numbers = [-1 if i % 13 == 5 else i for i in range(300)]
        tasks = [bench.send(number, num_rows=i % 3 + 1) for i, number in enumerate(numbers)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        expected = [InferenceError if number < 0 else number + 1 for number in numbers]
        assert values(answers) == expected

    on_bench(story, engine=GatedEngine(fails_early=fails_early))
