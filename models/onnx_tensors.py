"""Tensors between NumPy and ONNX Runtime: types, values, strings, and the texts of its errors."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from models.errors import InvalidInputError, ModelLoadError
from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec

ONNX_TYPE_TO_DATATYPE = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
ONNX_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
BFLOAT16 = DATATYPE_TO_DTYPE["BF16"]
# "/onnxruntime_src/.../reshape_helper.h:91 void a::B(int, const c::D&) x == y was false. ": file
# and line, the signature with its nested parentheses, and the condition where there is one.
_PLACE_IN_SOURCE = re.compile(
    r"/\S+\.(?:cc|cpp|cu|cuh|h|hpp|inl):\d+ [^()]*(?:\(\))?\((?:[^()]|\([^()]*\))*\)(?: const)?"
    r"(?: \[with [^\]]*\])? ?(?:(?:[^.]|\.(?! ))*? was false\. ?)?"
)
_FUNCTION_IN_SOURCE = re.compile(
    r"\b\w+\.(?:cc|cpp|cu|cuh|h|hpp|inl):\d+ \w+ "
)  # "a.cc:57 Compute "


def tensor_spec(node: Any, kind: str, label: str) -> TensorSpec:
    """The spec of a graph's input or output; raises `ModelLoadError` for what is no tensor."""
    if node.type not in ONNX_TYPE_TO_DATATYPE:
        raise ModelLoadError(
            f"{label}: {kind} {node.name!r} has type {node.type}, which cannot be served"
        )
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    return TensorSpec(node.name, ONNX_TYPE_TO_DATATYPE[node.type], shape)


def ort_value(array: NDArray[Any]) -> Any:
    """An OrtValue over the array's memory, which it keeps alive."""
    assert array.flags.c_contiguous
    if not array.flags.aligned:  # a view into a request body may start at any byte
        array = array.copy()
    if array.dtype == BFLOAT16:  # NumPy and ONNX Runtime do not know each other's
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), ONNX_BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def copy_of(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The content of an OrtValue as an array of its own."""
    if dtype != BFLOAT16:
        array: NDArray[Any] = value.numpy()
        return array
    content = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(content, dtype).reshape(value.shape())


def decoded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """BYTES as the `str` that ONNX Runtime takes; other arrays as they are."""
    if array.dtype != np.object_:
        return array
    texts = np.empty(array.size, np.object_)
    for position, element in enumerate(array.flat):
        try:
            texts[position] = element.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"input {name!r}: element {position} is not UTF-8, as strings of ONNX must be"
            ) from error
    return texts.reshape(array.shape)


def encoded(array: NDArray[Any]) -> NDArray[Any]:
    """`str` of ONNX Runtime as BYTES; other arrays as they are."""
    if array.dtype != np.object_:
        return array
    elements = np.empty(array.size, np.object_)
    elements[:] = [element.encode("utf-8") for element in array.flat]
    return elements.reshape(array.shape)


def reason(error: Exception) -> str:
    """ONNX Runtime's text in one line, without its codes and places in its source."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", " ".join(str(error).split()))
    text = _FUNCTION_IN_SOURCE.sub("", _PLACE_IN_SOURCE.sub("", text))
    return text.removeprefix("Error in execution: ")
