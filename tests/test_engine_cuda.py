"""Batches on a GPU that works as late as it may: a model sees its own inputs and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

from cache import FeatureCache
from cache.cuda import CudaDevice
from cache.errors import DeviceError
from cache.table import read_tables
from loadtests.demo import write_demo
from models.repository import ModelRepository
from server.engine import Engine
from server.requests import InferenceRequest, RequestedOutput
from tests.cache_fixtures import machine_of, new_row_cache, opened_device
from tests.cuda_double.onnx_runtime import OnnxRuntimeDouble
from tests.dlrm_reference import Floats, gather, onnxruntime_scores

NUM_BATCHES = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dlrm") / "demo"
    write_demo(path, num_rows=2000, seed=3)
    return path


@pytest.fixture(params=[None, 1, 2], ids=["late", "seed 1", "seed 2"])
def engine(root: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The demo on a double; two frames, and a device tier of 64 rows."""
    with opened_device("cuda-double", request.param) as device:
        features = FeatureCache.open(
            root / "tables", device, table_memory_bytes=64 * 64, host_memory_bytes=1 << 20,
            is_direct_io=False, num_frames=2, max_positions=512,
        )  # fmt: skip
        runtime = OnnxRuntimeDouble(machine_of(device))
        repository = ModelRepository(
            root, tables=features.tables, device=device, onnx_runtime=runtime
        )
        (model,) = repository.open("dlrm")
        engine = Engine(model, features, device)
        yield engine
        engine.close()
        model.close()
        features.check_integrity()
        features.close()


def batch(root: Path, seed: int) -> tuple[list[InferenceRequest], Floats]:
    """Two requests, so that their inputs are joined, and the scores of both."""
    rng = np.random.default_rng(seed)
    sizes = [table.num_rows for table in read_tables(root / "tables")]
    dense = rng.standard_normal((5, 13), dtype=np.float32)
    keys: NDArray[np.int64] = np.stack([rng.integers(0, size, 5) for size in sizes], axis=1)
    requests = [
        InferenceRequest(
            {"dense": dense[part], "keys": keys[part]},
            part.stop - part.start,
            (RequestedOutput("score", True),),
        )
        for part in (slice(0, 2), slice(2, 5))
    ]
    return requests, onnxruntime_scores(root, dense, gather(root, keys))


def scores(engine: Engine, requests: list[InferenceRequest]) -> Floats:
    """Both stages of one batch."""
    responses = engine.compute(engine.prepare(requests)).responses
    return np.concatenate([response.outputs["score"] for response in responses]).view(np.float32)


def test_a_model_waits_for_the_copies_of_its_inputs_and_for_its_rows(
    root: Path, engine: Engine
) -> None:
    for seed in range(NUM_BATCHES):  # each uses the memory of the one before
        requests, expected = batch(root, seed)
        assert scores(engine, requests).tobytes() == expected.tobytes()


def test_the_next_batch_is_prepared_in_other_memory_while_one_computes(
    root: Path, engine: Engine
) -> None:
    batches = [batch(root, seed) for seed in range(NUM_BATCHES)]
    prepared = engine.prepare(batches[0][0])
    for number, (_, expected) in enumerate(batches):
        current = prepared
        if number + 1 < NUM_BATCHES:
            prepared = engine.prepare(batches[number + 1][0])
        responses = engine.compute(current).responses
        computed = np.concatenate([response.outputs["score"] for response in responses])
        assert computed.tobytes() == expected.tobytes()


def test_a_batch_that_is_given_up_leaves_no_copy_behind(root: Path, engine: Engine) -> None:
    for seed in range(NUM_BATCHES):
        engine.prepare(batch(root, 100 + seed)[0]).close()
        requests, expected = batch(root, seed)
        assert scores(engine, requests).tobytes() == expected.tobytes()
    engine.prepare(batch(root, 200)[0]).close()  # nothing of it may be pending when memory goes


def test_many_batches_use_the_memory_of_two(root: Path, engine: Engine) -> None:
    """One computes and one is ahead."""
    new_buffers = CudaDevice.new_buffers
    with patch.object(CudaDevice, "new_buffers", autospec=True, side_effect=new_buffers) as spy:
        for seed in range(10):
            ahead = engine.prepare(batch(root, seed)[0])
            engine.compute(engine.prepare(batch(root, seed)[0]))
            ahead.close()
    assert spy.call_count == 2


def test_a_frame_comes_back_from_a_device_that_has_failed() -> None:
    with opened_device("cuda-double") as device:
        cache = FeatureCache([new_row_cache(device=device)], num_frames=1)
        event = device.compute.record()
        machine_of(device).fail("Event.synchronize", 700)
        for _ in range(2):  # the second one would wait for ever
            with pytest.raises(DeviceError, match="restart the server"), cache.frame() as frame:
                frame.slab_frames[0].event = event
