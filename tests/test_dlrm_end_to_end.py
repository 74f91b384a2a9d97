"""The demo model over HTTP against onnxruntime and a NumPy gather, from every tier."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.cuda import probe
from cache.table import read_tables
from loadtests.demo import dlrm_weights, write_demo
from tests.cache_fixtures import DEVICES
from tests.dlrm_reference import Floats, gather, onnxruntime_scores
from tests.serving import (
    SERVER,
    SERVER_ON_DOUBLE,
    RunningServer,
    running_server,
    wait_for_log,
)

NUM_ROWS = 100_000
TABLE_BYTES = NUM_ROWS * 64
SEED = 11

# Name -> the server's memory, and the tiers that serve rows there. Of the 5 MiB, staging takes 4.
NAME_TO_MEMORY = {
    "no host tier": (("--host-memory", "0"), {"device", "source"}),
    "spill": (("--host-memory", "5MiB"), {"device", "host", "source"}),
    "all rows in host memory": (("--host-memory", "256MiB"), {"device", "host"}),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small demo."""
    path = tmp_path_factory.mktemp("dlrm") / "demo"
    write_demo(path, num_rows=NUM_ROWS, seed=SEED)
    return path


class Serving(NamedTuple):
    """A running server; `tolerance` is 0 where its model is run by what runs the reference."""

    server: RunningServer
    tiers: set[str]
    tolerance: float


@pytest.fixture(scope="module", params=itertools.product(DEVICES, NAME_TO_MEMORY), ids="-".join)
def serving(request: pytest.FixtureRequest, repository: Path) -> Iterator[Serving]:
    """A server with a device tier of 1 %."""
    kind, memory = request.param
    if kind == "cuda" and (problem := probe().problem):
        pytest.skip(problem)
    options, tiers = NAME_TO_MEMORY[memory]
    device = "cpu" if kind == "cpu" else "cuda:0"
    module = SERVER_ON_DOUBLE if kind == "cuda-double" else SERVER
    with running_server(
        repository, "--device", device, "--table-memory", str(TABLE_BYTES // 100), *options,
        module=module,
    ) as server:  # fmt: skip
        wait_for_log(server, f" {device}")  # the banner comes when the server is ready already
        # On a GPU, ONNX Runtime multiplies in TF32, with 10 bits of fraction.
        yield Serving(server, tiers, 2e-3 if kind == "cuda" else 0.0)


def post(
    url: str, inputs: dict[str, NDArray[Any]], output: str
) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """POST binary tensors; returns the output in its shape, and the parameters of the answer."""
    kinds = {"float32": "FP32", "int64": "INT64"}
    tensors = [
        {
            "name": name,
            "datatype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in inputs.items()
    ]
    outputs = [{"name": output, "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": tensors, "outputs": outputs}).encode()
    body = head + b"".join(array.tobytes() for array in inputs.values())
    headers = {"Inference-Header-Content-Length": str(len(head))}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(urllib.request.Request(url, body, headers)) as response:
        content = response.read()
        split = int(response.headers["Inference-Header-Content-Length"])
    answer = json.loads(content[:split])
    [tensor] = answer["outputs"]
    values = np.frombuffer(content[split:], np.float32).reshape(tensor["shape"])
    return values, answer.get("parameters", {})


def infer(server: RunningServer, dense: Floats, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    """The scores of one request."""
    url = f"{server.url}/v2/models/dlrm/infer"
    return post(url, {"dense": dense, "keys": keys}, "score")[0]


def features(repository: Path, num_rows: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Dense features, and keys over the whole of every table with a few hot rows in each."""
    rng = np.random.default_rng(seed)
    sizes = [table.num_rows for table in read_tables(repository / "tables")]
    cold = np.stack([rng.integers(0, size, num_rows) for size in sizes], axis=1)
    hot = rng.integers(0, 4, cold.shape)
    keys = np.where(rng.random(cold.shape) < 0.5, hot, cold)
    return rng.standard_normal((num_rows, 13), dtype=np.float32), keys


def test_rows_are_equal_bit_for_bit_from_every_tier(repository: Path, serving: Serving) -> None:
    server, tiers, _ = serving
    rng = np.random.default_rng(1)
    seen: dict[str, int] = {}
    for table in read_tables(repository / "tables")[:6]:
        rows = np.fromfile(table.row_file, np.float32).reshape(table.num_rows, table.dim)
        every_key = np.arange(table.num_rows)
        asked = [np.arange(20), every_key, np.arange(20), rng.permutation(every_key), np.arange(20)]
        # At last rows that have left the device tier, and those that have just come into it.
        for keys in (*asked, rng.integers(0, table.num_rows, 300), np.repeat(np.arange(9), 3)):
            got, counts = post(
                f"{server.url}/v2/tables/{table.name}/lookup", {"keys": keys}, "rows"
            )
            assert got.tobytes() == rows[keys].tobytes()
            for tier, count in counts.items():
                seen[tier] = seen.get(tier, 0) + count
    assert {tier for tier, count in seen.items() if count} == tiers


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 256])
def test_scores_are_equal_bit_for_bit_when_run_in_the_same_batch(
    repository: Path, serving: Serving, num_rows: int
) -> None:
    dense, keys = features(repository, num_rows, seed=num_rows)
    expected = onnxruntime_scores(repository, dense, gather(repository, keys))
    for _ in range(3):  # from the source, then from other tiers
        scores = infer(serving.server, dense, keys)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=serving.tolerance)
        assert serving.tolerance or scores.tobytes() == expected.tobytes()


def test_scores_of_rows_batched_otherwise_are_within_a_rounding(
    repository: Path, serving: Serving
) -> None:
    dense, keys = features(repository, 60, seed=5)
    expected = onnxruntime_scores(repository, dense, gather(repository, keys))
    for start in range(0, 60, 4):
        part = slice(start, start + 4)
        np.testing.assert_allclose(
            infer(serving.server, dense[part], keys[part]),
            expected[part],
            rtol=0,
            atol=max(1e-6, serving.tolerance),
        )


def test_scores_agree_with_an_independent_torch_model(repository: Path, serving: Serving) -> None:
    torch = pytest.importorskip("torch")
    dense, keys = features(repository, 100, seed=6)
    weights = {name: torch.from_numpy(w) for name, w in dlrm_weights(16, SEED).items()}
    tables = [
        torch.from_numpy(np.fromfile(t.row_file, np.float32).reshape(t.num_rows, t.dim))
        for t in read_tables(repository / "tables")
    ]

    def mlp(part: str, num_layers: int, x: Any) -> Any:
        for layer in range(num_layers):
            weight, bias = (weights[f"{part}_{layer}_{kind}"] for kind in ("weight", "bias"))
            x = torch.nn.functional.linear(x, weight.T, bias)
            if (part, layer) != ("top", num_layers - 1):
                x = torch.relu(x)
        return x

    bottom = mlp("bottom", 2, torch.from_numpy(dense))
    columns = torch.from_numpy(keys).unbind(dim=1)
    embedded = [torch.nn.functional.embedding(k, t) for k, t in zip(columns, tables, strict=True)]
    vectors = torch.stack([bottom, *embedded], dim=1)
    products = torch.einsum("nid,njd->nij", vectors, vectors)
    lower = torch.tril_indices(27, 27, offset=-1)
    top = torch.cat([bottom, products[:, lower[0], lower[1]]], dim=1)
    expected = torch.sigmoid(mlp("top", 3, top)).numpy()

    scores = infer(serving.server, dense, keys)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=max(1e-5, serving.tolerance))
