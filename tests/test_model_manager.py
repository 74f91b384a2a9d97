"""Loading, swapping and unloading models under requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from cache import FeatureCache, open_device
from cache.device import CpuBuffers, Event
from models.errors import BackendError, ModelLoadError, ModelNotFoundError, ModelNotReadyError
from models.repository import LoadedModel, ModelRepository
from models.spec import ModelConfig
from models.tensor_spec import TensorSpec
from server.errors import (
    ClientDisconnectedError,
    InferenceError,
    InternalError,
    InvalidRequestError,
    LoadingError,
    QueueFullError,
    RequestTimeoutError,
    ShuttingDownError,
)
from server.model_manager import IndexEntry, ModelManager, ServedModel, failure_reason
from server.requests import InferenceRequest, InferenceResponse, RequestedOutput
from tests import model_zoo
from tests.cache_fixtures import new_device

T = TypeVar("T")


class FakeBackend:
    """`y` = `x` + `increment`; a negative value fails; `gate` holds every run until it is set."""

    platform = "fake"
    takes_device_arrays = False
    inputs = (TensorSpec("x", "FP32", (-1, 4)),)
    outputs = (TensorSpec("y", "FP32", (-1, 4)),)

    def __init__(self, increment: float) -> None:
        self.increment = increment
        self.num_runs = 0
        self.is_closed = False
        self.running = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], after: Sequence[Event] = ()
    ) -> dict[str, NDArray[Any]]:
        self.num_runs += 1
        self.running.set()
        assert self.gate.wait(timeout=10)
        assert not self.is_closed
        if (inputs["x"] < 0).any():
            raise BackendError("negative value")
        return {"y": inputs["x"] + self.increment}

    def close(self) -> None:
        self.is_closed = True


class FakeRepository:
    """Models as a dict of name to {version: increment, or the error of loading it}.

    The versions of an `unreadable` model cannot be listed; `gate` holds every load until it is set.
    """

    def __init__(self, **models: dict[str, float | Exception]) -> None:
        self.models = models
        self.backends: list[FakeBackend] = []
        self.unreadable: set[str] = set()
        self.opening = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.listing_threads: set[int] = set()

    def names(self) -> list[str]:
        return sorted(self.models)

    def versions(self, name: str) -> list[str]:
        self.listing_threads.add(threading.get_ident())
        if name in self.unreadable:
            raise ModelLoadError(f"{name}: Permission denied")
        if name not in self.models:
            raise ModelNotFoundError(f"unknown model {name!r}")
        return sorted(self.models[name])

    def open(self, name: str) -> list[LoadedModel]:
        self.versions(name)
        self.opening.set()
        assert self.gate.wait(timeout=10)
        for increment in self.models[name].values():
            if isinstance(increment, Exception):
                raise increment
        return [self.open_version(name, version) for version in self.versions(name)]

    def open_version(self, name: str, version: str) -> LoadedModel:
        increment = self.models[name][version]
        assert isinstance(increment, float)
        backend = FakeBackend(increment)
        self.backends.append(backend)
        config = ModelConfig(max_batch_size=8, max_queue_size=6)
        model = LoadedModel(name, version, config, backend.inputs, backend.outputs, (), backend)
        model.resources.callback(backend.close)
        return model


class World:
    """A started manager over a fake repository, and the requests of a client."""

    def __init__(self, repository: FakeRepository) -> None:
        self.repository = repository
        self.manager = ModelManager(repository, FeatureCache([], num_frames=1), new_device())

    @property
    def backend(self) -> FakeBackend:
        """That of the model that was opened last."""
        return self.repository.backends[-1]

    async def infer(self, name: str, value: float = 0.0, version: str | None = None) -> float:
        x = np.full((2, 4), value, np.float32)
        request = InferenceRequest({"x": x}, 2, (RequestedOutput("y", True),))
        async with self.manager.lease(name, version) as served:
            return await served.infer(request, first_value)

    async def occupy(self, name: str) -> asyncio.Task[float]:
        """A request that runs until the gate of the last backend is set."""
        self.backend.gate.clear()
        self.backend.running.clear()
        running = asyncio.create_task(self.infer(name))
        assert await asyncio.to_thread(self.backend.running.wait, timeout=10)
        return running

    async def queue(self, name: str, *values: float) -> list[asyncio.Task[float]]:
        tasks = [asyncio.create_task(self.infer(name, value)) for value in values]
        await asyncio.sleep(0)
        return tasks

    def states(self) -> list[tuple[str, str, str]]:
        return [(entry.name, entry.version, entry.state) for entry in self.manager.index()]


def first_value(response: InferenceResponse) -> float:
    return float(response.outputs["y"][0, 0])


def in_world(story: Callable[[World], Awaitable[T]], **models: dict[str, float | Exception]) -> T:
    """Run a story with a started manager, which is stopped at the end."""

    async def run() -> T:
        world = World(FakeRepository(**models))
        await world.manager.start()
        try:
            return await story(world)
        finally:
            for backend in world.repository.backends:
                backend.gate.set()
            assert await world.manager.stop(grace_s=10)
            assert all(backend.is_closed for backend in world.repository.backends)

    return asyncio.run(run())


# Start, names and versions.


def test_start_serves_every_model_and_a_broken_one_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        assert world.manager.is_ready()
        assert world.manager.index() == [
            IndexEntry("bad", "1", "UNAVAILABLE", "bad/1/model.onnx is empty"),
            IndexEntry("good", "1", "READY", ""),
        ]
        assert await world.infer("good") == 1.0
        with pytest.raises(ModelNotReadyError, match="is empty"):
            await world.infer("bad")

    in_world(story, bad={"1": ModelLoadError("bad/1/model.onnx is empty")}, good={"1": 1.0})
    assert "model 'bad' is not served: bad/1/model.onnx is empty" in caplog.text


def test_the_highest_version_answers_unless_one_is_named() -> None:
    async def story(world: World) -> None:
        assert await world.infer("m") == 10.0
        assert await world.infer("m", version="9") == 9.0
        served = [(served.model.name, served.model.version) for served in world.manager.served()]
        assert served == [("m", "2"), ("m", "9"), ("m", "10")]

    in_world(story, m={"2": 2.0, "9": 9.0, "10": 10.0})


def test_unknown_is_not_found_and_unloaded_is_not_ready() -> None:
    async def story(world: World) -> None:
        world.repository.models["m"]["2"] = 2.0
        world.repository.models["new"] = {"1": 1.0}
        manager = world.manager
        with pytest.raises(ModelNotFoundError, match="unknown model 'x'"):
            manager.get("x")
        with pytest.raises(ModelNotFoundError, match="has no version '3'"):
            manager.get("m", "3")
        with pytest.raises(ModelNotReadyError, match="version '2' of model 'm' is not loaded"):
            manager.get("m", "2")
        with pytest.raises(ModelNotReadyError, match="model 'new' is not loaded"):
            manager.get("new")
        assert manager.index()[1:] == [
            IndexEntry("m", "2", "UNAVAILABLE", "not served by the version policy"),
            IndexEntry("new", "1", "UNAVAILABLE", "not loaded"),
        ]

    in_world(story, m={"1": 1.0})


def test_a_folder_that_cannot_be_read_does_not_hide_the_others() -> None:
    async def story() -> None:
        repository = FakeRepository(good={"1": 1.0}, locked={"1": 1.0})
        repository.unreadable.add("locked")
        world = World(repository)
        await world.manager.start()
        assert world.manager.index() == [
            IndexEntry("good", "1", "READY", ""),
            IndexEntry("locked", "", "UNAVAILABLE", "locked: Permission denied"),
        ]
        with pytest.raises(ModelNotReadyError, match="Permission denied"):
            world.manager.get("locked")
        assert await world.manager.stop(grace_s=10)

    asyncio.run(story())


def test_a_model_that_is_still_loading_is_unavailable_for_now() -> None:
    async def story() -> None:
        world = World(FakeRepository(a={"1": 1.0}, b={"1": 2.0}))
        manager = world.manager
        world.repository.gate.clear()
        starting = asyncio.create_task(manager.start())
        assert await asyncio.to_thread(world.repository.opening.wait, timeout=10)
        for name in ("a", "b"):
            with pytest.raises(LoadingError, match=f"model '{name}' is still loading"):
                await world.infer(name)
        with pytest.raises(ModelNotFoundError, match="unknown model 'x'"):
            await world.infer("x")
        with pytest.raises(ModelNotFoundError, match="has no version '7'"):
            await world.infer("a", version="7")
        assert world.states() == [("a", "1", "LOADING"), ("b", "1", "LOADING")]
        world.repository.gate.set()
        await starting
        assert await world.infer("b") == 2.0
        assert await manager.stop(grace_s=10)

    asyncio.run(story())


def test_a_request_never_waits_for_the_disk_on_the_event_loop() -> None:
    async def story(world: World) -> None:
        world.repository.listing_threads.clear()
        await world.manager.unload("m")
        for name, version in (("m", None), ("n", "7"), ("x", None), ("n", None)):
            with contextlib.suppress(ModelNotFoundError, ModelNotReadyError):
                await world.infer(name, version=version)
        assert world.repository.listing_threads
        assert threading.get_ident() not in world.repository.listing_threads

    in_world(story, m={"1": 1.0}, n={"1": 1.0})


# Load and reload.


def test_no_request_fails_during_reloads_and_later_ones_get_the_new_model() -> None:
    async def story(world: World) -> None:
        is_over = False
        answers: list[float] = []

        async def send_until_over() -> None:
            while not is_over:
                answers.append(await world.infer("m"))

        clients = [asyncio.create_task(send_until_over()) for _ in range(4)]
        for increment in (2.0, 3.0, 4.0):
            world.repository.models["m"]["1"] = increment
            await world.manager.load("m")
            assert await world.infer("m") == increment
        is_over = True
        await asyncio.gather(*clients)
        assert set(answers) <= {1.0, 2.0, 3.0, 4.0}
        snapshot = world.manager.get("m").statistics.snapshot()
        assert (snapshot.num_success, snapshot.failed.count) == (len(answers) + 3, 0)

    in_world(story, m={"1": 1.0})


def test_a_request_that_leased_the_old_model_is_served_by_it() -> None:
    async def story(world: World) -> None:
        old = world.backend
        async with world.manager.lease("m") as served:
            world.repository.models["m"]["1"] = 2.0
            await world.manager.load("m")
            x = np.zeros((1, 4), np.float32)
            request = InferenceRequest({"x": x}, 1, (RequestedOutput("y", True),))
            assert await served.infer(request, first_value) == 1.0
            assert not old.is_closed
        await until(lambda: old.is_closed)
        assert not world.backend.is_closed

    in_world(story, m={"1": 1.0})


def test_a_failed_reload_keeps_the_loaded_model_and_shows_its_reason() -> None:
    async def story(world: World) -> None:
        world.repository.models["m"]["2"] = ModelLoadError("m/2/model.onnx is not ONNX")
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="is not ONNX"):
                await world.manager.load("m")
        assert await world.infer("m") == 1.0
        assert world.manager.index() == [
            IndexEntry("m", "1", "READY", "m/2/model.onnx is not ONNX"),
            IndexEntry("m", "2", "UNAVAILABLE", "m/2/model.onnx is not ONNX"),
        ]
        world.repository.models["m"]["2"] = 2.0
        await world.manager.load("m")
        assert await world.infer("m") == 2.0
        assert [entry.reason for entry in world.manager.index()] == ["", ""]

    in_world(story, m={"1": 1.0})


def test_an_unforeseen_error_of_a_load_is_logged_and_has_a_fixed_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        world.repository.models["m"]["1"] = RuntimeError("secret")
        with pytest.raises(ModelLoadError, match="the server's log has the details"):
            await world.manager.load("m")
        assert await world.infer("m") == 1.0

    in_world(story, m={"1": 1.0})
    assert "secret" in caplog.text


def test_loading_an_unknown_name_leaves_no_trace() -> None:
    async def story(world: World) -> None:
        for change in (world.manager.load, world.manager.unload):
            with pytest.raises(ModelNotFoundError):
                await change("../secret")
        assert world.manager.index() == []

    in_world(story)


# Unload.


def test_unload_lets_accepted_requests_finish_and_refuses_new_ones() -> None:
    async def story(world: World) -> None:
        backend = world.backend
        running = await world.occupy("m")
        queued = await world.queue("m", 1, 2, 3, 4, 5)
        await world.manager.unload("m")
        with pytest.raises(ModelNotReadyError, match="unloaded"):
            await world.infer("m")
        assert world.states() == [("m", "1", "UNAVAILABLE")]
        await world.manager.load("m")
        assert await world.infer("m") == 1.0  # the new one does not wait for the old one
        assert not backend.is_closed
        backend.gate.set()
        assert await asyncio.gather(running, *queued) == [1, 2, 3, 4, 5, 6]
        await until(lambda: backend.is_closed)

    in_world(story, m={"1": 1.0})


def test_unloading_what_is_not_loaded_changes_nothing() -> None:
    async def story(world: World) -> None:
        await world.manager.unload("m")
        await world.manager.unload("m")
        assert world.states() == [("m", "1", "UNAVAILABLE")]

    in_world(story, m={"1": 1.0})


def test_parallel_loads_and_unloads_all_return_and_the_last_one_counts() -> None:
    async def story(world: World) -> None:
        manager = world.manager
        for last, state in ((manager.load, "READY"), (manager.unload, "UNAVAILABLE")):
            changes = [change("m") for change in (manager.unload, manager.load) * 10]
            await asyncio.wait_for(asyncio.gather(*changes, last("m")), timeout=30)
            assert world.states() == [("m", "1", state)]

    in_world(story, m={"1": 1.0})


def test_a_load_goes_on_when_its_caller_leaves() -> None:
    async def story(world: World) -> None:
        world.repository.models["m"]["1"] = 2.0
        leaving = asyncio.create_task(world.manager.load("m"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        await world.manager.load("m")
        assert await world.infer("m") == 2.0

    in_world(story, m={"1": 1.0})


# Stop.


def test_stop_finishes_accepted_requests_and_refuses_new_ones() -> None:
    async def story(world: World) -> None:
        backend = world.backend
        running = await world.occupy("m")
        queued = await world.queue("m", 1, 2)
        stopping = asyncio.create_task(world.manager.stop(grace_s=10))
        await asyncio.sleep(0)
        assert not world.manager.is_ready()
        with pytest.raises(ShuttingDownError):
            await world.infer("m")
        with pytest.raises(ShuttingDownError):
            await world.manager.load("m")
        assert not backend.is_closed
        backend.gate.set()
        assert await stopping
        assert await asyncio.gather(running, *queued) == [1, 2, 3]

    in_world(story, m={"1": 1.0})


def test_after_the_grace_period_the_rest_is_answered_as_shutting_down() -> None:
    async def story() -> FakeBackend:
        world = World(FakeRepository(m={"1": 1.0}))
        await world.manager.start()
        running = await world.occupy("m")
        queued = await world.queue("m", 1, 2)
        statistics = world.manager.get("m").statistics
        assert not await world.manager.stop(grace_s=0.01)
        answers = await asyncio.gather(running, *queued, return_exceptions=True)
        assert [type(answer) for answer in answers] == [ShuttingDownError] * 3
        assert statistics.snapshot().num_pending == 0
        assert not world.backend.is_closed  # it still runs
        return world.backend

    backend = asyncio.run(story())
    backend.gate.set()  # the run ends after the event loop, and its thread with it
    for thread in threading.enumerate():
        if thread.name == "batcher m:1":
            thread.join(timeout=10)
            assert not thread.is_alive()


def test_a_load_that_does_not_end_is_not_waited_for() -> None:
    async def story() -> threading.Event:
        world = World(FakeRepository(m={"1": 1.0}))
        await world.manager.start(load_all=False)
        world.repository.gate.clear()
        loading = asyncio.create_task(world.manager.load("m"))
        assert await asyncio.to_thread(world.repository.opening.wait, timeout=10)
        assert not await world.manager.stop(grace_s=0.01)
        assert await asyncio.wait([loading])
        assert loading.cancelled()
        return world.repository.gate

    with asyncio.Runner() as runner:
        runner.run(story()).set()


def test_once_stopped_every_request_hears_of_it() -> None:
    async def story(world: World) -> None:
        assert await world.manager.stop(grace_s=10)
        for name in ("m", "x"):
            with pytest.raises(ShuttingDownError):
                await world.infer(name)
            with pytest.raises(ShuttingDownError):
                world.manager.get(name)

    in_world(story, m={"1": 1.0})


# Counters.


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFullError("full"), "REJECTED"),
        (ShuttingDownError("closing"), "REJECTED"),
        (RequestTimeoutError("late"), "TIMEOUT"),
        (ClientDisconnectedError(), "CANCELED"),
        (asyncio.CancelledError(), "REJECTED"),
        (ModelNotReadyError("unloaded"), "REJECTED"),
        (InferenceError("failed"), "BACKEND"),
        (InternalError(), "BACKEND"),
        (InvalidRequestError("bad"), "OTHER"),
        (ValueError("ours"), "OTHER"),
    ],
)
def test_every_failure_has_its_reason(error: BaseException, reason: str) -> None:
    assert failure_reason(error) == reason


def test_successes_and_failures_add_up_to_the_requests() -> None:
    async def story(world: World) -> None:
        for value in (1, 2, 3):
            await world.infer("m", value)
        running = await world.occupy("m")
        abandoned, *queued = await world.queue("m", 1, 2, 3, 4, 5, 6)
        with pytest.raises(QueueFullError):
            await world.infer("m")
        abandoned.cancel()
        await asyncio.wait([abandoned])
        world.backend.gate.set()
        await asyncio.gather(running, *queued)
        with pytest.raises(InferenceError, match="negative value"):
            await world.infer("m", -1)
        with pytest.raises(InvalidRequestError, match="not JSON"):
            await infer_and_fail_to_encode(world.manager.get("m"))

        snapshot = world.manager.get("m").statistics.snapshot()
        assert snapshot.reason_to_num_failed == {
            "REJECTED": 2,
            "TIMEOUT": 0,
            "CANCELED": 0,
            "BACKEND": 1,
            "OTHER": 1,
        }
        assert (snapshot.num_success, snapshot.num_rows, snapshot.num_pending) == (9, 18, 0)
        assert snapshot.request.count == snapshot.histograms["encode"].count == 9
        assert snapshot.num_executions == world.backend.num_runs - 1  # one run failed
        assert max(snapshot.batch_sizes) <= 8

    in_world(story, m={"1": 1.0})


async def infer_and_fail_to_encode(served: ServedModel) -> None:
    def refuse(response: InferenceResponse) -> None:
        raise InvalidRequestError("output 'y' is not JSON")

    x = np.zeros((1, 4), np.float32)
    request = InferenceRequest({"x": x}, 1, (RequestedOutput("y", False),))
    await served.infer(request, refuse)


def test_counters_go_on_over_a_reload() -> None:
    async def story(world: World) -> None:
        await world.infer("m")
        await world.manager.load("m")
        await world.infer("m")
        assert world.manager.get("m").statistics.snapshot().num_success == 2

    in_world(story, m={"1": 1.0})


# The real repository.


def test_real_models_are_charged_while_they_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_zoo.add1(tmp_path)
    model_zoo.gather(tmp_path)
    device = open_device("cpu", max_bytes=1 << 20, max_host_bytes=0)
    repository = ModelRepository(tmp_path, tables={}, device=device)

    async def story() -> None:
        manager = ModelManager(repository, FeatureCache([], num_frames=1), new_device())
        await manager.start()
        charges = device.budget.charges()
        assert sorted(charges) == ["model:add1:1", "model:gather:1"]
        for _ in range(2):
            await manager.load("add1")
        await until(lambda: device.budget.charges() == charges)

        shutil.copy(__file__, tmp_path / "models/add1/1/model.onnx")
        with pytest.raises(ModelLoadError, match="add1"):
            await manager.load("add1")
        async with manager.lease("add1") as served:
            x = np.zeros((1, 4), np.float32)
            request = InferenceRequest({"x": x}, 1, (RequestedOutput("y", True),))
            assert await served.infer(request, first_value) == 1.0
        assert await manager.stop(grace_s=10)

    with caplog.at_level(logging.INFO):
        asyncio.run(story())
    assert device.budget.charges() == {}
    assert "model 'gather' serves version 1" in caplog.text


async def until(is_true: Callable[[], bool]) -> None:
    """Lets other tasks run until something has happened."""
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.001)


def test_the_memory_of_inputs_is_given_back_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountedBuffers(CpuBuffers):
        def close(self) -> None:
            super().close()
            closed.append(self)

    closed: list[CpuBuffers] = []
    device = new_device()
    monkeypatch.setattr(device, "new_buffers", lambda *, is_on_host: CountedBuffers())

    async def story() -> None:
        repository = FakeRepository(m={"1": 1.0})
        manager = ModelManager(repository, FeatureCache([], num_frames=1), device)
        await manager.start()
        for value in (1.0, 2.0):
            x = np.full((2, 4), value, np.float32)
            request = InferenceRequest({"x": x}, 2, (RequestedOutput("y", True),))
            async with manager.lease("m") as served:
                assert await served.infer(request, first_value) == value + 1
        assert not closed
        assert await manager.stop(grace_s=10)
        assert len(closed) == 1  # the second batch used the memory of the first
        assert repository.backends[0].is_closed

    asyncio.run(story())
