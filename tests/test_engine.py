"""One batch through the feature cache and a real model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cache import FeatureCache, open_device
from cache.device import Event
from cache.errors import AbsentKeyError
from models.errors import BackendError
from models.repository import LoadedModel, ModelRepository
from models.spec import ModelConfig
from models.tensor_spec import TensorSpec
from server.engine import Engine
from server.errors import InferenceError
from server.requests import InferenceRequest, RequestedOutput
from server.statistics import BatchTimings
from tests import model_zoo
from tests.cache_fixtures import new_device

Array = NDArray[Any]


@contextmanager
def open_engine(root: Path, name: str, host_memory_bytes: int = 4096) -> Iterator[Engine]:
    """The engine of one model of a repository, with a device tier of 64 rows of dim 4.

    The host tier holds 128 such rows, unless told otherwise.
    """
    device = open_device("cpu", max_bytes=1 << 24, max_host_bytes=1 << 24)
    features = FeatureCache.open(
        root / "tables",
        device,
        table_memory_bytes=64 * 16,
        host_memory_bytes=host_memory_bytes,
        is_direct_io=False,
        num_frames=1,
        max_positions=64,
    )
    (model,) = ModelRepository(root, tables=features.tables, device=device).open(name)
    try:
        engine = Engine(model, features, device)
        yield engine
        engine.close()
    finally:
        model.close()
        features.close()


def new_request(outputs: Sequence[str] = ("y",), **inputs: Array) -> InferenceRequest:
    num_rows = len(next(iter(inputs.values())))
    return InferenceRequest(
        inputs, num_rows, tuple(RequestedOutput(name, True) for name in outputs)
    )


def full(value: float, num_rows: int) -> Array:
    return np.full((num_rows, 4), value, np.float32)


def test_a_batch_is_joined_run_once_and_split_in_order(tmp_path: Path) -> None:
    model_zoo.add1(tmp_path)
    with open_engine(tmp_path, "add1") as engine:
        requests = [new_request(x=full(i, num_rows)) for i, num_rows in enumerate((1, 0, 3, 2))]
        result = engine.run(requests)
        for i, (request, response) in enumerate(zip(requests, result.responses, strict=True)):
            np.testing.assert_array_equal(response.outputs["y"], full(i + 1, request.num_rows))
            assert response.outputs["y"].flags.c_contiguous
            assert response.parameters == {}
        assert result.timings.lookup_s is None


def test_bytes_are_joined_too(tmp_path: Path) -> None:
    model_zoo.identity(tmp_path, "BYTES")
    with open_engine(tmp_path, "id_bytes") as engine:
        parts = [np.array(words, object) for words in ([b"a"], [b"bb", b"ccc"])]
        responses = engine.run([new_request(x=part) for part in parts]).responses
        assert [list(response.outputs["y"]) for response in responses] == [[b"a"], [b"bb", b"ccc"]]


def test_every_request_gets_the_outputs_that_it_asked_for(tmp_path: Path) -> None:
    model_zoo.two_inputs(tmp_path)
    with open_engine(tmp_path, "two_inputs") as engine:
        first = new_request(["b_out"], a=full(1, 1), b=full(2, 1))
        second = new_request(["b_out", "a_out"], a=full(3, 2), b=full(4, 2))
        responses = engine.run([first, second]).responses
        assert [list(response.outputs) for response in responses] == [["b_out"], ["b_out", "a_out"]]
        np.testing.assert_array_equal(responses[1].outputs["a_out"], full(3, 2))


def test_a_model_without_a_batch_dimension_keeps_its_shape(tmp_path: Path) -> None:
    model_zoo.unbatched(tmp_path)
    with open_engine(tmp_path, "unbatched") as engine:
        x = np.zeros((2, 3), np.float32)
        request = InferenceRequest({"x": x}, 1, (RequestedOutput("y", True),))
        (response,) = engine.run([request]).responses
        np.testing.assert_array_equal(response.outputs["y"], x + 1)


def test_rows_are_never_handed_out_by_guess(tmp_path: Path) -> None:
    model_zoo.wrong_rows(tmp_path)
    with open_engine(tmp_path, "wrong_rows") as engine:
        for requests in ([new_request(x=full(0, 3))], [new_request(x=full(0, 2))] * 2):
            with pytest.raises(InferenceError, match=r"output 'y' has shape .* expected [34] rows"):
                engine.run(requests)


def test_a_poison_row_fails_its_batch_with_the_message_of_the_backend(tmp_path: Path) -> None:
    model_zoo.gather(tmp_path)
    with open_engine(tmp_path, "gather") as engine:
        requests = [new_request(idx=np.array([idx])) for idx in (3, 99)]
        with pytest.raises(BackendError, match="99"):
            engine.run(requests)
        (response,) = engine.run(requests[:1]).responses
        assert response.outputs["y"].tolist() == [[12, 13, 14, 15]]


class RecordingBackend:
    """Keeps the inputs of its runs; `y` is a copy of `x`."""

    platform = "test"
    takes_device_arrays = False
    inputs = (TensorSpec("x", "FP32", (-1, 4)),)
    outputs = (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("z", "FP32", (-1, -1)))

    def __init__(self) -> None:
        self.runs: list[Mapping[str, Array]] = []

    def run(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], after: Sequence[Event] = ()
    ) -> dict[str, Array]:
        self.runs.append(inputs)
        return {name: inputs["x"].copy() for name in outputs}

    def close(self) -> None:
        pass


def new_recording_engine() -> tuple[Engine, RecordingBackend]:
    backend = RecordingBackend()
    config = ModelConfig(max_batch_size=8)
    model = LoadedModel("m", "1", config, backend.inputs, backend.outputs, (), backend)
    ticks = iter(range(100))
    features = FeatureCache([], num_frames=1)
    engine = Engine(model, features, new_device(), clock=lambda: float(2 ** next(ticks)))
    return engine, backend


def test_a_request_alone_is_not_copied() -> None:
    engine, backend = new_recording_engine()
    x = full(1, 2)
    engine.run([new_request(x=x)])
    assert backend.runs[0]["x"] is x


def test_the_stages_of_a_run_are_timed() -> None:
    engine, _ = new_recording_engine()
    batch = engine.prepare([new_request(x=full(1, 1))])  # the clock says 1, 2, 4, 8
    timings = engine.compute(batch).timings  # 16, 32, 64
    assert timings == BatchTimings(
        wait_s=1 + 8, join_s=2, lookup_s=None, compute_infer_s=16, compute_output_s=32
    )


def test_zero_rows_are_shaped_without_a_run_when_the_inner_dimensions_are_known() -> None:
    engine, backend = new_recording_engine()
    known = engine.answer_empty(new_request(["y"], x=full(0, 0)))
    assert known is not None
    assert known.outputs["y"].shape == (0, 4)
    assert known.outputs["y"].dtype == np.float32
    assert engine.answer_empty(new_request(["z"], x=full(0, 0))) is None
    assert backend.runs == []


# Feature inputs.


def write_features(root: Path, **table_options: Any) -> None:
    """A table of 1000 rows, and a model that returns what it was fed with."""
    model_zoo.feature_table(root, **table_options)
    model_zoo.sum_features(root, "feat")


def new_lookup(*rows: Sequence[int]) -> InferenceRequest:
    return new_request(["rows", "sum"], keys=np.array(rows, np.int64).reshape(len(rows), -1))


ROWS = model_zoo.feature_rows()


@pytest.mark.parametrize("host_memory_bytes", [0, 4096, 16384])  # no tier, 128 rows, all rows
def test_rows_reach_the_model_by_position_from_every_tier(
    tmp_path: Path, host_memory_bytes: int
) -> None:
    write_features(tmp_path)
    random = np.random.default_rng(1)
    with open_engine(tmp_path, "sum_features", host_memory_bytes=host_memory_bytes) as engine:
        for _ in range(20):
            keys = [random.integers(0, 1000, (num_rows, 6)) for num_rows in (1, 3, 4)]
            result = engine.run([new_request(["rows", "sum"], keys=part) for part in keys])
            for part, response in zip(keys, result.responses, strict=True):
                np.testing.assert_array_equal(response.outputs["rows"], ROWS[part])
                np.testing.assert_array_equal(response.outputs["sum"], ROWS[part].sum(axis=1))
        assert result.timings.lookup_s is not None


def test_repeated_keys_give_one_row_for_each_position(tmp_path: Path) -> None:
    write_features(tmp_path)
    with open_engine(tmp_path, "sum_features") as engine:
        for _ in ("cold", "warm"):
            responses = engine.run([new_lookup([7, 3, 7, 3, 7]), new_lookup([7] * 5)]).responses
            np.testing.assert_array_equal(responses[0].outputs["rows"][0], ROWS[[7, 3, 7, 3, 7]])
            np.testing.assert_array_equal(responses[1].outputs["rows"][0], ROWS[[7] * 5])


def test_absent_keys_give_the_default_row_and_are_counted_for_their_own_request(
    tmp_path: Path,
) -> None:
    write_features(tmp_path, default_value=-1.0)
    with open_engine(tmp_path, "sum_features") as engine:
        requests = [new_lookup([5, 6, 7]), new_lookup([5, 1234567, 7], [-1, -1, 999])]
        whole, partly = engine.run(requests).responses
        assert (whole.parameters, partly.parameters) == ({}, {"absent_keys": 3})
        expected = np.array([[ROWS[5], [-1] * 4, ROWS[7]], [[-1] * 4, [-1] * 4, ROWS[999]]])
        np.testing.assert_array_equal(partly.outputs["rows"], expected)


def test_a_strict_table_refuses_an_absent_key_and_stays_usable(tmp_path: Path) -> None:
    write_features(tmp_path, absent="error")
    with open_engine(tmp_path, "sum_features") as engine:
        with pytest.raises(AbsentKeyError, match="1234567"):
            engine.run([new_lookup([5, 1234567])])
        (response,) = engine.run([new_lookup([5, 7])]).responses  # the only frame was given back
        np.testing.assert_array_equal(response.outputs["rows"][0], ROWS[[5, 7]])


def test_columns_are_looked_up_in_their_own_tables(tmp_path: Path) -> None:
    for name, num_rows in (("users", 10), ("items", 20)):
        model_zoo.feature_table(tmp_path, name, num_rows)
    model_zoo.sum_features(tmp_path, ["users", "items"])
    with open_engine(tmp_path, "sum_features") as engine:
        first, second = engine.run([new_lookup([3, 15]), new_lookup([15, 3])]).responses
        np.testing.assert_array_equal(first.outputs["rows"][0], ROWS[[3, 15]])
        assert second.parameters == {"absent_keys": 1}  # there are only ten users
        np.testing.assert_array_equal(second.outputs["rows"][0], [[0] * 4, ROWS[3]])


def test_a_lookup_without_keys_is_a_response_without_rows(tmp_path: Path) -> None:
    write_features(tmp_path)
    with open_engine(tmp_path, "sum_features") as engine:
        none, no_keys = new_request(["rows"], keys=np.empty((0, 3), np.int64)), new_lookup([])
        assert engine.answer_empty(none) is None  # `rows` has a free inner dimension
        assert engine.run([none]).responses[0].outputs["rows"].shape == (0, 3, 4)
        assert engine.run([no_keys]).responses[0].outputs["rows"].shape == (1, 0, 4)


def test_a_later_batch_does_not_overwrite_an_earlier_response(tmp_path: Path) -> None:
    write_features(tmp_path)
    with open_engine(tmp_path, "sum_features") as engine:
        (early,) = engine.run([new_lookup([1, 2, 3])]).responses
        engine.run([new_lookup([4, 5, 6])])
        engine.run([new_lookup([7] * 100)] * 8)
        engine.run([new_lookup([8, 9, 10])])
        np.testing.assert_array_equal(early.outputs["rows"][0], ROWS[[1, 2, 3]])


def test_a_lookup_larger_than_the_device_tier_works(tmp_path: Path) -> None:
    write_features(tmp_path)
    keys = list(range(500))
    with open_engine(tmp_path, "sum_features") as engine:
        for _ in range(2):
            (response,) = engine.run([new_lookup(keys)]).responses
            np.testing.assert_array_equal(response.outputs["rows"][0], ROWS[:500])
