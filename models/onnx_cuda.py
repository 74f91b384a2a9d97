"""ONNX Runtime on a GPU: one memory arena for all models, and runs on device pointers."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cache.cuda import CudaDevice
from cache.device import DeviceError, Event
from models.errors import BackendError, ModelLoadError
from models.onnx_tensors import BFLOAT16, ONNX_BFLOAT16, copy_of, ort_value, reason
from models.tensor_spec import TensorSpec

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
SESSION_CONFIG = {
    # The arena of `share_arena`, instead of one a session that never gives its memory back.
    "session.use_env_allocators": "1",
    # Weights lie outside the arena, so that closing a model frees their memory.
    "session.use_device_allocator_for_initializers": "1",
}
VRAM = "Cuda"  # what ONNX Runtime calls the memory; "CudaPinned" and "Cpu" are of the host
SAME_AS_REQUESTED = 1  # `kSameAsRequested` as OrtArenaCfg has it

_Source = tuple[int, tuple[int, ...], np.dtype[Any]]  # address, shape, dtype

# Per ONNX Runtime, which lives as long as the process: the GPUs that have an arena in it. A second
# one would take the place of the first for later sessions only, so that both hold memory.
_runtime_to_arenas: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
_arenas_mutex = threading.Lock()


def provider_options(name: str, gpu: CudaDevice) -> dict[str, str]:
    """The options that a GPU's provider gets from us; those of `model.yaml` go on top."""
    options = {"device_id": str(gpu.index), "user_compute_stream": str(gpu.compute.pointer)}
    if name != CUDA:
        return options
    return options | {
        # Of an arena of the session's own; the shared one has its own config, with the same value.
        "arena_extend_strategy": "kSameAsRequested",
        # The default, EXHAUSTIVE, times all algorithms anew for every size of a batch.
        "cudnn_conv_algo_search": "HEURISTIC",
        # The default, and the only value that does not race with a stream of the user.
        "do_copy_in_default_stream": "1",
    }


# What is ours to say: the stream, and the memory (an external allocator excludes a stream of the
# user, a limit is ignored in a shared arena). Graphs need shapes and addresses that never change.
FIXED_OPTIONS = frozenset(
    {
        "device_id",
        "user_compute_stream",
        "has_user_compute_stream",
        "use_ep_level_unified_stream",
        "gpu_mem_limit",
        "arena_extend_strategy",
        "gpu_external_alloc",
        "gpu_external_free",
        "gpu_external_empty_cache",
        "enable_cuda_graph",
        "trt_cuda_graph_enable",
    }
)


def share_arena(runtime: Any, gpu: CudaDevice, label: str) -> None:
    """Give ONNX Runtime one arena on the GPU for all sessions, once a process.

    It takes what is free of the budget when the first model is opened. Raises `ModelLoadError`,
    with `label` as the name of that model, where the libraries of CUDA cannot be loaded.
    """
    with _arenas_mutex:
        indices = _runtime_to_arenas.setdefault(runtime, set())
        if gpu.index in indices:
            return
        free_bytes = gpu.budget.max_bytes - gpu.budget.used_bytes
        if free_bytes <= 0:
            raise ModelLoadError(
                f"{label}: the device memory has no room left for what the model computes: "
                f"{gpu.budget.used_bytes} of {gpu.budget.max_bytes} bytes are used"
            )
        memory = runtime.OrtMemoryInfo(
            VRAM, runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, gpu.index,
            runtime.OrtMemType.DEFAULT,
        )  # fmt: skip
        config = runtime.OrtArenaCfg(
            {"max_mem": free_bytes, "arena_extend_strategy": SAME_AS_REQUESTED}
        )
        output = io.StringIO()
        try:
            # The libraries of the wheels nvidia-*, which no loader's path names. It prints faults.
            with contextlib.redirect_stdout(output):
                runtime.preload_dlls()
            runtime.create_and_register_allocator_v2(CUDA, memory, {}, config)
        except Exception as error:  # ONNX Runtime's errors have no common base
            lines = [*output.getvalue().splitlines()[:1], reason(error)]
            raise ModelLoadError(f"{label}: {not_loaded('cuda')} ({lines[0]})") from error
        indices.add(gpu.index)


def not_loaded(name: str) -> str:
    """The text for a provider that is installed and whose libraries do not load."""
    needed = "CUDA and cuDNN, as pip install 'onnxruntime-gpu[cuda,cudnn]' brings them"
    if name == "tensorrt":
        needed = f"TensorRT, {needed}"
    return (
        f"providers: ONNX Runtime cannot load {name!r}; it needs the libraries of {needed}; "
        "see `hotshelf doctor`"
    )


