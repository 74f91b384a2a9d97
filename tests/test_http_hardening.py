"""What hostile or unlucky clients, files and settings can do: each is told, and harms no one."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from cache import FeatureCache, open_device
from models.errors import ModelLoadError
from models.onnx_files import model_files
from models.onnx_tensors import reason
from server.errors import InvalidRequestError, QueueFullError
from server.lookup import MAX_WAITING, TableLookup
from server.oip_decode import parse_object
from server.service import StartError, _bind
from server.settings import SettingsError, read_settings
from tests import model_zoo
from tests.cache_fixtures import new_device
from tests.serving import RunningServer, running_server
from tests.stuck_cache import StuckCache, stuck_cache

BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
).encode()
KEYS = b'{"keys": [3]}'
UNLOAD = b"POST /v2/repository/models/add1/unload HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("repository")
    model_zoo.add1(root)
    model_zoo.feature_table(root)
    with running_server(root, "--pipeline-depth", "1") as running:
        yield running


# ---- requests that ask for another protocol


def head(path: str, num_bytes: int, *lines: str) -> bytes:
    length = f"Content-Length: {num_bytes}"
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: a", length, *lines, "", "")).encode()


def answers(server: RunningServer, *parts: bytes, number: int = 1) -> list[tuple[int, bytes]]:
    """The answers on one connection to what is sent in parts."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        found = []
        answers = connection.makefile("rb")  # one buffer for all of them
        for _ in range(number):
            status = int(answers.readline().split()[1])
            headers = http.client.parse_headers(answers)
            found.append((status, answers.read(int(headers["content-length"]))))
        return found


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "foo"])
@pytest.mark.parametrize("is_split", [False, True])
def test_the_body_of_a_request_for_an_upgrade_is_no_request(
    server: RunningServer, protocol: str, is_split: bool
) -> None:
    start = head(
        "/v2/models/add1/infer",
        len(UNLOAD),
        "Connection: Upgrade",
        f"Upgrade: {protocol}",
    )
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
    parts = (start, UNLOAD + live) if is_split else (start + UNLOAD + live,)
    refused, alive = answers(server, *parts, number=2)
    assert refused[0] == 400
    assert b"not valid JSON" in refused[1]
    assert alive == (200, b'{"live":true}')
    assert server.get_json("/v2/models/add1/ready")


def test_a_request_that_asks_for_an_upgrade_is_answered(server: RunningServer) -> None:
    lines = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    request = head("/v2/models/add1/infer", len(BODY), *lines) + BODY
    for status, body in answers(server, request * 3, number=3):
        assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [2, 3, 4, 5])
    in_bytes = [request[place : place + 1] for place in range(len(request))]
    assert answers(server, *in_bytes)[0][0] == 200


def test_a_chunked_request_that_asks_for_an_upgrade_is_answered(server: RunningServer) -> None:
    lines = "Host: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked"
    start = f"POST /v2/models/add1/infer HTTP/1.1\r\n{lines}\r\n\r\n".encode()
    assert answers(server, start, b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))[0][0] == 200


