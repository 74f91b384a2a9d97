"""The demo's DLRM at three sizes of the table memory: over HTTP, or through the engine alone."""

from __future__ import annotations

import http.client
import importlib
import importlib.util
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.batch import tier_counts
from benchmarks.gpu.check import MIB, Check, SkippedError, WrongResultError
from benchmarks.gpu.report import Figure
from benchmarks.gpu.timing import Samples

if TYPE_CHECKING:
    from cache import FeatureCache
    from loadtests.closed_loop import Replayed
    from server.engine import Engine
    from server.requests import InferenceRequest

TABLE_SHARES = (0.02, 0.1, 0.5)
NUM_ROWS = 64  # of a batch, or of a request
MODEL_BYTES = 1 << 30  # of the GPU, for the model and its workspace
SEED = 7
# A GPU may multiply in tf32 by default, with 10 bits of mantissa.
MAX_SCORE_ERROR = 2e-3
HTTP_MODULES = ("fastapi", "uvicorn", "uvloop", "httptools", "orjson", "prometheus_client")
CUDA_PROVIDER = "CUDAExecutionProvider"

_NUM_CONNECTIONS = 8
_MIN_BATCHES = 20

Floats = NDArray[np.float32]
Keys = NDArray[np.int64]
Model = Literal["onnxruntime", "torch", "onnxruntime on the cpu"]


def run(check: Check) -> None:
    """Write the demo, then serve it at each size. What is missing is named."""
    missing = missing_modules(("onnx", "onnxruntime"))
    if missing:
        raise SkippedError(f"{' and '.join(missing)} is not installed")
    demo = Demo(check, choose_backend(check))
    demo.write()
    missing = missing_modules(HTTP_MODULES)
    if missing:
        check.note(f"not over HTTP, as {', '.join(missing)} is not installed: the engine alone")
    elif check.cupy is not None:
        check.note("not over HTTP, as a server of its own would not have this device object")
    for share in TABLE_SHARES:
        if missing or check.cupy is not None:
            demo.through_engine(share)
        else:
            demo.over_http(share, f"cuda:{check.index}")


def missing_modules(names: Sequence[str]) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def choose_backend(check: Check) -> Model:
    """What runs the model; what is not run is noted."""
    onnxruntime = importlib.import_module("onnxruntime")
    version = f"ONNX Runtime {onnxruntime.__version__}"
    if check.cupy is None and CUDA_PROVIDER in onnxruntime.get_available_providers():
        check.note(f"model: {version} on CUDA")
        return "onnxruntime"
    not_run = "the ONNX Runtime CUDA path was not run, as onnxruntime-gpu is not installed"
    if check.cupy is None and not missing_modules(("torch", "safetensors")):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            check.note(f"{not_run}; model: torch {torch.__version__} on the GPU")
            return "torch"
    check.note(f"{not_run}, nor can torch use the device; model: {version} on the CPU")
    return "onnxruntime on the cpu"


