"""Open Inference Protocol v2: arrays to response bodies.

Binary data is sent as views of the arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from models.tensor_spec import TensorSpec
from server.errors import InvalidRequestError
from server.requests import InferenceRequest, InferenceResponse


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """The parts of a body in order; `header_length` is set where binary data follows the JSON.

    The parts may be views of the response's arrays, which must not change until they are sent.
    """

    parts: tuple[bytes | memoryview, ...]
    header_length: int | None


def encode_response(
    model_name: str,
    model_version: str,
    request: InferenceRequest,
    response: InferenceResponse,
    outputs: Sequence[TensorSpec],
) -> EncodedResponse:
    """The answer to `request`: the requested outputs in their order, each in JSON or in binary.

    Raises InvalidRequestError where an output has no JSON form (NaN, infinity, bytes that are not
    UTF-8) and the client did not ask for binary.
    """
    name_to_datatype = {spec.name: spec.datatype for spec in outputs}
    tensors = []
    blobs: list[memoryview | bytes] = []
    for requested in request.outputs:
        array = np.ascontiguousarray(response.outputs[requested.name])
        datatype = name_to_datatype[requested.name]
        # A 0-d array would have become 1-d above; the shape is that of the output.
        shape = response.outputs[requested.name].shape
        tensor: dict[str, Any] = {"name": requested.name, "datatype": datatype, "shape": shape}
        if requested.is_binary:
            blobs.append(blob := _blob(array, datatype))
            tensor["parameters"] = {"binary_data_size": len(blob)}
        else:
            tensor["data"] = _json_data(array, datatype, requested.name)
        tensors.append(tensor)
    message: dict[str, Any] = {"model_name": model_name, "model_version": model_version}
    if request.id is not None:
        message["id"] = request.id
    if response.parameters:
        message["parameters"] = response.parameters
    message["outputs"] = tensors
    header = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    is_binary = any(requested.is_binary for requested in request.outputs)
    return EncodedResponse((header, *blobs), len(header) if is_binary else None)


def _json_data(array: NDArray[np.generic], datatype: str, name: str) -> Any:
    flat = array.reshape(-1)
    if datatype == "BYTES":
        try:
            return [value.decode() for value in flat.tolist()]
        except UnicodeDecodeError:
            raise InvalidRequestError(
                f"output '{name}' holds bytes that are not UTF-8; ask for binary data"
            ) from None
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        raise InvalidRequestError(
            f"output '{name}' holds NaN or infinity, which JSON cannot say; ask for binary data"
        )
    return flat


def _blob(array: NDArray[np.generic], datatype: str) -> memoryview | bytes:
    if datatype == "BYTES":
        values = array.reshape(-1).tolist()
        return b"".join(chain.from_iterable((struct.pack("<I", len(v)), v) for v in values))
    return array.reshape(-1).view(np.uint8).data