def test_a_tunnel_is_refused_and_nothing_after_it_is_read(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n" + UNLOAD)
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    assert received.count(b"HTTP/1.1") == 1
    assert received.startswith(b"HTTP/1.1 400 ")
    assert server.get_json("/v2/models/add1/ready")


# ---- table lookups that wait


@pytest.fixture
def features(tmp_path: Path) -> Iterator[StuckCache]:
    with stuck_cache(tmp_path) as features:
        yield features


def test_the_queue_of_lookups_is_bounded_and_cancelled_ones_leave_it(features: StuckCache) -> None:
    async def story() -> None:
        lookup = TableLookup(features, new_device(), max_answer_bytes=1000, num_threads=1)

        def begin() -> asyncio.Task[object]:
            return asyncio.create_task(lookup.answer("feat", KEYS, None))

        running = begin()
        assert await asyncio.to_thread(features.entered.wait, timeout=10)
        waiting = [begin() for _ in range(MAX_WAITING)]
        with pytest.raises(QueueFullError, match="the queue of table lookups is full") as caught:
            await begin()
        assert caught.value.headers() == {"Retry-After": "1"}
        for task in (running, *waiting[1:]):
            task.cancel()
        await asyncio.wait((running, *waiting[1:]))
        last = begin()
        # The thread of the lookup that was cancelled while it ran is not free before it is done.
        await asyncio.sleep(0)
        assert features.num_entered == 1
        features.gate.set()
        await asyncio.gather(waiting[0], last)
        assert features.num_entered == 3
        assert lookup.stop()

    asyncio.run(story())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_lookups_of_clients_that_left_are_not_run(features: StuckCache) -> None:
    with _served(features) as (port, lookup):

        def begin() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", port), timeout=30)
            connection.sendall(head("/v2/tables/feat/lookup", len(KEYS)) + KEYS)
            return connection

        first = begin()
        assert features.entered.wait(timeout=30)
        left = [begin() for _ in range(MAX_WAITING)]
        wait_for(lambda: len(lookup._waiting) == MAX_WAITING)
        with begin() as refused:
            response = http.client.HTTPResponse(refused)
            response.begin()
            assert (response.status, response.getheader("Retry-After")) == (503, "1")
            assert "full" in json.loads(response.read())["error"]
        for connection in left:
            connection.close()
        wait_for(lambda: not lookup._waiting)
        features.gate.set()
        response = http.client.HTTPResponse(first)
        response.begin()
        assert response.status == 200
        first.close()
    assert features.num_entered == 1


@contextmanager
def _served(features: FeatureCache) -> Iterator[tuple[int, TableLookup]]:
    """The server on these tables in a thread of this process: its port, and its lookups."""
    from models.repository import ModelRepository
    from server.app import App
    from server.http_body import BodyReader
    from server.http_server import HttpServer
    from server.metrics import Metrics
    from server.model_manager import ModelManager
    from server.routes import Services
    from server.service import _uvicorn_config

    device = open_device("cpu", max_bytes=1 << 20, max_host_bytes=1 << 20)
    repository = ModelRepository(Path("none"), tables=features.tables, device=device)
    lookup = TableLookup(features, device, max_answer_bytes=1000, num_threads=1)
    services = Services(
        device=device,
        manager=ModelManager(repository, features, device),
        lookup=lookup,
        metrics=Metrics(features, {}),
        bodies=BodyReader(1000),
        version="0",
    )

    async def drain() -> float:
        return 1.0

    class Server(HttpServer):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    listener = _bind("127.0.0.1", 0)
    listener.listen()  # whoever connects before the server accepts waits in its backlog
    server = Server(_uvicorn_config(App(services)), drain)
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(lambda: asyncio.run(server.serve(sockets=[listener])))
        try:
            yield listener.getsockname()[1], lookup
        finally:
            server.should_exit = True
            serving.result(timeout=30)
            lookup.stop()


# ---- bodies


def test_large_bodies_are_parsed_without_garbage_collection() -> None:
    started: list[object] = []

    def note(phase: str, _: object) -> None:
        started.append(phase)

    text = b'{"a": [' + b"[[]]," * 300_000 + b"[]]}"
    gc.callbacks.append(note)
    try:
        orjson.loads(text)
        num_with = len(started)
        parse_object(text, "the request")
        num_without = len(started) - num_with
    finally:
        gc.callbacks.remove(note)
    assert num_with > 100
    assert num_without < 10
    with pytest.raises(InvalidRequestError):
        parse_object(text[:-1], "the request")
    assert gc.isenabled()


# ---- settings and files


@pytest.mark.parametrize("text", ["repository: 2024-13-45", "[" * 3000, "port: \xff"])
def test_a_config_file_that_yaml_cannot_read_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    config = tmp_path / "hotshelf.yaml"
    config.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError, match="is not valid YAML") as caught:
        read_settings({"config": str(config)}, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["a..b", "a\0b"])
def test_a_host_that_cannot_be_a_name_is_told_in_one_line(host: str) -> None:
    with pytest.raises(StartError, match="cannot listen on") as caught:
        _bind(host, 0)
    assert "\n" not in str(caught.value)


def test_a_folder_as_model_file_is_told_the_option(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"for a folder use --repository {tmp_path}$"):
        read_settings({"model_file": str(tmp_path)}, {})


def test_a_model_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(ModelLoadError, match=r"^m: is not a regular file, expected an ONNX file$"):
        model_files(tmp_path / "model.onnx", "m")


@pytest.mark.parametrize(
    ("place", "rest"),
    [
        (
            "/onnxruntime_src/onnxruntime/core/providers/cpu/tensor/reshape_helper.h:91 "
            "onnxruntime::ReshapeHelper::ReshapeHelper(const onnxruntime::TensorShape&, bool) "
            "input_shape_size == requested_shape_size was false. ",
            "The input tensor cannot be reshaped. Input shape:{2,4}",
        ),
        (
            "/onnxruntime_src/onnxruntime/core/framework/op_kernel.cc:87 virtual OrtValue* "
            "onnxruntime::OpKernelContext::OutputMLValue(int, const onnxruntime::TensorShape&) "
            "status.IsOK() was false. ",
            "OrtValue shape verification failed.",
        ),
        (
            "/src/op_kernel.cc:87 virtual OrtValue* a::B(std::function<void(int)>) const "
            "[ONNXRuntimeError] : 1 : FAIL : tensor.cc:57 CalculateTensorStorageSize ",
            "Tensor shape.Size() must be >= 0",
        ),
        ("", "indices element out of data bounds, idx=9 must be within the range [-2,1]"),
    ],
)
def test_errors_of_onnx_runtime_do_not_tell_its_source(place: str, rest: str) -> None:
    start = "Non-zero status code returned while running A node. Name:'' Status Message: "
    error = RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : {start}{place}{rest}\n")
    assert reason(error) == start + rest
