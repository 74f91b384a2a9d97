"""Infer requests of the demo model in the Open Inference Protocol v2, and a check of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

HEADER_LENGTH = "Inference-Header-Content-Length"
OUTPUT = "score"
_SCORE_BYTES = 4


class Encoder:
    """Encodes requests of a fixed number of rows; the binary form copies the arrays and no more."""

    def __init__(self, *, rows: int, num_tables: int, num_dense: int, is_binary: bool) -> None:
        self.rows = rows
        self.is_binary = is_binary
        self.headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._inputs: list[dict[str, Any]] = [
            {"name": "dense", "datatype": "FP32", "shape": [rows, num_dense]},
            {"name": "keys", "datatype": "INT64", "shape": [rows, num_tables]},
        ]
        self._prefix = b""
        if is_binary:
            sizes = (rows * num_dense * 4, rows * num_tables * 8)
            for tensor, size in zip(self._inputs, sizes, strict=True):
                tensor["parameters"] = {"binary_data_size": size}
            outputs = [{"name": OUTPUT, "parameters": {"binary_data": True}}]
            self._prefix = orjson.dumps({"inputs": self._inputs, "outputs": outputs})
            self.headers["Content-Type"] = "application/octet-stream"
            self.headers[HEADER_LENGTH] = str(len(self._prefix))

    def body(self, dense: NDArray[np.float32], keys: NDArray[np.int64]) -> bytes:
        """The body for `dense` [rows, num_dense] and `keys` [rows, num_tables]."""
        if self.is_binary:
            return b"".join((self._prefix, dense.tobytes(), keys.tobytes()))
        inputs = [dict(tensor) for tensor in self._inputs]
        for tensor, array in zip(inputs, (dense, keys), strict=True):
            tensor["data"] = np.ascontiguousarray(array).reshape(-1)
        outputs = [{"name": OUTPUT, "parameters": {"binary_data": False}}]
        request = {"inputs": inputs, "outputs": outputs}
        return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)

    def is_complete(self, header_length: str | None, content: bytes) -> bool:
        """Whether an answer with status 200 holds a score for every row."""
        try:
            if self.is_binary:
                binary_bytes = len(content) - int(header_length or len(content))
                return binary_bytes == self.rows * _SCORE_BYTES
            outputs = orjson.loads(content)["outputs"]
            return len(outputs) == 1 and len(outputs[0]["data"]) == self.rows
        except (ValueError, KeyError, TypeError, IndexError):
            return False
