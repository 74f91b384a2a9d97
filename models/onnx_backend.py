"""Runs ONNX models with ONNX Runtime; tensors are bound in place, for each run anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from cache.cuda import CudaDevice
from cache.device import Device, Event
from models.errors import BackendError, ModelLoadError
from models.onnx_cuda import SESSION_CONFIG, GpuRuns, share_arena
from models.onnx_providers import (
    Provider,
    check_strings,
    choose_providers,
    open_session,
)
from models.onnx_tensors import copy_of, decoded, encoded, ort_value, reason, tensor_spec
from models.spec import ProviderEntry

SILENT = 4  # only fatal errors: what fails is raised, and told by whoever catches it


class OnnxBackend:
    """One ONNX Runtime session, on the CPU or on a GPU.

    On the CPU, an output of which only the batch dimension is free is computed into an array of
    ours; one with unknown inner dimensions is allocated by ONNX Runtime and copied. Models with
    BYTES tensors are run without binding, since ONNX Runtime binds no strings.
    """

    platform = "onnxruntime_onnx"

    def __init__(
        self,
        path: Path,
        *,
        label: str | None = None,
        num_threads: int = 0,
        device: Device | None = None,
        providers: Sequence[ProviderEntry] | None = None,
        cpu_fallback: bool = False,
        runtime: Any = onnxruntime,
    ) -> None:
        """Read the model; `label` stands for `path` in error texts, 0 threads is the default.

        `providers` and `cpu_fallback` are those of `model.yaml`; None is CUDA where `device` is a
        GPU, else the CPU. `runtime` is the package `onnxruntime`. Raises `ModelLoadError`, and
        `ModelConfigError` without a label for what only `model.yaml` can mend.
        """
        label = label if label is not None else path.name
        chosen = choose_providers(providers, device, runtime.get_available_providers())
        is_of_gpu = any(provider.is_of_gpu for provider in chosen)
        gpu = device if is_of_gpu and isinstance(device, CudaDevice) else None
        self.takes_device_arrays = gpu is not None
        if gpu is not None:
            share_arena(runtime, gpu, label)

        def new_session(config: Mapping[str, str]) -> Any:
            return _new_session(runtime, path, label, num_threads, chosen, config)

        self._session: Any = open_session(new_session, chosen, label, cpu_fallback=cpu_fallback)
        check_strings(self._session, chosen)
        arguments = self._session.get_inputs()
        results = self._session.get_outputs()
        self.inputs = tuple(tensor_spec(argument, "input", label) for argument in arguments)
        self.outputs = tuple(tensor_spec(result, "output", label) for result in results)
        self._name_to_output = {output.name: output for output in self.outputs}
        self._output_to_rows_input = _rows_inputs(arguments, results)
        datatypes = {spec.datatype for spec in (*self.inputs, *self.outputs)}
        self._has_strings = "BYTES" in datatypes
        if datatypes >= {"BYTES", "BF16"}:
            raise ModelLoadError(f"{label}: ONNX Runtime cannot serve BYTES and BF16 in one model")
        self._gpu_runs: GpuRuns | None = None
        if gpu is not None:
            self._gpu_runs = GpuRuns(self._session, gpu, self.inputs, self.outputs)

    def __repr__(self) -> str:
        return f"<OnnxBackend {len(self.inputs)} inputs, {len(self.outputs)} outputs>"

    def run(
        self, inputs: Mapping[str, Any], outputs: Sequence[str], after: Sequence[Event] = ()
    ) -> dict[str, NDArray[Any]]:
        """See `Backend.run`."""
        session, gpu_runs = self._session, self._gpu_runs
        assert session is not None, "run after close"
        if gpu_runs is not None:
            return gpu_runs.run(inputs, outputs, after)
        for event in after:
            event.wait()
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
        self._gpu_runs = None

    def _run_bound(
        self, session: Any, inputs: Mapping[str, NDArray[Any]], names: list[str]
    ) -> dict[str, NDArray[Any]]:
        # Address and exact shape are bound for this run only: a binding of 64 rows fails for 5.
        binding = session.io_binding()
        results: dict[str, NDArray[Any]] = {}
        try:
            for spec in self.inputs:
                binding.bind_ortvalue_input(spec.name, ort_value(inputs[spec.name]))
            for name in names:
                self._bind_output(binding, name, inputs, results)
            session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's errors have no common base
            raise BackendError(reason(error)) from error
        if len(results) < len(names):
            for name, value in zip(names, binding.get_outputs(), strict=True):
                if name not in results:
                    results[name] = copy_of(value, self._name_to_output[name].dtype)
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
        binding.bind_ortvalue_output(name, ort_value(results[name]))


def _new_session(
    runtime: Any,
    path: Path,
    label: str,
    num_threads: int,
    providers: Sequence[Provider],
    config: Mapping[str, str],
) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = SILENT
    options.intra_op_num_threads = num_threads
    # ONNX Runtime's threads spin after a run, waiting for the next one. On a machine with few cores
    # they take the time of the event loop and of the lookups, so they sleep instead.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    shared = SESSION_CONFIG if any(provider.is_of_gpu for provider in providers) else {}
    for key, value in (shared | dict(config)).items():
        options.add_session_config_entry(key, value)
    try:
        return runtime.InferenceSession(
            str(path),
            sess_options=options,
            providers=[(provider.name, provider.options) for provider in providers],
            enable_fallback=0,  # else a provider that cannot start is left out with a print
        )
    except Exception as error:  # ONNX Runtime's errors have no common base
        text = reason(error).replace(str(path), label).replace(f"{path.parent}/", "")
        raise ModelLoadError(f"{label}: {text}") from error


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


def _run_with_strings(
    session: Any, inputs: Mapping[str, NDArray[Any]], names: list[str]
) -> dict[str, NDArray[Any]]:
    feeds = {name: decoded(name, array) for name, array in inputs.items()}
    try:
        arrays = session.run(names, feeds)
    except Exception as error:  # ONNX Runtime's errors have no common base
        raise BackendError(reason(error)) from error
    return {name: encoded(array) for name, array in zip(names, arrays, strict=True)}
