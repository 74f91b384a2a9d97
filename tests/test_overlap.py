"""Two batches in work at once: batcher, engine, feature cache and device together."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache import Device, FeatureCache
from cache.device import Event
from cache.errors import SourceError
from models.errors import BackendError
from models.repository import LoadedModel
from models.spec import FeatureInput, ModelConfig
from models.tensor_spec import TensorSpec
from server.batch_queue import BatchQueue
from server.batcher import Answer, Batcher
from server.engine import Engine, PreparedBatch
from server.errors import InferenceError, InvalidRequestError
from server.requests import InferenceRequest, RequestedOutput
from server.statistics import ModelStatistics
from tests.cache_fixtures import (
    DEVICES,
    MemorySource,
    ReadFailedError,
    new_device,
    new_row_cache,
    opened_device,
    rows_of,
    to_host,
)

MAX_BATCH_SIZE = 4
ROWS = TensorSpec("rows", "FP32", (-1, -1, 4))
DENSE = TensorSpec("dense", "FP32", (-1, 2))
KEYS = TensorSpec("keys", "INT64", (-1, -1))


class EchoBackend:
    """Gives back its inputs; a negative `dense` fails. It looks at them only after `before_run`."""

    platform = "test"
    inputs = (ROWS, DENSE)
    outputs = (
        TensorSpec("rows_out", "FP32", (-1, -1, 4)),
        TensorSpec("dense_out", "FP32", (-1, 2)),
    )

    def __init__(self, device: Device, *, takes_device_arrays: bool = False) -> None:
        self.takes_device_arrays = takes_device_arrays
        self.before_run: Callable[[], None] = lambda: None
        self._device = device

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], after: Sequence[Event] = ()
    ) -> dict[str, NDArray[Any]]:
        self.before_run()
        for event in after:
            if self.takes_device_arrays:
                self._device.compute.wait_for(event)
            else:
                event.wait()
        found = {f"{name}_out": self._copy(array) for name, array in inputs.items()}
        if (found["dense_out"] < 0).any():
            raise BackendError("negative value")
        return {name: found[name] for name in outputs}

    def _copy(self, array: Any) -> NDArray[Any]:
        return to_host(self._device, array) if self.takes_device_arrays else np.array(array)

    def close(self) -> None:
        pass


def new_engine(features: FeatureCache, device: Device, backend: EchoBackend) -> Engine:
    model = LoadedModel(
        "m",
        "1",
        ModelConfig(max_batch_size=MAX_BATCH_SIZE),
        (KEYS, DENSE),
        backend.outputs,
        (FeatureInput(ROWS, KEYS, ("feat",), 4),),
        backend,
    )
    return Engine(model, features, device)


def new_request(keys: Sequence[int], dense: float = 0.0) -> InferenceRequest:
    """One row."""
    return InferenceRequest(
        {
            "keys": np.array([keys], np.int64),
            "dense": np.array([[dense, dense + 0.5]], np.float32),
        },
        1,
        (RequestedOutput("rows_out", True), RequestedOutput("dense_out", True)),
    )


def dense_of(request: InferenceRequest) -> float:
    return float(np.asarray(request.inputs["dense"]).flat[0])


def check(request: InferenceRequest, outputs: Mapping[str, NDArray[Any]]) -> None:
    keys: Any = request.inputs["keys"]
    expected = rows_of(keys.reshape(-1)).reshape(*keys.shape, 4)
    np.testing.assert_array_equal(outputs["rows_out"], expected)
    np.testing.assert_array_equal(outputs["dense_out"], request.inputs["dense"])


# The engine: a batch is looked up while the one before has not been computed.

# Slots of the host tier; the device tier has four.
HOST_TIERS: dict[str, dict[str, Any]] = {
    "no host tier": {},
    "spilling": {"host_slots": 6},
    "inclusive": {"is_inclusive": True},
}


@contextmanager
def opened(
    kind: str, tier: str, seed: int | None, *, takes_device_arrays: bool
) -> Iterator[tuple[Engine, FeatureCache]]:
    with opened_device(kind, seed) as device:
        slab = new_row_cache(
            40, device_slots=4, device=device, max_positions=32, num_frames=2, **HOST_TIERS[tier]
        )
        features = FeatureCache([slab], num_frames=2)
        backend = EchoBackend(device, takes_device_arrays=takes_device_arrays)
        engine = new_engine(features, device, backend)
        try:
            yield engine, features
            features.check_integrity()
            assert [stats.leases for stats in features.stats().slabs] == [0]
        finally:
            engine.close()
            features.close()


on_all_devices = pytest.mark.parametrize(
    ("kind", "takes_device_arrays"),
    [("cpu", False), *((kind, on_it) for kind in DEVICES[1:] for on_it in (False, True))],
)
with_all_tiers = pytest.mark.parametrize("tier", HOST_TIERS)


@with_all_tiers
@on_all_devices
def test_rows_that_the_next_batch_evicts_are_still_read_by_a_model_that_runs_late(
    kind: str, takes_device_arrays: bool, tier: str
) -> None:
    with opened(kind, tier, None, takes_device_arrays=takes_device_arrays) as (engine, features):
        engine.run([new_request([0, 1, 2, 3])])  # they fill the device tier
        first, second = new_request([3, 2, 1, 0], 1), new_request([4, 5, 6, 7], 2)
        computing = engine.prepare([first])
        following = engine.prepare([second])  # evicts all that the first reads
        check(first, engine.compute(computing).responses[0].outputs)
        check(second, engine.compute(following).responses[0].outputs)
        assert features.stats().tables[0].device_evictions >= 4


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@with_all_tiers
@on_all_devices
def test_random_batches_overlap_and_some_are_dropped(
    kind: str, takes_device_arrays: bool, tier: str, seed: int | None
) -> None:
    chance = random.Random(seed)
    with opened(kind, tier, seed, takes_device_arrays=takes_device_arrays) as (engine, _):
        ahead: PreparedBatch | None = None
        for number in range(60):
            width = chance.randint(1, 4)
            requests = [
                new_request([chance.randrange(40) for _ in range(width)], number + i / 8)
                for i in range(chance.randint(1, MAX_BATCH_SIZE))
            ]
            prepared = engine.prepare(requests)
            if ahead is not None:
                for request, response in zip(
                    ahead.requests, engine.compute(ahead).responses, strict=True
                ):
                    check(request, response.outputs)
            ahead = prepared
            if chance.random() < 0.2:
                ahead.close()
                ahead = None
        if ahead is not None:
            ahead.close()


@on_all_devices
def test_whatever_fails_gives_everything_back(kind: str, takes_device_arrays: bool) -> None:
    with ExitStack() as stack:
        device = stack.enter_context(opened_device(kind))
        source = MemorySource()
        slab = new_row_cache(40, device_slots=4, device=device, source=source, num_frames=1)
        features = FeatureCache([slab], num_frames=1)
        stack.callback(features.close)
        backend = EchoBackend(device, takes_device_arrays=takes_device_arrays)
        engine = new_engine(features, device, backend)
        stack.callback(engine.close)
        for key in (10, 20, 30):
            source.on_read = fail_to_read
            with pytest.raises(SourceError):
                engine.prepare([new_request([key, 2])])
            source.on_read = lambda rows: None
            with pytest.raises(BackendError):
                engine.run([new_request([key, 2], -5)])
            engine.prepare([new_request([3, 4])]).close()
            request = new_request([key, 3], 7)
            check(request, engine.run([request]).responses[0].outputs)
        assert slab.num_leases == 0


def fail_to_read(rows: list[int]) -> None:
    raise ReadFailedError("the disk is gone")


# The batcher on top of it.


class Server:
    """Batchers over one feature cache, one for each backend; close it when all have ended."""

    def __init__(self, features: FeatureCache, device: Device, *backends: EchoBackend) -> None:
        self.engines = [new_engine(features, device, backend) for backend in backends]
        self.batchers = [
            Batcher(
                f"m{i}",
                engine,
                BatchQueue(MAX_BATCH_SIZE, max_queue_size=1000),
                ModelStatistics(),
            )
            for i, engine in enumerate(self.engines)
        ]

    async def __aenter__(self) -> Server:
        for batcher in self.batchers:
            batcher.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for batcher in self.batchers:
            assert await batcher.stop(grace_s=20)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def send(self, request: InferenceRequest, model: int = 0) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.batchers[model].submit(request))


def test_the_rows_of_the_next_batch_are_read_while_the_model_runs() -> None:
    are_read, is_running, gate = threading.Event(), threading.Event(), threading.Event()
    device = new_device()
    backend = EchoBackend(device)
    source = MemorySource(lambda rows: are_read.set() if 9 in rows else None)
    features = FeatureCache([new_row_cache(source=source, device=device)], num_frames=2)

    def hold() -> None:
        is_running.set()
        assert gate.wait(timeout=10)

    async def story() -> None:
        backend.before_run = hold
        async with Server(features, device, backend) as server:
            first = new_request([1, 2])
            computing = server.send(first)
            assert await asyncio.to_thread(is_running.wait, timeout=10)
            full = [new_request([9, i]) for i in range(MAX_BATCH_SIZE)]
            following = [server.send(request) for request in full]
            assert await asyncio.to_thread(are_read.wait, timeout=10)
            assert not computing.done()
            gate.set()
            for request, task in zip([first, *full], [computing, *following], strict=True):
                check(request, (await task).response.outputs)

            server.close()

    asyncio.run(story())
    features.close()


@pytest.mark.parametrize("num_frames", [1, 2, 3])
@on_all_devices
def test_models_that_share_few_frames_answer_everybody_through_all_faults(
    kind: str, takes_device_arrays: bool, num_frames: int
) -> None:
    with opened_device(kind, seed=num_frames) as device, ExitStack() as stack:
        source = MemorySource(lambda rows: fail_to_read(rows) if 13 in rows else None)
        slab = new_row_cache(
            100, device_slots=8, host_slots=8, source=source, device=device, num_frames=num_frames
        )
        slab.tables[0] = replace(slab.tables[0], is_strict=True)
        features = FeatureCache([slab], num_frames=num_frames)
        stack.callback(features.close)
        backends = [EchoBackend(device, takes_device_arrays=takes_device_arrays) for _ in range(3)]
        chance = random.Random(num_frames)
        requests = [(i % len(backends), new_faulty_request(chance)) for i in range(300)]

        async def story() -> list[Answer | BaseException]:
            async with Server(features, device, *backends) as server:
                stack.callback(server.close)
                tasks = [server.send(request, model) for model, request in requests]
                return await asyncio.gather(*tasks, return_exceptions=True)

        for (_, request), answer in zip(requests, asyncio.run(story()), strict=True):
            if isinstance(answer, Answer):
                assert error_of(request) is None
                check(request, answer.response.outputs)
            else:
                assert type(answer) is error_of(request)
        features.check_integrity()
        assert slab.num_leases == 0


def new_faulty_request(chance: random.Random) -> InferenceRequest:
    """A request of which one in a few asks for an absent key or has the model fail."""
    keys = [chance.randrange(100) for _ in range(3)]
    keys[0] = chance.choice([keys[0]] * 20 + [1234567])
    return new_request(keys, chance.choice([1.0] * 20 + [-5.0]))


def error_of(request: InferenceRequest) -> type[Exception] | None:
    keys = request.inputs["keys"]
    if 1234567 in keys:
        return InvalidRequestError
    return InferenceError if 13 in keys or dense_of(request) < 0 else None
