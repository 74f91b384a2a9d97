"""Open Inference Protocol v2: request bodies to arrays, and arrays to response bodies.

JSON is parsed and written by orjson. Tensors of the binary extension are views of the body on the
way in (copied only where their place in the body is not aligned) and views of the arrays on the way
out. Every fault of the client is an InvalidRequestError that names the tensor, what was expected
and what came.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec
from server.errors import InvalidRequestError
from server.requests import InferenceRequest, InferenceResponse, RequestedOutput

# The protocol has no JSON form for these.
BINARY_ONLY_DATATYPES = frozenset({"FP16", "BF16"})

# No body is as large; a shape with a 0 in it may not multiply to more either.
MAX_ELEMENTS = 2**48

_DATATYPE_TO_JSON_KINDS: dict[str, tuple[frozenset[type], str]] = {
    "BOOL": (frozenset({bool}), "true or false"),
    "BYTES": (frozenset({str}), "strings"),
    "FP32": (frozenset({int, float}), "numbers"),
    "FP64": (frozenset({int, float}), "numbers"),
}
_INTEGER_KINDS = (frozenset({int}), "integers")
_UNSUPPORTED_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")


def decode_request(
    body: bytes,
    header_length: int | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch_size: int,
) -> InferenceRequest:
    """The request in `body`; `header_length` is Inference-Header-Content-Length where given.

    With `max_batch_size` 0 the model has no batch dimension, and no limit of rows is checked.
    Raises InvalidRequestError.
    """
    message = parse_object(_json_part(body, header_length), "the request")
    parameters = optional_object(message, "parameters", "the request")
    tensors, num_rows = _decode_inputs(message, body, header_length, inputs, max_batch_size)
    return InferenceRequest(
        inputs=tensors,
        num_rows=num_rows,
        outputs=_decode_outputs(message, parameters, outputs),
        id=_optional_string(message, "id"),
        timeout_ms=_timeout_ms(parameters),
    )


def parse_object(text: bytes | memoryview, what: str) -> dict[str, Any]:
    """The JSON object in `text`; raises InvalidRequestError."""
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{what}: expected a JSON object, got {_shown(message)}")
    return message


def optional_object(message: Mapping[str, Any], name: str, what: str) -> dict[str, Any]:
    """The object under `name`, empty where it is left out or null."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what}: '{name}': expected an object, got {_shown(value)}")
    return value


def _json_part(body: bytes, header_length: int | None) -> bytes | memoryview:
    if header_length is None:
        return body
    if header_length == 0:
        raise InvalidRequestError(
            "Inference-Header-Content-Length: expected the length of the JSON part, got 0 "
            "(a body of raw bytes without JSON is not supported)"
        )
    if header_length > len(body):
        raise InvalidRequestError(
            f"Inference-Header-Content-Length: expected at most the {len(body)} bytes of the body, "
            f"got {header_length}"
        )
    return memoryview(body)[:header_length]


def _optional_string(message: Mapping[str, Any], name: str) -> str | None:
    value = message.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError(f"'{name}': expected a string, got {_shown(value)}")
    return value


def _timeout_ms(parameters: Mapping[str, Any]) -> float:
    for name in _UNSUPPORTED_PARAMETERS:
        if parameters.get(name):
            raise InvalidRequestError(f"parameter '{name}': sequences are not supported")
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or timeout_us < 0:
        raise InvalidRequestError(
            "parameter 'timeout': expected microseconds as an integer of at least 0, "
            f"got {_shown(timeout_us)}"
        )
    return timeout_us / 1000


# ---- inputs


def _decode_inputs(
    message: Mapping[str, Any],
    body: bytes,
    header_length: int | None,
    specs: Sequence[TensorSpec],
    max_batch_size: int,
) -> tuple[dict[str, NDArray[np.generic]], int]:
    tensors: dict[str, NDArray[np.generic]] = {}
    reader = None if header_length is None else _BinaryPart(body, header_length)
    for tensor in _object_list(message, "inputs") if specs or "inputs" in message else []:
        spec = _spec_of(tensor, "input", specs)
        if spec.name in tensors:
            raise InvalidRequestError(f"input '{spec.name}' is given more than once")
        _check_datatype(tensor, spec)
        shape = _shape(tensor, spec, max_batch_size)
        tensors[spec.name] = _array(tensor, spec, shape, reader)
    if missing := [spec.name for spec in specs if spec.name not in tensors]:
        raise InvalidRequestError(f"input '{missing[0]}' is missing")
    if reader is not None:
        reader.check_end()
    return tensors, _num_rows(tensors) if max_batch_size > 0 else 1


