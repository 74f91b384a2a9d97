"""Tiny ONNX models for the tests; each function writes one model into a repository.

Every function writes `<repository>/models/<name>/<version>/model.onnx` and, where there is
something to say, `model.yaml`. Extra keyword arguments are fields of `model.yaml` and win over the
defaults.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str | None]

# Batches of 8 rows, and a delay so that a test can fill one.
WINDOW: dict[str, object] = {"max_batch_size": 8, "max_queue_delay_ms": 100}

# Batches of 8 rows that run only when they cannot grow: longer than any test waits.
FILL: dict[str, Any] = {"max_batch_size": 8, "max_queue_delay_ms": 60_000}

DATATYPE_TO_ONNX = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}

# id_fp32, id_fp16, id_bf16, id_u8, id_i8, id_i32, id_i64, id_u64, id_bool, id_bytes, ...
DATATYPE_TO_IDENTITY_NAME = {
    datatype: "id_" + datatype.lower().replace("uint", "u").replace("int", "i")
    for datatype in DATATYPE_TO_ONNX
}


def value(name: str, datatype: str, shape: Dims) -> onnx.ValueInfoProto:
    """A graph input or output; None and strings are free dimensions."""
    return helper.make_tensor_value_info(name, DATATYPE_TO_ONNX[datatype], shape)


def build(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    **initializers: NDArray[Any],
) -> onnx.ModelProto:
    """A checked model that every ONNX Runtime of the last years can read."""
    tensors = [numpy_helper.from_array(array, name) for name, array in initializers.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializer=tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def write(
    repository: Path,
    name: str,
    model: onnx.ModelProto,
    config: Mapping[str, object] | None = None,
    version: str = "1",
) -> Path:
    """Write a model and its `model.yaml` (none when `config` is empty); return the .onnx file."""
    path = repository / "models" / name / version / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    if config:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        (path.parents[1] / "model.yaml").write_text(text, encoding="utf-8")
    return path


def identity(
    repository: Path, datatype: str = "FP32", name: str | None = None, **config: object
) -> Path:
    """`x` -> `y`, equal, shape [-1,4] ([-1] for BYTES); batches of 8 rows, a delay of 100 ms.

    The name is `id_fp32`, `id_u8`, `id_bytes` and so on, unless given.
    """
    shape: Dims = ["batch"] if datatype == "BYTES" else ["batch", 4]
    model = build(
        [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", datatype, shape)],
        [value("y", datatype, shape)],
    )
    name = name or DATATYPE_TO_IDENTITY_NAME[datatype]
    return write(repository, name, model, WINDOW | config)


def add1_model(increment: float = 1.0) -> onnx.ModelProto:
    """`y` = `x` + increment, FP32 [-1,4]."""
    return build(
        [helper.make_node("Add", ["x", "increment"], ["y"])],
        [value("x", "FP32", ["batch", 4])],
        [value("y", "FP32", ["batch", 4])],
        increment=np.array(increment, np.float32),
    )


def add1(
    repository: Path,
    name: str = "add1",
    increment: float = 1.0,
    version: str = "1",
    **config: object,
) -> Path:
    """`y` = `x` + increment, FP32 [-1,4]; no `model.yaml` unless fields are given."""
    return write(repository, name, add1_model(increment), config, version)


def gather(repository: Path, name: str = "gather", **config: object) -> Path:
    """`y` [-1,4] = row `idx` (INT64 [-1]) of a table [16,4]; row r is [4r, 4r+1, 4r+2, 4r+3].

    An index of 16 or more makes the run fail. Batches of 8 rows, a delay of 100 ms.
    """
    model = build(
        [helper.make_node("Gather", ["table", "idx"], ["y"], axis=0)],
        [value("idx", "INT64", ["batch"])],
        [value("y", "FP32", ["batch", 4])],
        table=np.arange(64, dtype=np.float32).reshape(16, 4),
    )
    return write(repository, name, model, WINDOW | config)


def slow_model() -> onnx.ModelProto:
    """`n_out` = `n` (INT64 [-1,1]) after a loop of max(n) iterations."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition"], ["condition_out"]),
            helper.make_node("Neg", ["state"], ["state_out"]),
        ],
        "body",
        [
            value("iteration", "INT64", []),
            value("condition", "BOOL", []),
            value("state", "INT64", []),
        ],
        [value("condition_out", "BOOL", []), value("state_out", "INT64", [])],
    )
    nodes = [
        helper.make_node("Concat", ["zero_row", "n"], ["counts"], axis=0),
        helper.make_node("ReduceMax", ["counts"], ["trip_count"], keepdims=0),
        helper.make_node("Loop", ["trip_count", "", "zero"], ["state_final"], body=body),
        helper.make_node("Add", ["n", "state_final"], ["n_out"]),
    ]
    return build(
        nodes,
        [value("n", "INT64", ["batch", 1])],
        [value("n_out", "INT64", ["batch", 1])],
        zero=np.array(0, np.int64),
        zero_row=np.zeros((1, 1), np.int64),
    )


def slow(repository: Path, name: str = "slow", **config: object) -> Path:
    """`n_out` = `n` (INT64 [-1,1]); the time grows with the largest n of the batch.

    `slow_iterations(seconds)` says how large n must be. Batches of 8 rows unless told otherwise.
    """
    return write(repository, name, slow_model(), {"max_batch_size": 8} | config)


