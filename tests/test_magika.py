"""A model that somebody else trained and packaged, served from its own file as it is."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from magika import Magika
from numpy.typing import NDArray

from tests.serving import ROOT, RunningServer, running_server

LENGTH_HEADER = "Inference-Header-Content-Length"
# The server is on this machine, whatever proxy the environment names.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteSession:
    """Stands in for Magika's ONNX session: asks the server, and compares with onnxruntime."""

    def __init__(self, server: RunningServer, local: Any) -> None:
        self.num_rows = 0
        self._local = local
        (self._name,) = [
            model["name"] for model in server.get_json("/v2/models/stats")["model_stats"]
        ]
        self._url = f"{server.url}/v2/models/{self._name}/infer"

    def run(
        self, outputs: list[str], features: dict[str, list[list[int]]]
    ) -> list[NDArray[np.float32]]:
        """The outputs over HTTP, which are bit for bit those of onnxruntime in process."""
        inputs = {name: np.array(rows, np.int32) for name, rows in features.items()}
        answers = self._infer(outputs, inputs)
        for answer, expected in zip(answers, self._local.run(outputs, inputs), strict=True):
            assert answer.shape == expected.shape
            assert answer.tobytes() == expected.tobytes()
            self.num_rows += len(answer)
        return answers

    def _infer(
        self, outputs: list[str], inputs: dict[str, NDArray[np.int32]]
    ) -> list[NDArray[np.float32]]:
        message = {
            "inputs": [
                {
                    "name": name,
                    "datatype": "INT32",
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name, array in inputs.items()
            ],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        }
        header = json.dumps(message).encode()
        body = header + b"".join(array.tobytes() for array in inputs.values())
        request = urllib.request.Request(self._url, body, {LENGTH_HEADER: str(len(header))})
        with OPENER.open(request, timeout=60) as response:
            length = int(response.headers[LENGTH_HEADER])
            described = json.loads(response.read(length))["outputs"]
            return [
                np.frombuffer(
                    response.read(output["parameters"]["binary_data_size"]), np.float32
                ).reshape(output["shape"])
                for output in described
            ]


def model_file() -> Path:
    """The newest model in the package."""
    (path,) = sorted(Path(str(resources.files("magika"))).glob("models/*/model.onnx"))[-1:]
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(model_file()) as running:
        yield running


def real_files() -> list[Path]:
    sources = sorted((ROOT / "server").glob("*.py")) + sorted((ROOT / "docs").glob("*.md"))
    # Magika answers for tiny files without its model.
    sources = [path for path in sources if path.stat().st_size > 100]
    return [*sources[:12], ROOT / "pyproject.toml", model_file(), Path(sys.executable).resolve()]


def test_files_are_recognised_over_http_as_in_process(server: RunningServer) -> None:
    in_process, over_http = Magika(), Magika()
    session = onnxruntime.InferenceSession(model_file(), providers=["CPUExecutionProvider"])
    remote = RemoteSession(server, session)
    # Magika makes its session itself, from a model file: no public argument or method lets it ask
    # somebody else.
    over_http._onnx_session = remote
    files = real_files()
    together = over_http.identify_paths(files)
    alone = [over_http.identify_path(path) for path in files]
    assert remote.num_rows == 2 * len(files)
    assert [result.output.label for result in together] == [
        result.output.label for result in in_process.identify_paths(files)
    ]
    assert [result.output.label for result in alone] == [result.output.label for result in together]
    assert {"python", "toml"} <= {result.output.label for result in together}