class Demo:
    """The repository, the trace, and the scores that must come out."""

    def __init__(self, check: Check, model: Model) -> None:
        self._check = check
        self._model = model
        self._root = check.work / "demo"
        self._score_error = 0.0

    def write(self) -> None:
        """Write the repository, draw the trace, and compute what comes out."""
        from cache.table import read_tables
        from loadtests.demo import write_demo
        from loadtests.workloads import make_workload

        write_demo(self._root, num_rows=self._check.scale.demo_rows, seed=SEED)
        tables = read_tables(self._root / "tables")
        self._rows_bytes = sum(table.num_rows * table.row_bytes for table in tables)
        self._workload = make_workload(
            [table.num_rows for table in tables],
            profile="zipf",
            seed=SEED,
            num_samples=NUM_ROWS * self._check.scale.demo_batches,
        )
        self._write_config()
        self._dense, self._keys = self._workload.rows(0, NUM_ROWS)
        self._expected = reference_scores(self._root, self._dense, self._keys)

    def _write_config(self) -> None:
        """Let `model.yaml` name the chosen backend."""
        folder = self._root / "models" / "dlrm"
        text = (folder / "model.yaml").read_text(encoding="utf-8")
        old = "backend: onnxruntime\n"
        assert old in text
        if self._model == "onnxruntime on the cpu":
            text = text.replace(old, f"{old}providers: [cpu]\n")
        elif self._model == "torch":
            from benchmarks.gpu import torch_dlrm
            from loadtests.demo import dlrm_weights

            weights = dlrm_weights(torch_dlrm.DIM, SEED)
            torch_dlrm.save_weights(weights, folder / "1" / "model.safetensors")
            text = text.replace(old, torch_dlrm.MODEL_YAML)
        (folder / "model.yaml").write_text(text, encoding="utf-8")

    # Through the engine

    def through_engine(self, share: float) -> None:
        """Measure without HTTP and batching, with so many of the rows in the device tier."""
        from cache import FeatureCache, warm_up
        from cache.cuda import CudaDevice
        from models.repository import ModelRepository
        from server.engine import Engine

        warm_up()
        table_bytes = int(share * self._rows_bytes)
        with (
            self._check.open_device(
                max_bytes=self._rows_bytes + MODEL_BYTES,
                max_host_bytes=self._rows_bytes + MIB,
                kind=CudaDevice,
            ) as device,
            closing(
                FeatureCache.open(
                    self._root / "tables",
                    device,
                    table_memory_bytes=table_bytes,
                    host_memory_bytes=self._rows_bytes,
                    is_direct_io=False,
                )
            ) as features,
        ):
            repository = ModelRepository(
                self._root / "models",
                tables=features.tables,
                device=device,
                trust_model_code=True,
            )
            [model] = repository.open("dlrm")
            with closing(model), closing(Engine(model, features, device)) as engine:
                self._compare(self._scores(engine))
                self._measure_engine(share, engine, features)
                self._compare(self._scores(engine))

    def _scores(self, engine: Engine) -> NDArray[np.generic]:
        result = engine.run([_request(self._dense, self._keys)])
        scores: NDArray[np.generic] = result.responses[0].outputs["score"]
        return scores

    def _measure_engine(self, share: float, engine: Engine, features: FeatureCache) -> None:
        count = self._check.scale.demo_batches
        requests = [
            _request(*self._workload.rows(number * NUM_ROWS, NUM_ROWS)) for number in range(count)
        ]
        for request in requests:  # what is hot comes to the device tier
            engine.run([request])
        before = tier_counts(features)
        times_us = []
        for number, request in enumerate(requests):
            if number >= _MIN_BATCHES and self._check.is_late:
                break
            started_s = time.perf_counter()
            engine.run([request])
            times_us.append((time.perf_counter() - started_s) * 1e6)
        hits, positions = (tier_counts(features) - before).tolist()
        self._report(share, "engine, batch of 64", times_us, hits / positions)
        self._add_rate(
            share, "engine, one batch at a time", NUM_ROWS * 1e6 / float(np.mean(times_us))
        )

    # Over HTTP

    def over_http(self, share: float, device_name: str) -> None:
        """Measure a server, with so many of the rows in its device tier."""
        from loadtests.closed_loop import replay
        from loadtests.server_process import ServerProcess
        from loadtests.workloads import MODEL

        arguments = [
            *("--repository", str(self._root)),
            *("--device", device_name),
            *("--device-memory", str(2 * (self._rows_bytes + MODEL_BYTES))),
            *("--table-memory", str(int(share * self._rows_bytes))),
            *("--host-memory", str(self._rows_bytes + 64 * MIB)),
            *(("--trust-model-code",) if self._model == "torch" else ()),
        ]
        log = self._check.work / f"server-{share:g}.log"
        num_samples = NUM_ROWS * self._check.scale.demo_batches
        with ServerProcess(arguments, log, ready_timeout_s=40) as server:
            self._compare(self._ask(server.port, self._dense, self._keys))

            def watch() -> bool:
                time.sleep(0.01)
                return self._check.is_late

            def send() -> Replayed:
                return replay(
                    server.port,
                    MODEL,
                    self._workload,
                    first_sample=0,
                    last_sample=num_samples,
                    rows_per_request=NUM_ROWS,
                    num_connections=_NUM_CONNECTIONS,
                    watch=watch,
                )

            send()
            before = server.counters()
            replayed = send()
            counted = server.counters().since(before)
            times_us = self._latencies(server.port)
            self._compare(self._ask(server.port, self._dense, self._keys))
        hit_rate = counted.hit_rate("device")
        self._report(share, "HTTP, request of 64", times_us, hit_rate)
        rate = replayed.num_requests * NUM_ROWS / replayed.elapsed_s
        self._add_rate(share, f"HTTP, {_NUM_CONNECTIONS} connections", rate)

    def _latencies(self, port: int) -> list[float]:
        """Microseconds of requests, one at a time over one connection."""
        times_us = []
        with closing(_Client(port)) as client:
            for number in range(self._check.scale.demo_batches):
                if number >= _MIN_BATCHES and self._check.is_late:
                    break
                rows = self._workload.rows(number * NUM_ROWS, NUM_ROWS)
                started_s = time.perf_counter()
                client.scores(*rows)
                times_us.append((time.perf_counter() - started_s) * 1e6)
        return times_us

    @staticmethod
    def _ask(port: int, dense: Floats, keys: Keys) -> Floats:
        with closing(_Client(port)) as client:
            return client.scores(dense, keys)

    # Both

    def _compare(self, scores: NDArray[np.generic]) -> None:
        """Scores must be those of the CPU. Raises `WrongResultError`."""
        error = float(np.abs(scores.astype(np.float64) - self._expected).max())
        if not error <= MAX_SCORE_ERROR:  # also refuses NaN
            raise WrongResultError(
                f"scores are off by {error:.3g}, expected at most {MAX_SCORE_ERROR:g}"
            )
        self._score_error = error

    def _report(self, share: float, how: str, times_us: list[float], hit_rate: float) -> None:
        samples = Samples(tuple(times_us))
        self._check.add(
            Figure(
                f"demo, {share:.0%} of the rows on the GPU: {how}, p50",
                samples.median,
                "us",
                low=samples.percentile(10),
                high=samples.percentile(90),
                details={
                    "p99": samples.percentile(99),
                    "device_hit_rate": hit_rate,
                    "max_score_error": self._score_error,
                },
            )
        )
        self._check.add(
            Figure(f"demo, {share:.0%} of the rows on the GPU: device hits", 100 * hit_rate, "%")
        )

    def _add_rate(self, share: float, how: str, rate: float) -> None:
        what = f"demo, {share:.0%} of the rows on the GPU: {how}"
        self._check.add(Figure(what, float(rate), "rows/s"))


