"""Runs ONNX models with ONNX Runtime; tensors are bound in place, for each run anew."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from models.errors import BackendError, InvalidInputError, ModelLoadError
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
SILENT = 4  # only fatal errors: what fails is raised, and told by whoever catches it


class OnnxBackend:
    """One ONNX Runtime session on the CPU.

    An output of which only the batch dimension is free is computed into an array of ours; one with
    unknown inner dimensions is allocated by ONNX Runtime and copied. Models with BYTES tensors are
    run without binding, since ONNX Runtime binds no strings.
    """

    platform = "onnxruntime_onnx"

    def __init__(self, path: Path, *, label: str | None = None, num_threads: int = 0) -> None:
        """Read the model; `label` stands for `path` in error texts, 0 threads is the default."""
        label = label if label is not None else path.name
        self._session: Any = _open_session(path, label, num_threads)
        arguments = self._session.get_inputs()
        results = self._session.get_outputs()
        self.inputs = tuple(_spec(argument, "input", label) for argument in arguments)
        self.outputs = tuple(_spec(result, "output", label) for result in results)
        self._name_to_output = {output.name: output for output in self.outputs}
        self._output_to_rows_input = _rows_inputs(arguments, results)
        datatypes = {spec.datatype for spec in (*self.inputs, *self.outputs)}
        self._has_strings = "BYTES" in datatypes
        if datatypes >= {"BYTES", "BF16"}:
            raise ModelLoadError(f"{label}: ONNX Runtime cannot serve BYTES and BF16 in one model")

    def __repr__(self) -> str:
        return f"<OnnxBackend {len(self.inputs)} inputs, {len(self.outputs)} outputs>"

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        """See `Backend.run`."""
        session = self._session
        assert session is not None, "run after close"
        # An output that is an input by name is not written by ONNX Runtime where it is bound.
        results = {name: inputs[name].copy() for name in outputs if name in inputs}
        computed = [name for name in outputs if name not in results]
        if not computed:
            return results
        if self._has_strings:
            return results | _run_with_strings(session, inputs, computed)
        return results | self._run_bound(session, inputs, computed)

    def close(self) -> None:
        """See `Backend.close`."""
        self._session = None

    def _run_bound(
        self, session: Any, inputs: Mapping[str, NDArray[Any]], names: list[str]
    ) -> dict[str, NDArray[Any]]:
        # Address and exact shape are bound for this run only: a binding of 64 rows fails for 5.
        binding = session.io_binding()
        results: dict[str, NDArray[Any]] = {}
        try:
            for spec in self.inputs:
                binding.bind_ortvalue_input(spec.name, _ort_value(inputs[spec.name]))
            for name in names:
                self._bind_output(binding, name, inputs, results)
            session.run_with_iobinding(binding)
        except Exception as error:
            raise BackendError(_reason(error)) from error
        if len(results) < len(names):
            for name, ort_value in zip(names, binding.get_outputs(), strict=True):
                if name not in results:
                    results[name] = _copy_of(ort_value, self._name_to_output[name].dtype)
        return results

    def _bind_output(
        self,
        binding: Any,
        name: str,
        inputs: Mapping[str, NDArray[Any]],
        results: dict[str, NDArray[Any]],
    ) -> None:
        rows_input = self._output_to_rows_input.get(name)
        if rows_input is None:
            binding.bind_output(name, "cpu")
            return
        spec = self._name_to_output[name]
        results[name] = np.empty((len(inputs[rows_input]), *spec.shape[1:]), spec.dtype)
        binding.bind_ortvalue_output(name, _ort_value(results[name]))


def _open_session(path: Path, label: str, num_threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    options.intra_op_num_threads = num_threads
    # ONNX Runtime's threads spin after a run, waiting for the next one. On a machine with few cores
    # they take the time of the event loop and of the lookups, so they sleep instead.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return onnxruntime.InferenceSession(
            str(path), sess_options=options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        reason = _reason(error).replace(str(path), label).replace(f"{path.parent}/", "")
        raise ModelLoadError(f"{label}: {reason}") from error


def _spec(node: Any, kind: str, label: str) -> TensorSpec:
    if node.type not in ONNX_TYPE_TO_DATATYPE:
        raise ModelLoadError(
            f"{label}: {kind} {node.name!r} has type {node.type}, which cannot be served"
        )
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in node.shape)
    return TensorSpec(node.name, ONNX_TYPE_TO_DATATYPE[node.type], shape)


def _rows_inputs(arguments: Sequence[Any], results: Sequence[Any]) -> dict[str, str]:
    """For each output whose shape is known but for its rows: an input with as many rows.

    The file says so by the same symbol as the first dimension and fixed inner dimensions.
    """
    symbol_to_input = {
        argument.shape[0]: argument.name
        for argument in arguments
        if argument.shape and isinstance(argument.shape[0], str)
    }
    return {
        result.name: symbol_to_input[result.shape[0]]
        for result in results
        if result.shape
        and result.shape[0] in symbol_to_input
        and all(isinstance(dim, int) for dim in result.shape[1:])
    }


def _ort_value(array: NDArray[Any]) -> Any:
    """An OrtValue over the array's memory, which it keeps alive."""
    assert array.flags.c_contiguous
    if not array.flags.aligned:  # a view into a request body may start at any byte
        array = array.copy()
    if array.dtype == BFLOAT16:  # NumPy and ONNX Runtime do not know each other's
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), ONNX_BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _copy_of(ort_value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The content of an OrtValue as an array of its own."""
    if dtype != BFLOAT16:
        array: NDArray[Any] = ort_value.numpy()
        return array
    content = ctypes.string_at(ort_value.data_ptr(), ort_value.tensor_size_in_bytes())
    return np.frombuffer(content, dtype).reshape(ort_value.shape())


def _run_with_strings(
    session: Any, inputs: Mapping[str, NDArray[Any]], names: list[str]
) -> dict[str, NDArray[Any]]:
    feeds = {name: _decoded(name, array) for name, array in inputs.items()}
    try:
        arrays = session.run(names, feeds)
    except Exception as error:
        raise BackendError(_reason(error)) from error
    return {name: _encoded(array) for name, array in zip(names, arrays, strict=True)}


def _decoded(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """BYTES as the `str` that ONNX Runtime takes; other arrays as they are."""
    if array.dtype != np.object_:
        return array
    decoded = np.empty(array.size, np.object_)
    for position, element in enumerate(array.flat):
        try:
            decoded[position] = element.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"input {name!r}: element {position} is not UTF-8, as strings of ONNX must be"
            ) from error
    return decoded.reshape(array.shape)


def _encoded(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype != np.object_:
        return array
    encoded = np.empty(array.size, np.object_)
    encoded[:] = [element.encode("utf-8") for element in array.flat]
    return encoded.reshape(array.shape)


def _reason(error: Exception) -> str:
    """ONNX Runtime's text in one line, without its codes and places in its source."""
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", " ".join(str(error).split()))
    text = _FUNCTION_IN_SOURCE.sub("", _PLACE_IN_SOURCE.sub("", text))
    return text.removeprefix("Error in execution: ")