class GpuRuns:
    """Runs of one session whose inputs and outputs are in VRAM.

    ONNX Runtime allocates the outputs; they are copied to the host by `CudaDevice.read_back`.
    """

    def __init__(
        self,
        session: Any,
        gpu: CudaDevice,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self._session = session
        self._gpu = gpu
        self._inputs = {spec.name: spec for spec in inputs}
        self._outputs = {spec.name: spec for spec in outputs}
        # Some inputs are read by the CPU, such as the shape of a Reshape, and some outputs are
        # written by it. ONNX Runtime would copy such an input while it is bound, without regard to
        # the events that the run waits for.
        self._host_inputs = _names_on_host(inputs, session.get_input_memory_infos())
        self._host_outputs = _names_on_host(outputs, session.get_output_memory_infos())
        self._mutex = threading.Lock()

    def run(
        self, inputs: Mapping[str, Any], names: Sequence[str], after: Sequence[Event]
    ) -> dict[str, NDArray[Any]]:
        """See `Backend.run`; the inputs are device arrays."""
        try:
            for event in after:
                self._gpu.compute.wait_for(event)
            # An output that is an input by name is not written by ONNX Runtime where it is bound.
            sources = {name: self._source(name, inputs) for name in names if name in inputs}
            computed = [name for name in names if name not in inputs]
            values = self._computed(inputs, computed) if computed else {}
            sources |= {
                name: (value.data_ptr(), tuple(value.shape()), self._outputs[name].dtype)
                for name, value in values.items()
                if name not in self._host_outputs
            }
            # `values` hold their memory until it is copied.
            arrays = self._read_back(sources)
        except DeviceError as error:
            raise BackendError(str(error)) from error
        for name in self._host_outputs & values.keys():
            arrays[name] = copy_of(values[name], self._outputs[name].dtype)
        return {name: arrays[name] for name in names}

    def _computed(self, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Run the session; returns OrtValues. What follows is of ONNX Runtime 1.31.

        The run option `disable_synchronize_execution_providers` is left off: a run returns when the
        compute stream is done with it (`OnRunEnd` of cuda_execution_provider.cc synchronises the
        user's stream, never the device). With the option, this thread would wait once instead of
        twice. But `DeviceStreamCollection::CleanUp(false)` also leaves out
        `CudaStream::CleanUpOnRunEnd`, which gives back the pinned buffers that kernels hand over
        (`EnqueueDeferredCPUBuffer`), and a session keeps its stream objects as long as it lives. So
        a server would lose pinned memory, run by run.

        Memory that a run frees goes back to the arena while the GPU may still use it, as the host
        is ahead. Within a run only the same stream object gets it again, as the arena is aware of
        streams. At the end of a run it is free for all sessions, and `CudaStream::Flush` does not
        wait for a stream of the user before that. It is safe because all sessions work in this one
        stream: what another run enqueues there comes later.
        """
        binding = self._session.io_binding()
        on_host = self._read_back({name: self._source(name, inputs) for name in self._host_inputs})
        try:
            for name, spec in self._inputs.items():
                if name in on_host:
                    binding.bind_ortvalue_input(name, ort_value(on_host[name]))
                    continue
                address, shape, _ = self._source(name, inputs)
                binding.bind_input(
                    name, "cuda", self._gpu.index, _element_type(spec), shape, address
                )
            for name in names:
                if name in self._host_outputs:
                    binding.bind_output(name, "cpu")
                else:
                    binding.bind_output(name, "cuda", self._gpu.index)
            # With a stream of the user all runs of a session share its handles of cuBLAS and cuDNN
            # (`RegisterStreamHandlers`), which no two threads may use at once. Runs of different
            # sessions may enqueue at once: each has its handles and its memory, and each thread's
            # wait, kernels and copies are in this order in the stream whatever lies between them.
            with self._mutex:
                self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's errors have no common base
            # What was enqueued before it failed still reads the inputs.
            self._gpu.compute.record().wait()
            raise BackendError(reason(error)) from error
        return dict(zip(names, binding.get_outputs(), strict=True))

    def _read_back(self, sources: Mapping[str, _Source]) -> dict[str, NDArray[Any]]:
        if not sources:
            return {}
        return dict(zip(sources, self._gpu.read_back(list(sources.values())), strict=True))

    def _source(self, name: str, inputs: Mapping[str, Any]) -> _Source:
        array = inputs[name]
        return int(array.data.ptr), tuple(array.shape), self._inputs[name].dtype


def _names_on_host(specs: Sequence[TensorSpec], memory_infos: Sequence[Any]) -> set[str]:
    located = zip(specs, memory_infos, strict=True)
    return {spec.name for spec, memory in located if memory.name != VRAM}


def _element_type(spec: TensorSpec) -> Any:
    return ONNX_BFLOAT16 if spec.dtype == BFLOAT16 else spec.dtype.type
