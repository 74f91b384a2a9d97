"""The real Triton client from PyPI against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from tests import model_zoo
from tests.serving import running_server


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("repository")
    model_zoo.add1(root)
    model_zoo.identity(root, "BYTES")
    model_zoo.identity(root, "FP16")
    with running_server(root) as server:
        client = triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8)
        yield client
        client.close()


def rows(value: float, num_rows: int = 2) -> NDArray[np.float32]:
    return np.full((num_rows, 4), value, np.float32)


def input_x(array: NDArray[Any], datatype: str = "FP32", *, is_binary: bool = True) -> Any:
    tensor = triton.InferInput("x", list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=is_binary)
    return tensor


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add1")
    assert client.is_model_ready("add1", "1")
    assert not client.is_model_ready("none")
    assert client.get_server_metadata()["name"] == "hotshelf"
    metadata = client.get_model_metadata("add1")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    config = client.get_model_config("add1", "1")
    assert config["max_batch_size"] == 64
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]


@pytest.mark.parametrize("is_binary_input", [True, False])
@pytest.mark.parametrize("is_binary_output", [True, False])
def test_infer(client: Any, is_binary_input: bool, is_binary_output: bool) -> None:
    result = client.infer(
        "add1",
        [input_x(rows(3), is_binary=is_binary_input)],
        outputs=[triton.InferRequestedOutput("y", binary_data=is_binary_output)],
        request_id="r1",
        priority=1,
        timeout=10_000_000,
    )
    assert result.get_response()["id"] == "r1"
    assert result.as_numpy("y").tobytes() == rows(4).tobytes()


def test_infer_without_outputs_is_binary(client: Any) -> None:
    result = client.infer("add1", [input_x(rows(1))], model_version="1")
    assert result.get_output("y")["parameters"]["binary_data_size"] == 32
    assert result.as_numpy("y").tobytes() == rows(2).tobytes()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_infer(client: Any, algorithm: str) -> None:
    result = client.infer(
        "add1",
        [input_x(rows(5))],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert result.as_numpy("y").tobytes() == rows(6).tobytes()


def test_half_precision_and_text(client: Any) -> None:
    halves = np.array([[1.5, -0.0, 65504, np.inf]], np.float16)
    result = client.infer("id_fp16", [input_x(halves, "FP16")])
    assert result.as_numpy("y").tobytes() == halves.tobytes()
    texts = np.array([b"a", "é".encode(), b""], np.object_)
    for is_binary in (True, False):
        result = client.infer("id_bytes", [input_x(texts, "BYTES", is_binary=is_binary)])
        assert result.as_numpy("y").tolist() == texts.tolist()


def test_async_infer(client: Any) -> None:
    pending = [
        client.async_infer("add1", [input_x(rows(k))], request_id=f"r{k}") for k in range(32)
    ]
    for k, request in enumerate(pending):
        result = request.get_result()
        assert result.get_response()["id"] == f"r{k}"
        assert result.as_numpy("y").tobytes() == rows(k + 1).tobytes()


def test_errors_have_the_servers_text(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="at most 64 rows"):
        client.infer("add1", [input_x(rows(0, 65))])
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_model_metadata("none")
    with pytest.raises(InferenceServerException, match="not supported"):
        client.load_model("add1", config="{}")
    outputs = [triton.InferRequestedOutput("y", class_count=2)]
    with pytest.raises(InferenceServerException, match="classification"):
        client.infer("add1", [input_x(rows(0))], outputs=outputs)
    with pytest.raises(InferenceServerException, match="sequences are not supported"):
        client.infer("add1", [input_x(rows(0))], sequence_id=3)


def test_index_load_and_unload(client: Any) -> None:
    states = {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}
    assert states == dict.fromkeys(("add1", "id_bytes", "id_fp16"), "READY")
    client.unload_model("id_bytes")
    assert not client.is_model_ready("id_bytes")
    client.load_model("id_bytes")
    assert client.is_model_ready("id_bytes")


def test_statistics(client: Any) -> None:
    def add1() -> Any:
        (statistics,) = client.get_inference_statistics("add1", "1")["model_stats"]
        return statistics

    before = add1()
    client.infer("add1", [input_x(rows(0))])
    after = add1()
    assert after["inference_count"] - before["inference_count"] == 2
    assert after["execution_count"] - before["execution_count"] == 1
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    names = {one["name"] for one in client.get_inference_statistics()["model_stats"]}
    assert "id_fp16" in names