def _object_list(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    items = message.get(name)
    if not isinstance(items, list):
        raise InvalidRequestError(f"'{name}': expected a list of tensors, got {_shown(items)}")
    for item in items:
        if not isinstance(item, dict):
            raise InvalidRequestError(f"'{name}': expected an object, got {_shown(item)}")
    return items


def _spec_of(tensor: Mapping[str, Any], kind: str, specs: Sequence[TensorSpec]) -> TensorSpec:
    name = tensor.get("name")
    for spec in specs:
        if spec.name == name:
            return spec
    if not isinstance(name, str):
        raise InvalidRequestError(f"{kind}: expected a string as 'name', got {_shown(name)}")
    known = ", ".join(f"'{spec.name}'" for spec in specs)
    raise InvalidRequestError(f"unknown {kind} {_shown(name)}: the model has {known}")


def _check_datatype(tensor: Mapping[str, Any], spec: TensorSpec) -> None:
    datatype = tensor.get("datatype")
    if datatype == spec.datatype:
        return
    unknown = not isinstance(datatype, str) or datatype not in DATATYPE_TO_DTYPE
    note = " (not a datatype of the protocol; their names are case-sensitive)" if unknown else ""
    raise InvalidRequestError(
        f"input '{spec.name}': expected datatype {spec.datatype}, got {_shown(datatype)}{note}"
    )


def _shape(tensor: Mapping[str, Any], spec: TensorSpec, max_batch_size: int) -> tuple[int, ...]:
    shape = tensor.get("shape")
    if not isinstance(shape, list):
        raise InvalidRequestError(
            f"input '{spec.name}': expected a list of dimensions as shape, got {_shown(shape)}"
        )
    if len(shape) != len(spec.shape):
        raise InvalidRequestError(
            f"input '{spec.name}': expected {len(spec.shape)} dimensions, {list(spec.shape)}, "
            f"got {len(shape)}, {_shown(shape)}"
        )
    for dim, expected in zip(shape, spec.shape, strict=True):
        if type(dim) is not int or dim < 0:
            raise InvalidRequestError(
                f"input '{spec.name}': expected dimensions that are integers of at least 0, "
                f"got {_shown(shape)}"
            )
        if expected not in (-1, dim):
            raise InvalidRequestError(
                f"input '{spec.name}': expected shape {list(spec.shape)}, got {_shown(shape)}"
            )
    if prod(max(dim, 1) for dim in shape) > MAX_ELEMENTS:
        raise InvalidRequestError(f"input '{spec.name}': shape {_shown(shape)} is too large")
    if max_batch_size > 0 and shape[0] > max_batch_size:
        raise InvalidRequestError(
            f"input '{spec.name}': expected at most {max_batch_size} rows (max_batch_size), "
            f"got {shape[0]}"
        )
    return tuple(shape)


def _num_rows(tensors: Mapping[str, NDArray[np.generic]]) -> int:
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.shape[0] != first.shape[0]:
            raise InvalidRequestError(
                f"input '{name}': expected {first.shape[0]} rows like input '{first_name}', "
                f"got {tensor.shape[0]}"
            )
    return int(first.shape[0])


def _array(
    tensor: Mapping[str, Any],
    spec: TensorSpec,
    shape: tuple[int, ...],
    reader: _BinaryPart | None,
) -> NDArray[np.generic]:
    parameters = optional_object(tensor, "parameters", f"input '{spec.name}'")
    if "shared_memory_region" in parameters:
        raise InvalidRequestError(f"input '{spec.name}': shared memory is not supported")
    if "binary_data_size" not in parameters:
        return array_from_json(tensor.get("data"), spec, shape)
    if tensor.get("data") is not None:
        raise InvalidRequestError(
            f"input '{spec.name}': expected 'data' or 'binary_data_size', got both"
        )
    if reader is None:
        raise InvalidRequestError(
            f"input '{spec.name}': 'binary_data_size' needs the request header "
            "Inference-Header-Content-Length"
        )
    return reader.take(spec, shape, parameters["binary_data_size"])


# ---- JSON data


def array_from_json(data: Any, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The values of `data`, flat or nested as `shape`; raises InvalidRequestError."""
    if spec.datatype in BINARY_ONLY_DATATYPES:
        raise InvalidRequestError(
            f"input '{spec.name}': {spec.datatype} has no JSON form; send it as binary data"
        )
    if not isinstance(data, list):
        raise InvalidRequestError(
            f"input '{spec.name}': expected a list as 'data', got {_shown(data)}"
        )
    flat = _flatten(data, spec, shape) if data and type(data[0]) is list else data
    if len(flat) != prod(shape):
        raise InvalidRequestError(
            f"input '{spec.name}': expected {prod(shape)} values for shape {list(shape)}, "
            f"got {len(flat)}"
        )
    kinds, wanted = _DATATYPE_TO_JSON_KINDS.get(spec.datatype, _INTEGER_KINDS)
    if not kinds.issuperset(map(type, flat)):
        wrong = next(value for value in flat if type(value) not in kinds)
        raise InvalidRequestError(
            f"input '{spec.name}': expected {wanted} for {spec.datatype}, got {_shown(wrong)}"
        )
    return _convert(flat, spec).reshape(shape)


def _flatten(data: list[Any], spec: TensorSpec, shape: tuple[int, ...]) -> list[Any]:
    """The values of lists nested exactly as `shape` says."""
    level: list[Any] = [data]
    for dim in shape:
        if any(type(item) is not list or len(item) != dim for item in level):
            raise InvalidRequestError(
                f"input '{spec.name}': expected data that is flat or nested as {list(shape)}, "
                "got another nesting"
            )
        level = list(chain.from_iterable(level))
    return level


def _convert(flat: list[Any], spec: TensorSpec) -> NDArray[np.generic]:
    if spec.datatype == "BYTES":
        array = np.empty(len(flat), np.object_)
        array[:] = [value.encode() for value in flat]
        return array
    try:
        with np.errstate(over="ignore"):
            numbers: NDArray[np.generic] = np.array(flat, spec.dtype)
    except OverflowError:
        raise _out_of_range(flat, spec) from None
    if spec.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise _out_of_range(flat, spec)
    return numbers


def _out_of_range(flat: list[Any], spec: TensorSpec) -> InvalidRequestError:
    low, high = _limits(spec.dtype)
    wrong = next((value for value in flat if not low <= value <= high), "a value out of range")
    return InvalidRequestError(
        f"input '{spec.name}': expected values from {low} to {high} for {spec.datatype}, "
        f"got {_shown(wrong)}"
    )


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


# ---- binary data


class _BinaryPart:
    """Hands out the tensors that follow the JSON part, in order."""

    def __init__(self, body: bytes, offset: int) -> None:
        self._body = body
        self._offset = offset

    def take(self, spec: TensorSpec, shape: tuple[int, ...], size: Any) -> NDArray[np.generic]:
        if type(size) is not int or size < 0:
            raise InvalidRequestError(
                f"input '{spec.name}': expected an integer of at least 0 as 'binary_data_size', "
                f"got {_shown(size)}"
            )
        num_elements = prod(shape)
        if spec.datatype != "BYTES" and size != num_elements * spec.dtype.itemsize:
            raise InvalidRequestError(
                f"input '{spec.name}': expected a 'binary_data_size' of "
                f"{num_elements * spec.dtype.itemsize} bytes for {spec.datatype} {list(shape)}, "
                f"got {size}"
            )
        remaining = len(self._body) - self._offset
        if size > remaining:
            raise InvalidRequestError(
                f"input '{spec.name}': expected {size} bytes of binary data, got {remaining}"
            )
        start = self._offset
        self._offset += size
        if spec.datatype == "BYTES":
            return _split_bytes(self._body, start, size, spec, num_elements).reshape(shape)
        return self._view(spec, num_elements, start).reshape(shape)

    def _view(self, spec: TensorSpec, num_elements: int, start: int) -> NDArray[np.generic]:
        if spec.datatype == "BOOL":
            octets = np.frombuffer(self._body, np.uint8, num_elements, start)
            if num_elements and octets.max() > 1:
                raise InvalidRequestError(
                    f"input '{spec.name}': expected bytes 0 or 1 for BOOL, got {octets.max()}"
                )
            return octets.view(np.bool_)
        array = np.frombuffer(self._body, spec.dtype, num_elements, start)
        return array if array.flags.aligned else array.copy()

    def check_end(self) -> None:
        if self._offset != len(self._body):
            raise InvalidRequestError(
                f"expected the body to end after the binary data of the inputs, "
                f"got {len(self._body) - self._offset} more bytes"
            )


def _split_bytes(
    body: bytes, start: int, size: int, spec: TensorSpec, num_elements: int
) -> NDArray[np.object_]:
    """Elements that are each a little-endian 32-bit length and that many bytes."""
    end = start + size
    values: list[bytes] = []
    while start < end and len(values) < num_elements:
        (length,) = struct.unpack_from("<I", body, start) if start + 4 <= end else (size,)
        if start + 4 + length > end:
            raise InvalidRequestError(
                f"input '{spec.name}': element {len(values)} goes beyond the {size} bytes of "
                "'binary_data_size'"
            )
        values.append(body[start + 4 : start + 4 + length])
        start += 4 + length
    if len(values) != num_elements or start != end:
        raise InvalidRequestError(
            f"input '{spec.name}': expected {num_elements} elements in {size} bytes, "
            f"got {len(values)} and {end - start} bytes left over"
        )
    array = np.empty(num_elements, np.object_)
    array[:] = values
    return array


# ---- outputs


def _decode_outputs(
    message: Mapping[str, Any], parameters: Mapping[str, Any], specs: Sequence[TensorSpec]
) -> tuple[RequestedOutput, ...]:
    is_binary = _flag(parameters, "binary_data_output", "the request", False)
    if message.get("outputs") in (None, []):
        chosen = [(spec, is_binary) for spec in specs]
    else:
        chosen = [
            _requested(tensor, specs, is_binary) for tensor in _object_list(message, "outputs")
        ]
        names = [spec.name for spec, _ in chosen]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidRequestError(f"output '{twice[0]}' is requested more than once")
    for spec, wants_binary in chosen:
        if not wants_binary and spec.datatype in BINARY_ONLY_DATATYPES:
            raise InvalidRequestError(
                f"output '{spec.name}': {spec.datatype} has no JSON form; ask for binary data"
            )
    return tuple(RequestedOutput(spec.name, wants_binary) for spec, wants_binary in chosen)


def _requested(
    tensor: Mapping[str, Any], specs: Sequence[TensorSpec], is_binary: bool
) -> tuple[TensorSpec, bool]:
    spec = _spec_of(tensor, "output", specs)
    what = f"output '{spec.name}'"
    parameters = optional_object(tensor, "parameters", what)
    if parameters.get("classification"):
        raise InvalidRequestError(f"{what}: 'classification' is not supported")
    if "shared_memory_region" in parameters:
        raise InvalidRequestError(f"{what}: shared memory is not supported")
    return spec, _flag(parameters, "binary_data", what, is_binary)


def _flag(parameters: Mapping[str, Any], name: str, what: str, default: bool) -> bool:
    value = parameters.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{what}: '{name}': expected true or false, got {_shown(value)}")
    return value


# ---- responses


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """The parts of a body in order; `header_length` is set where binary data follows the JSON.

    The parts may be views of the response's arrays, which must not change until they are sent.
    """

    parts: tuple[bytes | memoryview, ...]
    header_length: int | None

    @property
    def num_bytes(self) -> int:
        """The length of the whole body."""
        return sum(map(len, self.parts))


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


def _shown(value: Any, max_chars: int = 60) -> str:
    """The value as JSON, shortened for an error text."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "a value nested too deeply"
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."
