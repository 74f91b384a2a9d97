"""The data of input tensors, in JSON or binary, to arrays.

Arrays of the binary part are views of the body, copied only where their place in it is not aligned.
"""

from __future__ import annotations

import struct
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from models.tensor_spec import TensorSpec
from server.errors import InvalidRequestError

# The protocol has no JSON form for these.
BINARY_ONLY_DATATYPES = frozenset({"FP16", "BF16"})

_DATATYPE_TO_JSON_KINDS: dict[str, tuple[frozenset[type], str]] = {
    "BOOL": (frozenset({bool}), "true or false"),
    "BYTES": (frozenset({str}), "strings"),
    "FP32": (frozenset({int, float}), "numbers"),
    "FP64": (frozenset({int, float}), "numbers"),
}
_INTEGER_KINDS = (frozenset({int}), "integers")


def shown(value: Any, max_chars: int = 60) -> str:
    """The value as JSON, shortened for an error text."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "a value nested too deeply"
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def array_from_json(data: Any, spec: TensorSpec, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The values of `data`, flat or nested as `shape`; raises InvalidRequestError."""
    if spec.datatype in BINARY_ONLY_DATATYPES:
        raise InvalidRequestError(
            f"input '{spec.name}': {spec.datatype} has no JSON form; send it as binary data"
        )
    if not isinstance(data, list):
        raise InvalidRequestError(
            f"input '{spec.name}': expected a list as 'data', got {shown(data)}"
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
            f"input '{spec.name}': expected {wanted} for {spec.datatype}, got {shown(wrong)}"
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
        f"got {shown(wrong)}"
    )


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "f":
        return float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


class BinaryPart:
    """Hands out the tensors that follow the JSON part, in order."""

    def __init__(self, body: bytes, offset: int) -> None:
        self._body = body
        self._offset = offset

    def take(self, spec: TensorSpec, shape: tuple[int, ...], size: Any) -> NDArray[np.generic]:
        """The next tensor, of `size` bytes as the client says; raises InvalidRequestError."""
        if type(size) is not int or size < 0:
            raise InvalidRequestError(
                f"input '{spec.name}': expected an integer of at least 0 as 'binary_data_size', "
                f"got {shown(size)}"
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
        """Raises InvalidRequestError when bytes are left."""
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
