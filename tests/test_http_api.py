"""The server over real HTTP: every endpoint, every kind of fault, and the end of its life."""

from __future__ import annotations

import gzip
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from tests import model_zoo
from tests.serving import ROOT, RunningServer, running_server, server_environment, start_server

MAX_BODY_BYTES = 1024 * 1024
LENGTH_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Answer:
    """One HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=lambda text: pytest.fail(f"{text} in JSON"))

    @property
    def error(self) -> str:
        assert set(self.json) == {"error"}, self.body
        assert self.headers["content-type"] == "application/json"
        return str(self.json["error"])


def call(
    server: RunningServer,
    method: str,
    path: str,
    body: Any = None,
    headers: Sequence[tuple[str, str]] = (),
) -> Answer:
    """One request on a connection of its own; the path goes out as it is."""
    return begin(server, method, path, body, headers).answer()


@dataclass(frozen=True)
class Begun:
    """A request that is wholly sent."""

    connection: http.client.HTTPConnection

    def answer(self) -> Answer:
        """Waits for the response and closes the connection."""
        try:
            response = self.connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            self.close()

    def close(self) -> None:
        """Goes away."""
        self.connection.close()


def begin(
    server: RunningServer,
    method: str,
    path: str,
    body: Any = None,
    headers: Sequence[tuple[str, str]] = (),
) -> Begun:
    """Sends a request on a connection of its own; the path goes out as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection.putrequest(method, path, skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    return Begun(connection)


def begin_infer(server: RunningServer, model: str, body: Any) -> Begun:
    return begin(server, "POST", f"/v2/models/{model}/infer", body)


def occupy_slow(server: RunningServer, seconds: float) -> Begun:
    """Sends a request to the model `slow`, and returns when it runs."""
    begun = begin_infer(server, "slow", slow_body(seconds))
    # The whole request was sent before, so that it was queued before this is answered.
    wait_for(lambda: num_pending(server, "slow") == 0)
    return begun


def infer(server: RunningServer, model: str, body: Any, *headers: tuple[str, str]) -> Answer:
    return call(server, "POST", f"/v2/models/{model}/infer", body, headers)


def tensor(name: str, datatype: str, array: Any, **fields: Any) -> dict[str, Any]:
    array = np.asarray(array)
    shape = list(array.shape)
    return {"name": name, "datatype": datatype, "shape": shape, "data": array.tolist()} | fields


def x(rows: Any, **fields: Any) -> dict[str, Any]:
    """A request with the input `x`, FP32."""
    return {"inputs": [tensor("x", "FP32", rows)], **fields}


def binary_x(rows: Any, **fields: Any) -> tuple[bytes, tuple[str, str]]:
    """The same in binary, with the header that says so."""
    array = np.asarray(rows, np.float32)
    spec: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": list(array.shape)}
    spec["parameters"] = {"binary_data_size": array.nbytes}
    message = {"inputs": [spec], "parameters": {"binary_data_output": True}, **fields}
    header = json.dumps(message).encode()
    return header + array.tobytes(), (LENGTH_HEADER, str(len(header)))


def binary_outputs(answer: Answer) -> dict[str, bytes]:
    """The outputs after the JSON, by name; checks every length."""
    length = int(answer.headers[LENGTH_HEADER.lower()])
    assert int(answer.headers["content-length"]) == len(answer.body)
    header, rest, outputs = json.loads(answer.body[:length]), answer.body[length:], {}
    for output in header["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]], rest = rest[:size], rest[size:]
        assert len(outputs[output["name"]]) == size
    assert rest == b""
    return outputs


def slow_body(seconds: float) -> dict[str, Any]:
    n = model_zoo.slow_iterations(seconds)
    return {"inputs": [tensor("n", "INT64", [[n]])]}


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    """Polls until it is so."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(0.01)


def samples(server: RunningServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All metrics by name and labels; the parser ends the names of counters with `_total`."""
    text = call(server, "GET", "/metrics").body.decode()
    return {
        (_written(sample.name), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _written(name: str) -> str:
    return name.removesuffix("_total") if name.startswith("nv_") else name


def metric(server: RunningServer, name: str, **labels: str) -> float:
    return samples(server)[name, frozenset(labels.items())]


def num_pending(server: RunningServer, model: str) -> float:
    name = "nv_inference_pending_request_count"
    return metric(server, name, model=model, version="1")


def model_stats(server: RunningServer, model: str) -> Any:
    return server.get_json(f"/v2/models/{model}/stats")["model_stats"][0]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for datatype in ("FP32", "FP16", "INT64", "UINT64", "BYTES"):
        model_zoo.identity(root, datatype)
    model_zoo.add1(root)
    model_zoo.add1(root, name="con fig", increment=10)
    model_zoo.add1(root, name="modèle", increment=20)
    model_zoo.gather(root)
    model_zoo.slow(root)
    model_zoo.nanmodel(root)
    model_zoo.two_dims(root)
    model_zoo.wrong_rows(root)
    model_zoo.wrong_rows(root, "last_row_cut", max_batch_size=0)
    model_zoo.identity(root, name="fill_fp32", **model_zoo.FILL)
    model_zoo.identity(root, name="one_row", **model_zoo.FILL | {"max_batch_size": 1})
    model_zoo.gather(root, "fill_gather", **model_zoo.FILL)
    model_zoo.two_dims(root, "fill_two_dims", **model_zoo.FILL)
    model_zoo.two_inputs(root, "fill_two_inputs", **model_zoo.FILL)
    model_zoo.unbatched(root)
    model_zoo.feature_table(root)
    model_zoo.feature_table(root, "strict", absent="error")
    model_zoo.sum_features(root, "feat")
    (root / "models" / "lost+found").mkdir()
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RunningServer]:
    with running_server(repository, "--max-body-bytes", str(MAX_BODY_BYTES)) as running:
        yield running


@pytest.fixture(autouse=True)
def _still_serves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to the shared server, it goes on serving."""
    yield
    if "server" in request.fixturenames:
        running: RunningServer = request.getfixturevalue("server")
        assert call(running, "GET", "/v2/health/live").json == {"live": True}
        assert infer(running, "add1", x([[1, 2, 3, 4]])).status == 200
        assert "Traceback" not in running.log()


# ---- metadata


def test_server_and_model_metadata(server: RunningServer) -> None:
    about = server.get_json("/v2")
    assert about["name"] == "hotshelf"
    assert "binary_tensor_data" in about["extensions"]
    expected = {
        "name": "sum_features",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "keys", "datatype": "INT64", "shape": [-1, -1]}],
        "outputs": [
            {"name": "rows", "datatype": "FP32", "shape": [-1, -1, 4]},
            {"name": "sum", "datatype": "FP32", "shape": [-1, 4]},
        ],
    }
    assert server.get_json("/v2/models/sum_features") == expected
    assert server.get_json("/v2/models/sum_features/versions/1") == expected
    assert server.get_json("/v2/models/add1/ready") == {"name": "add1", "ready": True}
    assert server.get_json("/v2/models/add1/versions/1/ready")["ready"]
    config = server.get_json("/v2/models/id_bytes/config")
    assert config == server.get_json("/v2/models/id_bytes/versions/1/config")
    assert config["max_batch_size"] == 8
    assert config["input"] == [{"name": "x", "data_type": "TYPE_STRING", "dims": []}]


@pytest.mark.parametrize("suffix", ["", "/ready", "/config", "/stats"])
def test_unknown_models_and_versions(server: RunningServer, suffix: str) -> None:
    for path in ("/v2/models/none", "/v2/models/add1/versions/7", "/v2/models/none/versions/1"):
        answer = call(server, "GET", path + suffix)
        assert answer.status == 404
        assert "none" in answer.error or "7" in answer.error


@pytest.mark.parametrize(
    "path", ["/", "/v3", "/v2/", "/v2/models", "/v2/models/", "/v2/models//infer", "/v2/models/a/b"]
)
def test_unknown_paths(server: RunningServer, path: str) -> None:
    answer = call(server, "GET", path)
    assert answer.status == 404
    assert answer.error


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v2/models/add1/infer", "POST"),
        ("PUT", "/v2/models/add1/versions/1/infer", "POST"),
        ("POST", "/v2", "GET"),
        ("DELETE", "/v2/repository/index", "POST"),
        ("GET", "/v2/tables/feat/lookup", "POST"),
    ],
)
def test_wrong_methods(server: RunningServer, method: str, path: str, allowed: str) -> None:
    answer = call(server, method, path)
    assert answer.status == 405
    assert answer.headers["allow"] == allowed
    assert answer.error


def test_what_is_not_http_gets_the_same_error_body(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"HELLO\r\n\r\n")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400
        assert json.loads(response.read()) == {"error": "Invalid HTTP request received."}


# ---- inference


def test_json_inference(server: RunningServer) -> None:
    answer = infer(server, "add1", x([[1, 2, 3, 4], [5, 6, 7, 8]], id="r1"))
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert LENGTH_HEADER.lower() not in answer.headers
    assert answer.json == {
        "model_name": "add1",
        "model_version": "1",
        "id": "r1",
        "outputs": [
            {
                "name": "y",
                "datatype": "FP32",
                "shape": [2, 4],
                "data": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
            }
        ],
    }
    body = x([[1, 2, 3, 4]])
    assert call(server, "POST", "/v2/models/add1/versions/1/infer", body).status == 200


def test_binary_inference(server: RunningServer) -> None:
    body, header = binary_x([[1, 2, 3, 4]], id="r2")
    answer = infer(server, "add1", body, header)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert binary_outputs(answer) == {"y": np.array([2, 3, 4, 5], np.float32).tobytes()}


def test_large_binary_responses_arrive_whole(server: RunningServer) -> None:
    rows = np.random.default_rng(0).standard_normal((8, 30_000), np.float32)
    body, header = binary_x(rows)
    assert binary_outputs(infer(server, "two_dims", body, header)) == {"y": rows.tobytes()}


def test_the_content_type_does_not_matter(server: RunningServer) -> None:
    content_type = ("Content-Type", "application/x-www-form-urlencoded")
    assert infer(server, "add1", x([[1, 2, 3, 4]]), content_type).status == 200


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7F800000, 0xFF800000, 0x80000000, 1])
def test_special_floats_keep_their_bits(server: RunningServer, bits: int) -> None:
    rows = np.full((1, 4), bits, np.uint32).view(np.float32)
    body, header = binary_x(rows)
    assert binary_outputs(infer(server, "id_fp32", body, header)) == {"y": rows.tobytes()}


def test_nan_in_a_json_output_fails_that_request_only(server: RunningServer) -> None:
    body = x([[0, 1, -1]])
    answer = infer(server, "nanmodel", body)
    assert answer.status == 400
    assert answer.error == (
        "output 'y' holds NaN or infinity, which JSON cannot say; ask for binary data"
    )
    answer = infer(server, "nanmodel", body | {"parameters": {"binary_data_output": True}})
    values = np.frombuffer(binary_outputs(answer)["y"], np.float32)
    assert np.isnan(values[0])
    assert values[1:].tolist() == [np.inf, -np.inf]
    bad, header = binary_x([[np.nan] * 4], parameters={})
    with ThreadPoolExecutor(2) as pool:
        poisoned = pool.submit(infer, server, "id_fp32", bad, header)
        fine = pool.submit(infer, server, "id_fp32", x([[1, 2, 3, 4]]))
    assert poisoned.result().status == 400
    assert fine.result().status == 200


def test_half_precision_only_in_binary(server: RunningServer) -> None:
    values = np.array([[0x0001, 0x8000, 0x7BFF, 0x7E00]], np.uint16)
    spec = {"name": "x", "datatype": "FP16", "shape": [1, 4], "parameters": {"binary_data_size": 8}}
    for is_binary, status in ((True, 200), (False, 400)):
        message = {"inputs": [spec], "parameters": {"binary_data_output": is_binary}}
        header = json.dumps(message).encode()
        length = (LENGTH_HEADER, str(len(header)))
        answer = infer(server, "id_fp16", header + values.tobytes(), length)
        assert answer.status == status
        if is_binary:
            assert binary_outputs(answer) == {"y": values.tobytes()}
        else:
            assert "ask for binary data" in answer.error


@pytest.mark.parametrize(
    ("model", "datatype", "values"),
    [
        ("id_i64", "INT64", [9007199254740993, -9007199254740993, 2**63 - 1, -(2**63)]),
        ("id_u64", "UINT64", [2**64 - 1, 2**63, 0, 9007199254740993]),
    ],
)
def test_64_bit_integers_are_exact(
    server: RunningServer, model: str, datatype: str, values: list[int]
) -> None:
    inputs = [{"name": "x", "datatype": datatype, "shape": [1, 4], "data": values}]
    assert infer(server, model, {"inputs": inputs}).json["outputs"][0]["data"] == values


def test_text(server: RunningServer) -> None:
    inputs = [{"name": "x", "datatype": "BYTES", "shape": [3], "data": ["a", "é", ""]}]
    answer = infer(server, "id_bytes", {"inputs": inputs})
    assert answer.json["outputs"][0]["data"] == ["a", "é", ""]


def count(stats: Any, what: str) -> int:
    return int(stats["inference_stats"][what]["count"])


def test_a_model_without_a_batch_dimension(server: RunningServer) -> None:
    answer = infer(server, "unbatched", x([[0, 1, 2], [3, 4, 5]]))
    assert answer.json["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6]
    assert "expected shape [2, 3]" in infer(server, "unbatched", x([[0, 1, 2]])).error


def test_each_caller_gets_exactly_its_rows(server: RunningServer) -> None:
    def one(number: int) -> None:
        rows = np.full((number % 4 + 1, 4), number, np.float32)
        expected = rows + 1
        if number % 2:
            body, header = binary_x(rows, id=f"r{number}")
            answer = infer(server, "add1", body, header)
            assert binary_outputs(answer) == {"y": expected.tobytes()}
            message = json.loads(answer.body[: int(answer.headers[LENGTH_HEADER.lower()])])
        else:
            message = infer(server, "add1", x(rows, id=f"r{number}")).json
            assert message["outputs"][0]["data"] == expected.reshape(-1).tolist()
        assert message["id"] == f"r{number}"
        assert message["outputs"][0]["shape"] == list(rows.shape)

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(one, range(200)))


def test_rows_are_never_handed_out_by_guess(server: RunningServer) -> None:
    answer = infer(server, "wrong_rows", x([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert answer.status == 500
    assert "output 'y'" in answer.error


def test_features_are_looked_up_and_absent_keys_are_told(server: RunningServer) -> None:
    rows = model_zoo.feature_rows()
    body = {"inputs": [tensor("keys", "INT64", [[7, 3], [7, 999]])], "outputs": [{"name": "rows"}]}
    answer = infer(server, "sum_features", body)
    expected = rows[[7, 3, 7, 999]].reshape(-1).tolist()
    assert answer.json["outputs"][0]["data"] == expected
    assert "parameters" not in answer.json
    body["inputs"] = [tensor("keys", "INT64", [[7, 1234567]])]
    assert infer(server, "sum_features", body).json["parameters"] == {"absent_keys": 1}


# ---- batches: the models `fill_...` run nothing but a batch that cannot grow


def distinct(*shape: int, first: int = 0) -> NDArray[np.float32]:
    """Numbers that count up from `first`."""
    return np.arange(first, first + math.prod(shape), dtype=np.float32).reshape(shape)


def check_output(answer: Answer, expected: NDArray[np.float32], name: str = "y") -> None:
    """The output has these rows, and this shape."""
    assert answer.status == 200, answer.body
    (output,) = [output for output in answer.json["outputs"] if output["name"] == name]
    assert output["shape"] == list(expected.shape)
    assert output["data"] == expected.reshape(-1).tolist()


def executions(server: RunningServer, model: str) -> Counter[int]:
    """How many batches of each number of rows the model has run."""
    stats = model_stats(server, model)
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}
    assert sum(sizes.values()) == stats["execution_count"]
    return Counter(sizes)


def begin_queued(server: RunningServer, model: str, bodies: Sequence[Any]) -> list[Begun]:
    """Sends requests that do not fill a batch together, and returns when all are queued."""
    before = num_pending(server, model)
    begun = [begin_infer(server, model, body) for body in bodies]
    wait_for(lambda: num_pending(server, model) == before + len(bodies))
    return begun


def test_the_batch_limit_counts_rows(server: RunningServer) -> None:
    before = executions(server, "fill_fp32")
    answer = infer(server, "fill_fp32", x(distinct(9, 4)))
    assert answer.status == 400
    assert answer.error == "input 'x': expected at most 8 rows (max_batch_size), got 9"
    full = distinct(8, 4)
    check_output(infer(server, "fill_fp32", x(full)), full)
    assert executions(server, "fill_fp32") - before == {8: 1}


def test_requests_that_do_not_fit_together_run_apart(server: RunningServer) -> None:
    before = executions(server, "fill_fp32")
    fives = [distinct(5, 4), distinct(5, 4, first=100)]
    begun = [begin_infer(server, "fill_fp32", x(rows)) for rows in fives]
    wait_for(lambda: executions(server, "fill_fp32") - before == {5: 1})
    assert num_pending(server, "fill_fp32") == 1
    three = distinct(3, 4, first=200)
    check_output(infer(server, "fill_fp32", x(three)), three)
    for request, rows in zip(begun, fives, strict=True):
        check_output(request.answer(), rows)
    assert executions(server, "fill_fp32") - before == {5: 1, 8: 1}


def test_sixteen_rows_make_two_batches(server: RunningServer) -> None:
    before = executions(server, "fill_fp32")
    rows = [distinct(1, 4, first=10 * number) for number in range(16)]
    begun = [begin_infer(server, "fill_fp32", x(row)) for row in rows]
    for request, row in zip(begun, rows, strict=True):
        check_output(request.answer(), row)
    assert executions(server, "fill_fp32") - before == {8: 2}


def test_a_batch_limit_of_one(server: RunningServer) -> None:
    before = executions(server, "one_row")
    rows = [distinct(1, 4, first=10 * number) for number in range(4)]
    begun = [begin_infer(server, "one_row", x(row)) for row in rows]
    for request, row in zip(begun, rows, strict=True):
        check_output(request.answer(), row)
    assert executions(server, "one_row") - before == {1: 4}
    answer = infer(server, "one_row", x(distinct(2, 4)))
    assert answer.status == 400
    assert answer.error == "input 'x': expected at most 1 rows (max_batch_size), got 2"


def index_body(index: int) -> dict[str, Any]:
    return {"inputs": [tensor("idx", "INT64", [index])]}


@pytest.mark.parametrize("place", [0, 3, 6, 7])
def test_only_the_faulty_request_of_a_batch_fails(server: RunningServer, place: int) -> None:
    model = "fill_gather"
    stats_before, before = model_stats(server, model), executions(server, model)
    indices = [0, 1, 2, 3, 4, 5, 6]
    indices.insert(place, 99)
    # Seven wait and nothing has run, so that whatever runs them has the eighth with it.
    begun = begin_queued(server, model, [index_body(index) for index in indices[:-1]])
    assert infer(server, model, {"inputs": [tensor("idx", "INT64", [[1]])]}).status == 400
    assert num_pending(server, model) == 7
    assert executions(server, model) == before
    begun.append(begin_infer(server, model, index_body(indices[-1])))
    for index, request in zip(indices, begun, strict=True):
        answer = request.answer()
        if index == 99:
            assert answer.status == 500
            assert "idx=99" in answer.error
        else:
            check_output(answer, distinct(1, 4, first=4 * index))
    assert executions(server, model) - before == {1: 7}
    after = model_stats(server, model)
    assert count(after, "success") - count(stats_before, "success") == 7
    assert count(after, "fail") - count(stats_before, "fail") == 2


def test_only_equal_inner_shapes_share_a_batch(server: RunningServer) -> None:
    model = "fill_two_dims"
    before = executions(server, model)
    arrays = [distinct(1, 3), distinct(1, 5, first=100), distinct(2, 3, first=200)]
    narrow, wide, narrow_too = begin_queued(server, model, [x(array) for array in arrays])
    filler = distinct(5, 3, first=300)
    check_output(infer(server, model, x(filler)), filler)
    check_output(narrow.answer(), arrays[0])
    check_output(narrow_too.answer(), arrays[2])
    assert executions(server, model) - before == {8: 1}
    assert num_pending(server, model) == 1
    filler = distinct(7, 5, first=400)
    check_output(infer(server, model, x(filler)), filler)
    check_output(wide.answer(), arrays[1])
    assert executions(server, model) - before == {8: 2}


def test_the_inner_shapes_of_every_input_count(server: RunningServer) -> None:
    model = "fill_two_inputs"
    before = executions(server, model)

    def arrays(num_rows: int, width_b: int, first: int) -> dict[str, NDArray[np.float32]]:
        return {
            "a": distinct(num_rows, 2, first=first),
            "b": distinct(num_rows, width_b, first=first + 50),
        }

    def body(inputs: dict[str, NDArray[np.float32]]) -> dict[str, Any]:
        return {"inputs": [tensor(name, "FP32", array) for name, array in inputs.items()]}

    def check(answer: Answer, inputs: dict[str, NDArray[np.float32]]) -> None:
        for name, array in inputs.items():
            check_output(answer, array, f"{name}_out")

    sent = [arrays(1, 3, 0), arrays(1, 4, 100), arrays(3, 3, 200)]
    narrow, wide, narrow_too = begin_queued(server, model, [body(inputs) for inputs in sent])
    filler = arrays(4, 3, 300)
    check(infer(server, model, body(filler)), filler)
    check(narrow.answer(), sent[0])
    check(narrow_too.answer(), sent[2])
    assert num_pending(server, model) == 1
    filler = arrays(7, 4, 400)
    check(infer(server, model, body(filler)), filler)
    check(wide.answer(), sent[1])
    assert executions(server, model) - before == {8: 2}


@pytest.mark.parametrize("model", ["fill_fp32", "fill_two_dims"])
def test_requests_without_rows_do_not_wait(server: RunningServer, model: str) -> None:
    before = model_stats(server, model)
    begun = [begin_infer(server, model, x(distinct(0, 4))) for _ in range(5)]
    for request in begun:
        check_output(request.answer(), distinct(0, 4))
    body, header = binary_x(distinct(0, 4))
    assert binary_outputs(infer(server, model, body, header)) == {"y": b""}
    after = model_stats(server, model)
    assert after["inference_count"] == before["inference_count"]
    assert count(after, "success") - count(before, "success") == 6
    assert num_pending(server, model) == 0


@pytest.mark.parametrize("model", ["fill_fp32", "fill_two_dims"])
def test_requests_without_rows_do_not_disturb_others(server: RunningServer, model: str) -> None:
    """They share the batch when only a run tells the shape of the output."""
    before, sizes_before = model_stats(server, model), executions(server, model)
    three, five = distinct(3, 4), distinct(5, 4, first=100)
    (neighbour,) = begin_queued(server, model, [x(three)])
    empty = begin_infer(server, model, x(distinct(0, 4)))
    if model == "fill_fp32":
        check_output(empty.answer(), distinct(0, 4))
        assert num_pending(server, model) == 1
    else:
        wait_for(lambda: num_pending(server, model) == 2)
    check_output(infer(server, model, x(five)), five)
    check_output(neighbour.answer(), three)
    if model != "fill_fp32":
        check_output(empty.answer(), distinct(0, 4))
    after = model_stats(server, model)
    assert executions(server, model) - sizes_before == {8: 1}
    assert after["inference_count"] - before["inference_count"] == 8
    assert count(after, "success") - count(before, "success") == 3


def test_outputs_without_rows(server: RunningServer) -> None:
    check_output(infer(server, "last_row_cut", x(distinct(1, 4))), distinct(0, 4))
    body, header = binary_x(distinct(1, 4))
    assert binary_outputs(infer(server, "last_row_cut", body, header)) == {"y": b""}


# ---- faults of the body


NESTED = [[1, 2, 3, 4], [5, 6, 7, 8]]
FLAT = [value for row in NESTED for value in row]


@pytest.mark.parametrize("data", [FLAT, NESTED])
def test_data_is_flat_or_nested_as_the_shape(server: RunningServer, data: Any) -> None:
    answer = infer(server, "id_fp32", {"inputs": [tensor("x", "FP32", NESTED, data=data)]})
    check_output(answer, np.array(NESTED, np.float32))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"data": FLAT[:7]}, "expected 8 values for shape [2, 4], got 7"),
        ({"data": [*FLAT, 9]}, "expected 8 values for shape [2, 4], got 9"),
        ({"data": [[1, 2, 3, 4], [5, 6, 7]]}, "flat or nested as [2, 4], got another nesting"),
        ({"data": [[1, 2], [3, 4], [5, 6], [7, 8]]}, "flat or nested as [2, 4]"),
        ({"data": [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]}, "flat or nested as [2, 4]"),
        ({"data": [1, 2, 3, 4, [5, 6, 7, 8]]}, "expected 8 values for shape [2, 4], got 5"),
        ({"data": {}}, "expected a list as 'data', got {}"),
        ({"data": None}, "expected a list as 'data', got null"),
        ({"data": ...}, "expected a list as 'data', got null"),
        ({"data": "abc"}, "expected a list as 'data', got \"abc\""),
        ({"shape": [1, 2, 2]}, "expected 2 dimensions, [-1, 4], got 3, [1,2,2]"),
        ({"shape": [4, 2]}, "expected shape [-1, 4], got [4,2]"),
        ({"datatype": "INT32"}, 'expected datatype FP32, got "INT32"'),
    ],
)
def test_shape_and_data_that_disagree(
    server: RunningServer, fields: dict[str, Any], text: str
) -> None:
    """An ellipsis stands for a field that is missing."""
    given = tensor("x", "FP32", NESTED) | fields
    given = {name: value for name, value in given.items() if value is not ...}
    answer = infer(server, "id_fp32", {"inputs": [given]})
    assert answer.status == 400
    assert answer.error.startswith("input 'x': ")
    assert text in answer.error


@pytest.mark.parametrize(
    "value",
    [
        *("abc", "", "-1", "0", "1e3", "+5", "0x10", "9" * 20, "9" * 5000, "1 2", "²"),
        *("{body}+1", "{json}-1", "{json}+1"),
    ],
)
def test_wrong_header_lengths(server: RunningServer, value: str) -> None:
    body, (_, length) = binary_x([[1, 2, 3, 4]])
    sizes = {"{body}+1": len(body) + 1, "{json}-1": int(length) - 1, "{json}+1": int(length) + 1}
    answer = infer(server, "id_fp32", body, (LENGTH_HEADER, str(sizes.get(value, value))))
    assert answer.status == 400
    assert answer.error


def test_header_lengths_that_differ_are_missing_or_cover_all(server: RunningServer) -> None:
    body, header = binary_x([[1, 2, 3, 4]])
    assert infer(server, "id_fp32", body, header, header).status == 200
    answer = infer(server, "id_fp32", body, header, (LENGTH_HEADER, "5"))
    assert (answer.status, "differs" in answer.error) == (400, True)
    assert infer(server, "id_fp32", body).status == 400
    only_json = json.dumps(x([[1, 2, 3, 4]])).encode()
    whole = (LENGTH_HEADER, str(len(only_json)))
    assert infer(server, "id_fp32", only_json, whole).status == 200


def test_bodies_over_the_limit(server: RunningServer) -> None:
    too_long = b" " * (MAX_BODY_BYTES + 1)
    answer = infer(server, "add1", too_long)
    assert answer.status == 413
    assert str(MAX_BODY_BYTES) in answer.error
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    chunks = (b" " * 65536 for _ in range(32))
    connection.request("POST", "/v2/models/add1/infer", chunks, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert call(server, "POST", "/v2/repository/index", too_long).status == 413


JSON_BODY = json.dumps(x([[1, 2, 3, 4]])).encode()


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(JSON_BODY), 200),
        ("GZIP", gzip.compress(JSON_BODY), 200),
        ("deflate", zlib.compress(JSON_BODY), 200),
        ("gzip", gzip.compress(JSON_BODY[:9]) + gzip.compress(JSON_BODY[9:]), 400),
        ("gzip", gzip.compress(b"") * 50_000, 400),
        ("identity", JSON_BODY, 200),
        ("gzip", gzip.compress(JSON_BODY)[:-9], 400),
        ("gzip", gzip.compress(JSON_BODY) + b"x", 400),
        ("gzip", JSON_BODY, 400),
        ("gzip", b"", 400),
        ("br", JSON_BODY, 415),
        ("zstd", JSON_BODY, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(JSON_BODY)), 415),
    ],
)
def test_content_encodings(server: RunningServer, encoding: str, body: bytes, status: int) -> None:
    answer = infer(server, "add1", body, ("Content-Encoding", encoding))
    assert answer.status == status
    if status != 200:
        assert answer.error
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip, deflate, identity"


def test_the_header_length_counts_decompressed_bytes(server: RunningServer) -> None:
    body, header = binary_x([[1, 2, 3, 4]])
    answer = infer(server, "id_fp32", gzip.compress(body), header, ("Content-Encoding", "gzip"))
    assert binary_outputs(answer) == {"y": np.array([1, 2, 3, 4], np.float32).tobytes()}


def test_a_compressed_bomb_is_cut_off(server: RunningServer) -> None:
    packer = zlib.compressobj(wbits=31)
    bomb = b"".join(packer.compress(b" " * 2**20) for _ in range(256)) + packer.flush()
    assert len(bomb) < MAX_BODY_BYTES
    process = psutil.Process(server.pid)
    infer(server, "add1", bomb, ("Content-Encoding", "gzip"))
    before = process.memory_info().rss
    for _ in range(3):
        answer = infer(server, "add1", bomb, ("Content-Encoding", "gzip"))
        assert answer.status == 413
        assert answer.error
    assert process.memory_info().rss - before < 8 * MAX_BODY_BYTES


# ---- names


STRANGE_NAMES = [
    "../secret",
    "..%2fsecret",
    "%2e%2e%2fsecret",
    "..%252fsecret",
    "..%5csecret",
    "%2fetc",
    ".",
    "..",
    "",
    "a/../b",
    "a%00b",
    "a" * 300,
    "%ff",
    "add1%2f1",
    "add%2531",
]


@pytest.mark.parametrize("name", STRANGE_NAMES)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2/models/{}"),
        ("GET", "/v2/models/{}/stats"),
        ("POST", "/v2/models/{}/infer"),
        ("POST", "/v2/repository/models/{}/load"),
        ("POST", "/v2/repository/models/{}/unload"),
        ("GET", "/v2/tables/{}"),
        ("POST", "/v2/tables/{}/lookup"),
        ("GET", "/v2/models/add1/versions/{}"),
    ],
)
def test_names_that_are_none(server: RunningServer, method: str, path: str, name: str) -> None:
    answer = call(server, method, path.format(name), JSON_BODY if method == "POST" else None)
    assert answer.status in (400, 404, 405)
    assert answer.error


@pytest.mark.parametrize("version", ["..%2f1", "-1", "1e0", "%201", "01", "1%2e0"])
def test_versions_that_are_none(server: RunningServer, version: str) -> None:
    path = f"/v2/models/add1/versions/{version}"
    assert call(server, "GET", path).status == 404
    assert call(server, "POST", f"{path}/infer", JSON_BODY).status == 404


def test_names_do_not_tell_what_is_outside(server: RunningServer, repository: Path) -> None:
    (repository.parent / "outside").mkdir()
    texts = {
        call(server, "POST", f"/v2/repository/models/..%2f{name}/load").error.replace(name, "?")
        for name in ("outside", "nothing")
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("name", "increment"), [("con%20fig", 10), ("mod%C3%A8le", 20), ("%61dd1", 1)]
)
def test_unusual_names_are_decoded_once(server: RunningServer, name: str, increment: int) -> None:
    assert call(server, "GET", f"/v2/models/{name}/ready").status == 200
    answer = infer(server, name, x([[1, 2, 3, 4]]))
    assert answer.json["outputs"][0]["data"] == [value + increment for value in (1, 2, 3, 4)]
    assert call(server, "POST", f"/v2/repository/models/{name}/load").status == 200


# ---- repository


def test_index_load_and_unload(server: RunningServer) -> None:
    index = call(server, "POST", "/v2/repository/index").json
    assert "lost+found" not in {entry["name"] for entry in index}
    assert {"name": "add1", "version": "1", "state": "READY", "reason": ""} in index
    assert call(server, "POST", "/v2/repository/models/two_dims/unload").status == 200
    answer = infer(server, "two_dims", x([[1.0]]))
    assert (answer.status, "two_dims" in answer.error) == (400, True)
    assert call(server, "GET", "/v2/models/two_dims/ready").status == 400
    ready = call(server, "POST", "/v2/repository/index", {"ready": True}).json
    assert "two_dims" not in {entry["name"] for entry in ready}
    assert call(server, "POST", "/v2/repository/models/two_dims/load", b"{}").status == 200
    assert infer(server, "two_dims", x([[1.0]])).status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("index", {"ready": "yes"}, 400, "'ready': expected true or false"),
        ("index", [], 400, "expected a JSON object"),
        ("models/none/load", None, 404, "none"),
        ("models/none/unload", None, 404, "none"),
        ("models/add1/load", {"parameters": {"config": "{}"}}, 400, "not supported"),
        ("models/add1/load", {"parameters": {"file:1/model.onnx": ""}}, 400, "not supported"),
        ("models/add1/load", {"parameters": 3}, 400, "expected an object"),
        ("models/add1/load", b"{", 400, "not valid JSON"),
    ],
)
def test_repository_faults(
    server: RunningServer, path: str, body: Any, status: int, text: str
) -> None:
    answer = call(server, "POST", f"/v2/repository/{path}", body)
    assert answer.status == status
    assert text in answer.error


# ---- tables


def test_tables_are_listed(server: RunningServer) -> None:
    tables = {table["name"]: table for table in server.get_json("/v2/tables")["tables"]}
    assert tables.keys() == {"feat", "strict"}
    assert tables["feat"]["absent"] == "default"
    assert tables["strict"] == server.get_json("/v2/tables/strict")
    assert tables["strict"]["absent"] == "error"
    assert (tables["feat"]["num_rows"], tables["feat"]["dim"]) == (1000, 4)
    assert (tables["feat"]["row_bytes"], tables["feat"]["slot_bytes"]) == (16, 16)
    answer = call(server, "GET", "/v2/tables/none")
    assert (answer.status, answer.error) == (404, "unknown table 'none'")


def lookup(
    server: RunningServer, body: Any, *headers: tuple[str, str], table: str = "feat"
) -> Answer:
    return call(server, "POST", f"/v2/tables/{table}/lookup", body, headers)


def test_lookups_in_the_short_form(server: RunningServer) -> None:
    answer = lookup(server, {"keys": [5, 1234567, 7, 5, -1]})
    rows = model_zoo.feature_rows()[[5, 0, 7, 5, 0]]
    rows[[1, 4]] = 0
    assert answer.json["rows"] == rows.tolist()
    assert sum(answer.json[tier] for tier in ("device", "host", "source")) == 3
    assert answer.json["absent"] == 2
    empty = lookup(server, {"keys": []}).json
    assert empty == {"rows": [], "device": 0, "host": 0, "source": 0, "absent": 0}


def test_lookups_in_the_form_of_the_protocol(server: RunningServer) -> None:
    rows = model_zoo.feature_rows()
    answer = lookup(server, {"id": "l1", "inputs": [tensor("keys", "INT64", [7, 3, 7])]})
    assert answer.json["id"] == "l1"
    assert answer.json["parameters"].keys() == {"device", "host", "source", "absent"}
    (output,) = answer.json["outputs"]
    assert output["shape"] == [3, 4]
    assert output["data"] == rows[[7, 3, 7]].reshape(-1).tolist()
    keys = np.arange(999, -1, -1, dtype=np.int64)
    spec: dict[str, Any] = {"name": "keys", "datatype": "INT64", "shape": [1000]}
    spec["parameters"] = {"binary_data_size": keys.nbytes}
    header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
    length = (LENGTH_HEADER, str(len(header)))
    answer = lookup(server, header + keys.tobytes(), length)
    assert binary_outputs(answer) == {"rows": rows[::-1].tobytes()}


def test_neighbouring_keys_above_two_to_the_53(server: RunningServer) -> None:
    answer = lookup(server, {"keys": [2**53 + 7, 2**63 - 1, -(2**63)]})
    assert answer.json["absent"] == 3


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"keys": 3}, "input 'keys': expected a list"),
        ({"keys": [1.5]}, "expected integers for INT64, got 1.5"),
        ({"keys": [2**63]}, "got 9223372036854775808"),
        ({"keys": [[1, 2]]}, "input 'keys'"),
        ({"keys": ["1"]}, 'expected integers for INT64, got "1"'),
        ({}, "'inputs': expected a list of tensors"),
        ({"inputs": [tensor("keys", "INT32", [1])]}, "expected datatype INT64"),
        (b"{", "not valid JSON"),
        ({"keys": [1] * 70000}, "expected at most 65536 keys"),
    ],
)
def test_wrong_lookups(server: RunningServer, body: Any, text: str) -> None:
    answer = lookup(server, body)
    assert answer.status == 400
    assert text in answer.error


def test_a_strict_table_refuses_absent_keys(server: RunningServer) -> None:
    answer = lookup(server, {"keys": [1, 5000]}, table="strict")
    assert (answer.status, "5000" in answer.error) == (400, True)
    assert lookup(server, {"keys": [1, 999]}, table="strict").json["rows"][1][0] == 999


# ---- counters


def test_counters_under_failure(server: RunningServer) -> None:
    def failures(reason: str) -> float:
        name = "nv_inference_request_failure"
        return metric(server, name, model="gather", version="1", reason=reason)

    before = model_stats(server, "gather")
    rejected = {reason: failures(reason) for reason in ("OTHER", "BACKEND", "CANCELED")}
    good = {"inputs": [tensor("idx", "INT64", [1, 2])]}
    for _ in range(5):
        assert infer(server, "gather", good).status == 200
    for body in (b"{", b"[]", {"inputs": [tensor("idx", "INT64", [[1]])]}):
        assert infer(server, "gather", body).status == 400
    for _ in range(2):
        answer = infer(server, "gather", {"inputs": [tensor("idx", "INT64", [99])]})
        assert answer.status >= 400
    series = {labels for _, labels in samples(server)}
    assert infer(server, "none", good).status == 404
    assert {labels for _, labels in samples(server)} == series

    after = model_stats(server, "gather")
    assert count(after, "success") - count(before, "success") == 5
    assert after["inference_count"] - before["inference_count"] == 10
    assert 1 <= after["execution_count"] - before["execution_count"] <= 5
    assert count(after, "fail") - count(before, "fail") == 5
    num_faults = sum(failures(reason) - rejected[reason] for reason in rejected)
    assert num_faults == 5
    assert abs(after["last_inference"] / 1000 - time.time()) < 60
    labels = {"model": "gather", "version": "1"}
    assert metric(server, "nv_inference_request_success", **labels) == count(after, "success")
    assert metric(server, "nv_inference_count", **labels) == after["inference_count"]
    assert metric(server, "nv_inference_exec_count", **labels) == after["execution_count"]
    assert num_pending(server, "gather") == 0


def test_table_counters_and_histograms(server: RunningServer) -> None:
    def positions() -> dict[str, float]:
        name = "hotshelf_table_lookups_total"
        tiers = ("device", "host", "source", "absent")
        return {tier: metric(server, name, table="feat", tier=tier) for tier in tiers}

    before = positions()
    counts = lookup(server, {"keys": [1, 1, 2, 3, 99999]}).json
    after = positions()
    assert {tier: after[tier] - before[tier] for tier in after} == {
        tier: counts[tier] for tier in after
    }
    infer(server, "sum_features", {"inputs": [tensor("keys", "INT64", [[1]])]})
    labels = {"model": "sum_features", "version": "1"}
    total = metric(server, "hotshelf_lookup_seconds_count", **labels)
    assert total == metric(server, "hotshelf_lookup_seconds_bucket", **labels, le="+Inf") > 0
    assert metric(server, "hotshelf_budget_bytes", budget="host") > 0
    assert metric(server, "hotshelf_budget_used_bytes", budget="device") > 0
    assert metric(server, "hotshelf_page_faults_total", kind="minor") > 0


def test_every_metric_is_documented(server: RunningServer) -> None:
    text = call(server, "GET", "/metrics").body.decode()
    names = set(re.findall(r"^# TYPE ((?:nv|hotshelf)_\w+)", text, re.MULTILINE))
    document = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `((?:nv|hotshelf)_\w+)`", document, re.MULTILINE))
    assert names == documented


# ---- waiting, leaving


def test_a_timeout_in_the_queue_fires_while_the_model_is_busy(server: RunningServer) -> None:
    before = model_stats(server, "slow")
    busy = occupy_slow(server, 3.0)
    timeout = {"parameters": {"timeout": 300_000}}  # microseconds
    answer = infer(server, "slow", slow_body(0.001) | timeout)
    meanwhile = model_stats(server, "slow")
    assert meanwhile["execution_count"] == before["execution_count"], "the model is not busy"
    assert busy.answer().status == 200
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert "timeout" in answer.error
    after = model_stats(server, "slow")
    assert after["execution_count"] - before["execution_count"] == 1
    assert infer(server, "slow", slow_body(0.001)).status == 200


def test_clients_that_leave_are_not_computed(server: RunningServer) -> None:
    def canceled() -> float:
        name = "nv_inference_request_failure"
        return metric(server, name, model="slow", version="1", reason="CANCELED")

    before, canceled_before = model_stats(server, "slow"), canceled()
    busy = occupy_slow(server, 2.0)
    leaving = [begin_infer(server, "slow", slow_body(2.0)) for _ in range(50)]
    wait_for(lambda: num_pending(server, "slow") == 50)
    for begun in leaving:
        begun.close()
    wait_for(lambda: num_pending(server, "slow") == 0)
    normal = infer(server, "slow", slow_body(0.001))
    assert normal.status == busy.answer().status == 200
    after = model_stats(server, "slow")
    assert after["execution_count"] - before["execution_count"] == 2
    assert canceled() - canceled_before == 50


def test_a_client_that_leaves_a_running_batch_does_not_hurt_the_others(
    server: RunningServer,
) -> None:
    for _ in range(5):
        leaving = begin_infer(server, "id_fp32", x([[1, 1, 1, 1]]))
        staying = begin_infer(server, "id_fp32", x([[2, 2, 2, 2]]))
        leaving.close()
        assert staying.answer().json["outputs"][0]["data"] == [2, 2, 2, 2]
    assert num_pending(server, "id_fp32") == 0


def test_a_client_that_leaves_in_the_middle_of_its_body(server: RunningServer) -> None:
    head = b"POST /v2/models/add1/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"
    before = model_stats(server, "add1")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head)
    wait_for(lambda: count(model_stats(server, "add1"), "fail") > count(before, "fail"))


def begin_body(server: RunningServer, path: str) -> Begun:
    """A POST of which the last bytes of the body are missing."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(len(JSON_BODY)))
    connection.endheaders(JSON_BODY[:-1])
    return Begun(connection)


def test_a_client_that_stalls_in_its_body_does_not_hold_the_model(server: RunningServer) -> None:
    charge = "hotshelf_budget_charge_bytes"
    labels = frozenset({"budget": "device", "owner": "model:unbatched:1"}.items())
    assert (charge, labels) in samples(server)
    stalled = begin_body(server, "/v2/models/unbatched/infer")
    assert call(server, "POST", "/v2/repository/models/unbatched/unload").status == 200
    wait_for(lambda: (charge, labels) not in samples(server))
    stalled.connection.send(JSON_BODY[-1:])
    assert stalled.answer().status == 400
    assert call(server, "POST", "/v2/repository/models/unbatched/load").status == 200


# ---- the description


def test_the_description_has_every_endpoint_and_no_other_errors(server: RunningServer) -> None:
    document = server.get_json("/openapi.json")
    paths = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
    }
    model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
    assert paths == {
        "GET /v2",
        "GET /v2/health/live",
        "GET /v2/health/ready",
        "GET /metrics",
        "GET /v2/models/stats",
        *(f"GET {path}{suffix}" for path in (model, version)
          for suffix in ("", "/ready", "/config", "/stats")),
        f"POST {model}/infer",
        f"POST {version}/infer",
        "POST /v2/repository/index",
        "POST /v2/repository/models/{name}/load",
        "POST /v2/repository/models/{name}/unload",
        "GET /v2/tables",
        "GET /v2/tables/{name}",
        "POST /v2/tables/{name}/lookup",
    }  # fmt: skip
    text = json.dumps(document)
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names <= document["components"]["schemas"].keys()
    assert "422" not in text
    assert "Validation" not in text
    assert call(server, "GET", "/docs").status == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_examples_of_the_documentation_work(server: RunningServer) -> None:
    document = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    examples = re.findall(r"```sh\n(.*?)```", document, re.DOTALL)
    assert len(examples) >= 8
    for example in examples:
        script = example.replace("localhost:8000", f"127.0.0.1:{server.port}")
        result = subprocess.run(
            ["bash", "-ec", script.replace("curl ", "curl -sS --fail-with-body ")],
            capture_output=True,
            timeout=60,
        )
        assert result.returncode == 0, (example, result.stdout, result.stderr)


# ---- start and end

# Longer than anybody waits for a server to end.
LONG_GRACE_S = "600"


def test_sigterm_finishes_what_was_accepted(repository: Path) -> None:
    with running_server(repository, "--shutdown-grace-s", LONG_GRACE_S) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        kept.request("GET", "/v2/health/live")
        kept.getresponse().read()
        running = occupy_slow(server, 2.0)
        queued = [begin_infer(server, "slow", slow_body(0.5)) for _ in range(5)]
        wait_for(lambda: num_pending(server, "slow") == 5)
        server.terminate()
        wait_for(lambda: not server.is_ready())
        kept.request("GET", "/v2/health/live")
        assert kept.getresponse().read() == b'{"live":true}'
        late = infer(server, "add1", x([[1, 2, 3, 4]]))
        assert (late.status, late.headers["retry-after"]) == (503, "1")
        assert "shutting down" in late.error
        for begun in (running, *queued):
            assert begun.answer().status == 200
        assert server.wait() == 0
        kept.close()
        for connection in idle:
            connection.close()


def test_what_outlasts_the_grace_is_answered_503(repository: Path) -> None:
    with running_server(repository, "--shutdown-grace-s", "0.5") as server:
        accepted = [occupy_slow(server, 600)]
        accepted += [begin_infer(server, "slow", slow_body(600)) for _ in range(2)]
        wait_for(lambda: num_pending(server, "slow") == 2)
        server.terminate()
        for begun in accepted:
            answer = begun.answer()
            assert answer.status == 503
            assert answer.error
        assert server.wait() == 0


def test_a_second_signal_ends_it_at_once(repository: Path) -> None:
    with running_server(repository, "--shutdown-grace-s", LONG_GRACE_S) as server:
        running = occupy_slow(server, 600)
        server.terminate()
        wait_for(lambda: not server.is_ready())
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        running.close()


def test_clients_that_stall_in_their_body_do_not_delay_the_end(repository: Path) -> None:
    with running_server(repository, "--shutdown-grace-s", LONG_GRACE_S) as server:
        paths = ("models/add1/infer", "tables/feat/lookup", "repository/index")
        stalled = [begin_body(server, f"/v2/{path}") for path in paths]
        assert infer(server, "add1", x([[1, 2, 3, 4]])).status == 200
        server.terminate()
        for begun in stalled:
            assert begun.answer().status == 503
        assert server.wait() == 0


def stuck_model(root: Path) -> None:
    """A model that never ends loading: its `model.yaml` is a pipe that nobody writes to."""
    path = model_zoo.add1(root, "stuck")
    os.mkfifo(path.parents[1] / "model.yaml")


def test_a_model_that_is_still_loading_is_unavailable_and_does_not_delay_the_end(
    tmp_path: Path,
) -> None:
    stuck_model(tmp_path)
    arguments = ("--shutdown-grace-s", "0.2")
    server = start_server(tmp_path, *arguments, log_file=tmp_path / "log")
    try:
        wait_for(lambda: is_live(server))
        for method, path in (("POST", "stuck/infer"), ("GET", "stuck"), ("GET", "stuck/ready")):
            body = JSON_BODY if method == "POST" else None
            answer = call(server, method, f"/v2/models/{path}", body)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.error == "model 'stuck' is still loading"
        assert infer(server, "none", JSON_BODY).status == 404
        (entry,) = call(server, "POST", "/v2/repository/index").json
        assert entry["state"] == "LOADING"
        server.terminate()
        assert server.wait() == 0
    finally:
        server.process.kill()
        server.process.wait()


def is_live(server: RunningServer) -> bool:
    try:
        return call(server, "GET", "/v2/health/live").status == 200
    except OSError:
        return False


def test_a_load_that_does_not_end_does_not_delay_the_end(tmp_path: Path) -> None:
    stuck_model(tmp_path)
    with running_server(tmp_path, "--load", "none", "--shutdown-grace-s", "0.2") as server:
        loading = begin(server, "POST", "/v2/repository/models/stuck/load")
        wait_for(lambda: "LOADING" in call(server, "POST", "/v2/repository/index").body.decode())
        server.terminate()
        assert loading.answer().status == 503
        assert server.wait() == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_does_not_stop_the_server(tmp_path: Path) -> None:
    model_zoo.add1(tmp_path)
    locked = model_zoo.add1(tmp_path, name="locked").parent.parent
    locked.chmod(0)
    with running_server(tmp_path) as server:
        assert infer(server, "add1", x([[1, 2, 3, 4]])).status == 200
        answer = infer(server, "locked", x([[1, 2, 3, 4]]))
        assert (answer.status, "Permission denied" in answer.error) == (400, True)
        index = call(server, "POST", "/v2/repository/index").json
        assert [entry["state"] for entry in index] == ["READY", "UNAVAILABLE"]
    locked.chmod(0o700)


def start_and_fail(path: Path, log_file: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Exit code and output of a server that must not start."""
    server = start_server(path, *arguments, log_file=log_file, env=env)
    try:
        return server.wait(), server.log()
    finally:
        server.process.kill()


def test_a_wrong_setting_is_one_line_and_exit_code_2(repository: Path, tmp_path: Path) -> None:
    exit_code, text = start_and_fail(repository, tmp_path / "log", HOTSHELF_TABLE_MEMORY="lots")
    assert exit_code == 2
    assert text == (
        "hotshelf: table_memory: expected a size such as 1GiB, 256MiB, 64MB or 1073741824, "
        "or auto, got 'lots' (environment variable HOTSHELF_TABLE_MEMORY)\n"
    )


def test_what_cannot_be_served_ends_the_start(repository: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    exit_code, text = start_and_fail(repository, log, "--device", "cuda:0")
    assert (exit_code, "cuda:0" in text.splitlines()[-1]) == (1, True)
    exit_code, text = start_and_fail(tmp_path / "none", log)
    assert (exit_code, "No such file" in text.splitlines()[-1]) == (1, True)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"not a model")
    exit_code, text = start_and_fail(broken, log)
    assert (exit_code, "broken.onnx" in text.splitlines()[-1]) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        exit_code, text = start_and_fail(repository, log, "--port", port)
    assert exit_code == 1
    assert text == f"hotshelf: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_single_file_json_logs_and_the_environment(repository: Path) -> None:
    path = repository / "models" / "add1" / "1" / "model.onnx"
    with running_server(path, env={"HOTSHELF_LOG_FORMAT": "json"}) as server:
        assert infer(server, "add1", x([[1, 2, 3, 4]])).status == 200
        wait_for(lambda: "serving" in server.log())
        lines = [json.loads(line) for line in server.log().splitlines()]
        (serving,) = [line for line in lines if line["message"] == "serving"]
        assert serving["models"] == {"add1:1": "READY"}
        assert serving["url"] == server.url
        assert serving["device"] == "cpu"
        assert serving["budgets"]["device"]["max_bytes"] == 2**30
        assert serving["budgets"]["device"]["used_bytes"] > 0
        assert serving["tables"] == []


def test_json_logs_tell_of_the_tables(repository: Path) -> None:
    with running_server(repository, "--load", "none", "--log-format", "json") as server:
        wait_for(lambda: "serving" in server.log())
        (line,) = [line for line in server.log().splitlines() if '"serving"' in line]
        (slab,) = json.loads(line)["tables"]
        assert slab["names"] == ["feat", "strict"]
        assert (slab["num_rows"], slab["host_tier"]) == (2000, "inclusive")


def test_a_single_file_that_is_not_loaded_yet(repository: Path) -> None:
    path = repository / "models" / "add1" / "1" / "model.onnx"
    with running_server(path, "--load", "none") as server:
        wait_for(lambda: "add1:1  UNAVAILABLE  (not loaded)" in server.log())
        assert call(server, "POST", "/v2/repository/models/add1/load").status == 200
        assert infer(server, "add1", x([[1, 2, 3, 4]])).status == 200


def test_the_banner(repository: Path) -> None:
    with running_server(repository, "--load", "none", "--table-memory", "1MiB") as server:
        wait_for(lambda: "metrics:" in server.log())
        text = server.log()
        for part in (
            "device  cpu",
            "tables up to 1MiB",
            "add1:1  UNAVAILABLE",
            "feat",
            server.url,
            "host tier inclusive",
        ):
            assert part in text
        assert infer(server, "add1", x([[1, 2, 3, 4]])).status == 400
        assert call(server, "POST", "/v2/repository/models/add1/load").status == 200
        assert infer(server, "add1", x([[1, 2, 3, 4]])).status == 200


def test_help_and_unknown_options() -> None:
    def hotshelf(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "server", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=server_environment(),
            timeout=60,
        )

    shown = hotshelf("serve", "--help")
    assert shown.returncode == 0
    assert "--table-memory" in shown.stdout
    assert hotshelf("serve", "--table-memry", "1").returncode == 2
    assert "sweep" in hotshelf("--help").stdout
    assert "--rows" in hotshelf("demo", "init", "--help").stdout