@functools.cache
def _iterations_per_s() -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        slow_model().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    num_iterations, seconds = 10_000, [0.0]
    while min(seconds) < 0.1:
        num_iterations *= 2
        seconds = [_run_seconds(session, num_iterations) for _ in range(3)]
    return num_iterations / min(seconds)


def _run_seconds(session: Any, num_iterations: int) -> float:
    start = time.perf_counter()
    session.run(None, {"n": np.array([[num_iterations]], np.int64)})
    return time.perf_counter() - start


def slow_iterations(seconds: float) -> int:
    """How large `n` must be for `slow` to take that long on this machine when it is idle.

    Measured once; on a busy machine the run takes longer, never much shorter.
    """
    return max(1, int(seconds * _iterations_per_s()))


def nanmodel(repository: Path, name: str = "nanmodel", **config: object) -> Path:
    """`y` = `x` / 0, FP32 [-1,3]: [0, 1, -1] gives [NaN, Infinity, -Infinity]."""
    model = build(
        [helper.make_node("Div", ["x", "zero"], ["y"])],
        [value("x", "FP32", ["batch", 3])],
        [value("y", "FP32", ["batch", 3])],
        zero=np.zeros(1, np.float32),
    )
    return write(repository, name, model, config)


def two_dims(repository: Path, name: str = "two_dims", **config: object) -> Path:
    """`y` = `x`, FP32 [-1,-1]; batches of 8 rows, a delay of 100 ms."""
    model = build(
        [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", "FP32", ["batch", "width"])],
        [value("y", "FP32", ["batch", "width"])],
    )
    return write(repository, name, model, WINDOW | config)


def two_inputs(repository: Path, name: str = "two_inputs", **config: object) -> Path:
    """`a` FP32 [-1,-1] -> `a_out`, `b` FP32 [-1,-1] -> `b_out`; batches of 8, a delay of 100 ms."""
    model = build(
        [helper.make_node("Identity", [letter], [f"{letter}_out"]) for letter in "ab"],
        [value(letter, "FP32", ["batch", f"width_{letter}"]) for letter in "ab"],
        [value(f"{letter}_out", "FP32", ["batch", f"width_{letter}"]) for letter in "ab"],
    )
    return write(repository, name, model, WINDOW | config)


def wrong_rows(repository: Path, name: str = "wrong_rows", **config: object) -> Path:
    """`y` = `x` (FP32 [-1,4]) without its last row: a model that breaks the batching contract."""
    model = build(
        [helper.make_node("Slice", ["x", "starts", "ends", "axes"], ["y"])],
        [value("x", "FP32", ["batch", 4])],
        [value("y", "FP32", ["fewer", 4])],
        starts=np.array([0], np.int64),
        ends=np.array([-1], np.int64),
        axes=np.array([0], np.int64),
    )
    return write(repository, name, model, {"max_batch_size": 8} | config)


def unbatched(repository: Path, name: str = "unbatched", **config: object) -> Path:
    """`y` = `x` + 1, FP32 [2,3]: a fixed first dimension, so no batching (`max_batch_size` 0)."""
    model = build(
        [helper.make_node("Add", ["x", "one"], ["y"])],
        [value("x", "FP32", [2, 3])],
        [value("y", "FP32", [2, 3])],
        one=np.array(1, np.float32),
    )
    return write(repository, name, model, config)


def sum_features(
    repository: Path,
    tables: str | Sequence[str],
    dim: int = 4,
    name: str = "sum_features",
    key_dims: Dims = ("num_keys",),
    **config: object,
) -> Path:
    """A model that is fed from tables: outputs `rows` (the looked-up rows) and `sum` (over axis 1).

    One name: `keys` INT64 [-1, *key_dims] (free second dimension by default) from that table.
    A sequence of T names: `keys` INT64 [-1, T], column j from the j-th table. The model's own input
    is `embeddings` FP32 [-1, ..., dim]. Batches of 8 rows unless told otherwise.
    """
    is_one = isinstance(tables, str)
    shape = ["batch", *(key_dims if is_one else [len(tables)]), dim]
    model = build(
        [
            helper.make_node("Identity", ["embeddings"], ["rows"]),
            helper.make_node("ReduceSum", ["embeddings", "axes"], ["sum"], keepdims=0),
        ],
        [value("embeddings", "FP32", shape)],
        [value("rows", "FP32", shape), value("sum", "FP32", [shape[0], *shape[2:]])],
        axes=np.array([1], np.int64),
    )
    source = {"table": tables} if is_one else {"tables": list(tables)}
    features = [{"input": "embeddings", "keys": "keys", **source}]
    return write(repository, name, model, {"max_batch_size": 8, "features": features} | config)


def feature_rows(num_rows: int = 1000) -> NDArray[np.float32]:
    """Row k is [k, k+0.25, k+0.5, k+0.75]."""
    steps = np.array([0, 0.25, 0.5, 0.75], np.float32)
    return np.arange(num_rows, dtype=np.float32)[:, None] + steps


def feature_table(
    repository: Path, name: str = "feat", num_rows: int = 1000, **options: Any
) -> Path:
    """A table of dim 4 with the rows of `feature_rows`; options go to `write_table`."""
    from cache.table import write_table

    folder = repository / "tables" / name
    write_table(folder, [feature_rows(num_rows)], dim=4, **options)
    return folder
