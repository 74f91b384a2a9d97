"""The demo model computed without the server: NumPy gathers, and the formula of the DLRM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from cache.table import read_tables
from loadtests.demo import Weights

Floats = NDArray[np.float32]


def gather(repository: Path, keys: NDArray[np.int64]) -> Floats:
    """The rows of `keys` [n, 26], float32 [n, 26, dim], straight from the row files."""
    columns = []
    for column, table in enumerate(read_tables(repository / "tables")):
        rows = np.fromfile(table.row_file, np.float32).reshape(table.num_rows, table.dim)
        columns.append(rows[keys[:, column]])
    return np.stack(columns, axis=1)


def onnxruntime_scores(repository: Path, dense: Floats, embeddings: Floats) -> Floats:
    """Scores [n, 1] of the model file, run in one batch."""
    path = repository / "models" / "dlrm" / "1" / "model.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [scores] = session.run(["score"], {"dense": dense, "embeddings": embeddings})
    return np.asarray(scores, np.float32)


def numpy_scores(weights: Weights, dense: Floats, embeddings: Floats) -> NDArray[np.float64]:
    """Scores [n, 1] by the formula, in float64, sharing nothing with the ONNX graph."""

    def layer(part: str, number: int, x: NDArray[np.float64]) -> NDArray[np.float64]:
        y = x @ weights[f"{part}_{number}_weight"].astype(np.float64)
        return np.asarray(y + weights[f"{part}_{number}_bias"], np.float64)

    def relu(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(x, 0)

    bottom = relu(layer("bottom", 1, relu(layer("bottom", 0, dense.astype(np.float64)))))
    vectors = np.concatenate([bottom[:, None, :], embeddings.astype(np.float64)], axis=1)
    products = [
        (vectors[:, i] * vectors[:, j]).sum(axis=1)
        for i in range(vectors.shape[1])
        for j in range(i)
    ]
    top = np.concatenate([bottom, np.stack(products, axis=1)], axis=1)
    hidden = relu(layer("top", 1, relu(layer("top", 0, top))))
    return 1 / (1 + np.exp(-layer("top", 2, hidden)))
