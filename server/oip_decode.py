"""Open Inference Protocol v2: request bodies to arrays.

Every fault of the client is an InvalidRequestError that names the tensor, what was expected and
what came.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec
from server.errors import InvalidRequestError
from server.oip_data import BINARY_ONLY_DATATYPES, BinaryPart, array_from_json, shown
from server.requests import InferenceRequest, RequestedOutput

# No body is as large; a shape with a 0 in it may not multiply to more either.
MAX_ELEMENTS = 2**48

_PARSE_WITH_GC_BYTES = 1024 * 1024
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
        message = _loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{what}: expected a JSON object, got {shown(message)}")
    return message


def _loads(text: bytes | memoryview) -> Any:
    if len(text) <= _PARSE_WITH_GC_BYTES:
        return orjson.loads(text)
    # A body of many small lists makes Python look for cycles again and again while it is parsed,
    # which takes several times as long as the parsing. There are none in it. Switched on in any
    # case afterwards: what another thread has found it at may be this one's doing.
    gc.disable()
    try:
        return orjson.loads(text)
    finally:
        gc.enable()


def optional_object(message: Mapping[str, Any], name: str, what: str) -> dict[str, Any]:
    """The object under `name`, empty where it is left out or null."""
    value = message.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what}: '{name}': expected an object, got {shown(value)}")
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
        raise InvalidRequestError(f"'{name}': expected a string, got {shown(value)}")
    return value


def _timeout_ms(parameters: Mapping[str, Any]) -> float:
    for name in _UNSUPPORTED_PARAMETERS:
        if parameters.get(name):
            raise InvalidRequestError(f"parameter '{name}': sequences are not supported")
    timeout_us = parameters.get("timeout", 0)
    if type(timeout_us) is not int or timeout_us < 0:
        raise InvalidRequestError(
            "parameter 'timeout': expected microseconds as an integer of at least 0, "
            f"got {shown(timeout_us)}"
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
    reader = None if header_length is None else BinaryPart(body, header_length)
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
        raise InvalidRequestError(f"'{name}': expected a list of tensors, got {shown(items)}")
    for item in items:
        if not isinstance(item, dict):
            raise InvalidRequestError(f"'{name}': expected an object, got {shown(item)}")
    return items


def _spec_of(tensor: Mapping[str, Any], kind: str, specs: Sequence[TensorSpec]) -> TensorSpec:
    name = tensor.get("name")
    for spec in specs:
        if spec.name == name:
            return spec
    if not isinstance(name, str):
        raise InvalidRequestError(f"{kind}: expected a string as 'name', got {shown(name)}")
    known = ", ".join(f"'{spec.name}'" for spec in specs)
    raise InvalidRequestError(f"unknown {kind} {shown(name)}: the model has {known}")


def _check_datatype(tensor: Mapping[str, Any], spec: TensorSpec) -> None:
    datatype = tensor.get("datatype")
    if datatype == spec.datatype:
        return
    unknown = not isinstance(datatype, str) or datatype not in DATATYPE_TO_DTYPE
    note = " (not a datatype of the protocol; their names are case-sensitive)" if unknown else ""
    raise InvalidRequestError(
        f"input '{spec.name}': expected datatype {spec.datatype}, got {shown(datatype)}{note}"
    )


def _shape(tensor: Mapping[str, Any], spec: TensorSpec, max_batch_size: int) -> tuple[int, ...]:
    shape = tensor.get("shape")
    if not isinstance(shape, list):
        raise InvalidRequestError(
            f"input '{spec.name}': expected a list of dimensions as shape, got {shown(shape)}"
        )
    if len(shape) != len(spec.shape):
        raise InvalidRequestError(
            f"input '{spec.name}': expected {len(spec.shape)} dimensions, {list(spec.shape)}, "
            f"got {len(shape)}, {shown(shape)}"
        )
    for dim, expected in zip(shape, spec.shape, strict=True):
        if type(dim) is not int or dim < 0:
            raise InvalidRequestError(
                f"input '{spec.name}': expected dimensions that are integers of at least 0, "
                f"got {shown(shape)}"
            )
        if expected not in (-1, dim):
            raise InvalidRequestError(
                f"input '{spec.name}': expected shape {list(spec.shape)}, got {shown(shape)}"
            )
    if prod(max(dim, 1) for dim in shape) > MAX_ELEMENTS:
        raise InvalidRequestError(f"input '{spec.name}': shape {shown(shape)} is too large")
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
    reader: BinaryPart | None,
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
        raise InvalidRequestError(f"{what}: '{name}': expected true or false, got {shown(value)}")
    return value