class _Client:
    """One connection to a server of the demo."""

    def __init__(self, port: int) -> None:
        from loadtests.encoding import Encoder

        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self._encoder = Encoder(rows=NUM_ROWS, num_tables=26, num_dense=13, is_binary=True)

    def scores(self, dense: Floats, keys: Keys) -> Floats:
        """The scores [n, 1] of one request."""
        body = self._encoder.body(dense, keys)
        self._connection.request("POST", "/v2/models/dlrm/infer", body, self._encoder.headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise WrongResultError(f"a request got {response.status}: {content[:300]!r}")
        return np.frombuffer(content[-4 * NUM_ROWS :], np.float32).reshape(NUM_ROWS, 1)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _request(dense: Floats, keys: Keys) -> InferenceRequest:
    from server.requests import InferenceRequest, RequestedOutput

    inputs: dict[str, NDArray[Any]] = {"dense": dense, "keys": keys}
    return InferenceRequest(inputs, len(dense), (RequestedOutput("score", is_binary=True),))


def reference_scores(root: Path, dense: Floats, keys: Keys) -> NDArray[np.float64]:
    """Scores [n, 1] from the row files by the formula of the demo's model, in float64."""
    from cache.table import read_tables
    from loadtests.demo import dlrm_weights

    columns = []
    for column, table in enumerate(read_tables(root / "tables")):
        rows = np.memmap(table.row_file, np.float32, "r", shape=(table.num_rows, table.dim))
        columns.append(rows[keys[:, column]].astype(np.float64))
    dim = columns[0].shape[1]
    weights = {name: array.astype(np.float64) for name, array in dlrm_weights(dim, SEED).items()}

    def layers(part: str, count: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
        for layer in range(count):
            if layer:
                x = np.maximum(x, 0)
            x = x @ weights[f"{part}_{layer}_weight"] + weights[f"{part}_{layer}_bias"]
        return x

    bottom = np.maximum(layers("bottom", 2, dense.astype(np.float64)), 0)
    vectors = np.stack([bottom, *columns], axis=1)
    products = vectors @ vectors.transpose(0, 2, 1)
    row, column_of = np.tril_indices(vectors.shape[1], k=-1)
    top = np.concatenate([bottom, products[:, row, column_of]], axis=1)
    scores: NDArray[np.float64] = 1 / (1 + np.exp(-layers("top", 3, top)))
    return scores
