"""A double of ONNX Runtime with providers of a GPU, around the installed package for the CPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

from models.onnx_tensors import BFLOAT16, ONNX_BFLOAT16, copy_of, ort_value, tensor_spec
from models.tensor_spec import TensorSpec
from tests.cuda_double.machine import Machine, Work
from tests.cuda_double.memory import Range, bytes_at

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"

# The keys that onnxruntime/core/providers/cuda/cuda_execution_provider_info.cc reads; it refuses
# all others. All are in libonnxruntime_providers_cuda.so of onnxruntime-gpu 1.31.1.
CUDA_OPTIONS = frozenset(
    {
        "device_id", "has_user_compute_stream", "user_compute_stream", "gpu_mem_limit",
        "arena_extend_strategy", "cudnn_conv_algo_search", "do_copy_in_default_stream",
        "gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache",
        "cudnn_conv_use_max_workspace", "enable_cuda_graph", "cudnn_conv1d_pad_to_nc1d",
        "tunable_op_enable", "tunable_op_tuning_enable", "tunable_op_max_tuning_duration_ms",
        "enable_skip_layer_norm_strict_mode", "prefer_nhwc", "use_ep_level_unified_stream",
        "use_tf32", "fuse_conv_bias", "sdpa_kernel",
    }
)  # fmt: skip
# Those of onnxruntime/core/providers/tensorrt/tensorrt_execution_provider_info.cc that matter here.
TENSORRT_OPTIONS = frozenset(
    {
        "device_id", "has_user_compute_stream", "user_compute_stream", "trt_fp16_enable",
        "trt_max_workspace_size", "trt_engine_cache_enable", "trt_engine_cache_path",
        "trt_cuda_graph_enable", "trt_profile_min_shapes", "trt_profile_max_shapes",
        "trt_profile_opt_shapes",
    }
)  # fmt: skip
_NAME_TO_OPTIONS = {CUDA: CUDA_OPTIONS, TENSORRT: TENSORRT_OPTIONS, CPU: frozenset[str]()}
_CHOICES = {
    "arena_extend_strategy": {"kNextPowerOfTwo", "kSameAsRequested"},
    "cudnn_conv_algo_search": {"EXHAUSTIVE", "HEURISTIC", "DEFAULT"},
    "do_copy_in_default_stream": {"0", "1", "true", "false", "True", "False"},
}

# include/onnxruntime/core/session/onnxruntime_session_options_config_keys.h and
# onnxruntime_run_options_config_keys.h; an unknown key is accepted there, and ignored.
SESSION_KEYS = frozenset(
    {
        "session.disable_cpu_ep_fallback",
        "session.intra_op.allow_spinning",
        "session.record_ep_graph_assignment_info",
        "session.use_device_allocator_for_initializers",
        "session.use_env_allocators",
    }
)
DISABLE_SYNCHRONIZE = "disable_synchronize_execution_providers"

# Operators whose second input the kernels of CUDA read on the host.
_HOST_SECOND_INPUT = frozenset({"Reshape", "Expand", "Tile"})
_HOST_OUTPUT = frozenset({"Shape", "Size"})


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Where a tensor lies, as `OrtMemoryInfo` names it."""

    name: str


@dataclass(frozen=True, slots=True)
class AssignedNode:
    """A node, as `OrtEpAssignedNode` has it."""

    domain: str
    name: str
    op_type: str


@dataclass(frozen=True, slots=True)
class AssignedSubgraph:
    """Nodes of one provider, as `OrtEpAssignedSubgraph` has them."""

    ep_name: str
    nodes: list[AssignedNode]

    def get_nodes(self) -> list[AssignedNode]:
        """The nodes."""
        return self.nodes


@dataclass(frozen=True, slots=True)
class Arena:
    """An allocator that was registered."""

    provider: str
    device_id: int
    max_mem: int
    extend_strategy: int


class SessionOptions(onnxruntime.SessionOptions):  # type: ignore[misc]
    """The real options, whose entries can be listed."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, str] = {}

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Also checks that ONNX Runtime has the key, which it does not do itself."""
        assert key in SESSION_KEYS, f"ONNX Runtime has no session config {key!r}"
        assert isinstance(value, str)
        self.entries[key] = value


@dataclass(eq=False)
class OnnxRuntimeDouble:
    """What `import onnxruntime` gives on a machine with a GPU, its libraries installed or not.

    Nodes of the operators `cpu_operators` have no kernel of CUDA. The providers of
    `broken_providers` are installed, but their libraries cannot be loaded: sessions do without
    CUDA and say nothing, and do not open with TensorRT, as those of onnxruntime-gpu 1.31.1.
    """

    machine: Machine
    cpu_operators: frozenset[str] = frozenset()
    available_providers: Sequence[str] = (TENSORRT, CUDA, CPU)
    broken_providers: frozenset[str] = frozenset()
    arenas: list[Arena] = field(default_factory=list)
    sessions: list[GpuSession] = field(default_factory=list)
    num_held_bytes: int = 0

    SessionOptions = SessionOptions
    RunOptions = onnxruntime.RunOptions
    OrtArenaCfg = onnxruntime.OrtArenaCfg
    OrtMemoryInfo = onnxruntime.OrtMemoryInfo
    OrtAllocatorType = onnxruntime.OrtAllocatorType
    OrtMemType = onnxruntime.OrtMemType
    __version__ = onnxruntime.__version__

    def __post_init__(self) -> None:
        self.machine.pools.append(self)

    def held_bytes(self, device: int) -> int:
        """See `Pool.held_bytes`; the outputs that are alive, on all devices."""
        return self.num_held_bytes

    def get_available_providers(self) -> list[str]:
        """What the package was built with, whether it loads or not."""
        return list(self.available_providers)

    def preload_dlls(
        self, cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None
    ) -> None:
        """Load the libraries of CUDA; prints what is missing."""
        if CUDA in self.broken_providers:
            print("Failed to load libcublasLt.so.13: cannot open shared object file")

    def create_and_register_allocator_v2(
        self, provider: str, memory_info: Any, options: Mapping[str, str], config: Any
    ) -> None:
        """Register the arena that sessions with `session.use_env_allocators` use."""
        assert provider == CUDA
        if CUDA in self.broken_providers:
            raise RuntimeError("CUDA Provider not available, can't get interface for it")
        assert memory_info.name == "Cuda"
        assert dict(options) == {}
        device_id = memory_info.device_id
        assert all(arena.device_id != device_id for arena in self.arenas), "a second arena"
        self.arenas.append(Arena(provider, device_id, config.max_mem, config.arena_extend_strategy))

    def InferenceSession(  # noqa: N802 - ONNX Runtime's name
        self,
        path_or_bytes: str,
        sess_options: Any = None,
        providers: Sequence[tuple[str, dict[Any, Any]]] = (),
        *,
        enable_fallback: int = 1,
    ) -> Any:
        """A session of the GPU, or the real one where no provider of a GPU is asked for."""
        chosen = {name: _normalized(name, options) for name, options in providers}
        assert not chosen.keys() - set(self.available_providers)
        if CUDA not in chosen and TENSORRT not in chosen:
            return _real_session(path_or_bytes, sess_options)
        try:
            if TENSORRT in chosen and TENSORRT in self.broken_providers:
                raise RuntimeError("Please install TensorRT libraries as mentioned in the GPU ...")
            for name, options in chosen.items():
                if name not in self.broken_providers:
                    self._check(name, options)
            session = GpuSession(self, path_or_bytes, sess_options, chosen)
        except (ValueError, RuntimeError):
            if not enable_fallback:
                raise
            print("*************** EP Error ***************")
            return _real_session(path_or_bytes, sess_options)
        self.sessions.append(session)
        return session

    def _check(self, name: str, options: Mapping[str, str]) -> None:
        for key, value in options.items():
            if key not in _NAME_TO_OPTIONS[name]:
                raise RuntimeError(f'Unknown provider option: "{key}".')
            if value not in _CHOICES.get(key, {value}):
                raise RuntimeError(f'Failed to parse provider option "{key}": {value}')
        device_id = int(options.get("device_id", "0"))
        num_devices = self.machine.config.num_devices
        if not 0 <= device_id < num_devices:
            raise RuntimeError(
                f"Invalid device ID: {device_id}, must be between 0 (inclusive) and "
                f"{num_devices} (exclusive)."
            )
        has_stream = options.get("user_compute_stream", "0") != "0"
        assert not (has_stream and "gpu_external_alloc" in options), "they exclude each other"


def _normalized(name: str, options: Mapping[Any, Any]) -> dict[str, str]:
    """As ONNX Runtime's Python makes strings of all; here they have to be strings already."""
    for key, value in options.items():
        assert isinstance(key, str), f"{name}: {key!r}"
        assert isinstance(value, str), f"{name}: {key}={value!r}"
    return dict(options)


def _real_session(path: str, options: Any) -> Any:
    real_options = onnxruntime.SessionOptions()
    real_options.log_severity_level = options.log_severity_level
    real_options.intra_op_num_threads = options.intra_op_num_threads
    return onnxruntime.InferenceSession(path, real_options, providers=[CPU])


class GpuSession:
    """A session whose nodes run on the CPU, at the time and on the memory of a GPU's stream."""

    def __init__(
        self,
        runtime: OnnxRuntimeDouble,
        path: str,
        options: Any,
        providers: dict[str, dict[str, str]],
    ) -> None:
        self._runtime = runtime
        self.provider_options = providers
        self.config: dict[str, str] = dict(options.entries)
        self._real = _real_session(path, options)
        loaded = [name for name in providers if name not in runtime.broken_providers]
        self._graph = onnx.load_model(path).graph
        self._loaded = [name for name in loaded if name != CPU]
        self._cpu_nodes = [
            node
            for node in self._graph.node
            if not self._loaded or node.op_type in runtime.cpu_operators
        ]
        if self.config.get("session.disable_cpu_ep_fallback") == "1":
            self._refuse_cpu(is_cpu_listed=CPU in providers)
        if self._loaded and self.config.get("session.use_env_allocators") == "1":
            assert runtime.arenas, "no arena is registered"
        first = next(iter(providers.values()))
        self.stream_pointer = int(first.get("user_compute_stream", "0"))
        self.device_id = int(first.get("device_id", "0"))
        self._is_running = threading.Lock()

    def _refuse_cpu(self, *, is_cpu_listed: bool) -> None:
        if is_cpu_listed:
            raise InvalidArgument(
                "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Conflicting session configuration: "
                "explicitly added the CPU EP to the session, but also disabled fallback to the CPU "
                "EP via session configuration options."
            )
        if self._cpu_nodes:
            raise Fail(
                "[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes that are "
                "assigned to the default CPU EP, but fallback to CPU EP has been explicitly "
                "disabled by the user."
            )

    def get_providers(self) -> list[str]:
        """What was loaded, and the CPU."""
        return [*self._loaded, CPU]

    def get_inputs(self) -> Any:
        """The inputs of the file."""
        return self._real.get_inputs()

    def get_outputs(self) -> Any:
        """The outputs of the file."""
        return self._real.get_outputs()

    def get_provider_graph_assignment_info(self) -> list[AssignedSubgraph]:
        """One part for each node, as ONNX Runtime has it for these providers."""
        if self.config.get("session.record_ep_graph_assignment_info") != "1":
            raise Fail("'session.record_ep_graph_assignment_info' must be set to \"1\"")
        return [
            AssignedSubgraph(
                CPU if node in self._cpu_nodes else self._loaded[0],
                [AssignedNode(node.domain, node.name, node.op_type)],
            )
            for node in self._graph.node
        ]

    def get_input_memory_infos(self) -> list[MemoryInfo]:
        """Where each input is read."""
        return [
            MemoryInfo("Cpu" if self._is_read_on_host(argument.name) else "Cuda")
            for argument in self.get_inputs()
        ]

    def get_output_memory_infos(self) -> list[MemoryInfo]:
        """Where each output is written."""
        return [
            MemoryInfo("Cpu" if self._is_written_on_host(result.name) else "Cuda")
            for result in self.get_outputs()
        ]

    def io_binding(self) -> Binding:
        """A new binding."""
        return Binding(self, self._runtime)

    def run_with_iobinding(self, iobinding: Binding, run_options: Any = None) -> None:
        """Enqueue a run in the user's stream, and wait for it unless the options say otherwise.

        The stream is first done up to here and no further, so that an input which is written by
        another stream, and not waited for, is not there.
        """
        assert iobinding.session is self, "IOBinding must be used with the session that created it."
        if not self._is_running.acquire(blocking=False):
            raise AssertionError("two runs of one session share its handles of cuBLAS and cuDNN")
        try:
            machine = self._runtime.machine
            machine.current_device = self.device_id  # ONNX Runtime leaves it so
            with machine.call("onnxruntime.run"):
                queue = machine.queue(self.stream_pointer)
                machine.run_until_now(self.stream_pointer)
                iobinding.compute(self._real)
                machine.put(queue, Work("run of a model", iobinding.write, iobinding.uses()))
                if not _is_unsynchronized(run_options):
                    machine.run_until_now(self.stream_pointer)
        finally:
            self._is_running.release()

    def _is_read_on_host(self, name: str) -> bool:
        return any(
            node in self._cpu_nodes or _is_host_input(node, name)
            for node in self._graph.node
            if name in node.input
        )

    def _is_written_on_host(self, name: str) -> bool:
        return any(
            node in self._cpu_nodes or node.op_type in _HOST_OUTPUT
            for node in self._graph.node
            if name in node.output
        )


def _is_host_input(node: onnx.NodeProto, name: str) -> bool:
    return node.op_type in _HOST_SECOND_INPUT and name in node.input[1:]


def _is_unsynchronized(run_options: Any) -> bool:
    if run_options is None:
        return False
    try:
        return bool(run_options.get_run_config_entry(DISABLE_SYNCHRONIZE) == "1")
    except RuntimeError:  # it was not set
        return False


class Binding:
    """The inputs and outputs of one run; memory of the device is memory of the machine."""

    def __init__(self, session: GpuSession, runtime: OnnxRuntimeDouble) -> None:
        self.session = session
        self._runtime = runtime
        self._name_to_read: dict[str, Callable[[], NDArray[Any]]] = {}
        self._name_to_device: dict[str, str] = {}
        self._values: list[Any] = []
        self._writes: list[tuple[Range, bytes]] = []
        self._read_uses: list[tuple[int, int]] = []

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Bind memory of the GPU; what is read on the host is copied here and now."""
        assert (device_type, device_id) == ("cuda", self.session.device_id)
        is_bfloat16 = isinstance(element_type, int) and element_type == ONNX_BFLOAT16
        dtype = BFLOAT16 if is_bfloat16 else np.dtype(element_type)
        assert dtype == self._spec(name).dtype
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        machine = self._runtime.machine

        def read() -> NDArray[Any]:
            if num_bytes:
                memory = machine.known(buffer_ptr, num_bytes, f"input {name!r}")
                assert memory.device == device_id, f"input {name!r} is in {memory}"
            return np.frombuffer(bytes_at(buffer_ptr, num_bytes).tobytes(), dtype).reshape(shape)

        if self._is_read_on_host(name):
            now = read()
            self._name_to_read[name] = lambda: now
        else:
            self._name_to_read[name] = read
            self._read_uses.append((buffer_ptr, buffer_ptr + num_bytes))

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind memory of the host."""
        assert self._is_read_on_host(name), f"{name!r} would be copied to the GPU"
        dtype = self._spec(name).dtype
        self._name_to_read[name] = lambda: copy_of(ortvalue, dtype)

    def bind_output(self, name: str, device_type: str = "cpu", device_id: int = 0) -> None:
        """Bind an output that ONNX Runtime allocates, where it is written."""
        outputs, infos = self.session.get_outputs(), self.session.get_output_memory_infos()
        on_gpu = [o.name for o, info in zip(outputs, infos, strict=True) if info.name == "Cuda"]
        assert (device_type == "cuda") == (name in on_gpu), f"{name!r} would be copied"
        assert device_type == "cpu" or (device_type, device_id) == ("cuda", self.session.device_id)
        self._name_to_device[name] = device_type

    def get_outputs(self) -> list[Any]:
        """The outputs, in the order in which they were bound."""
        return list(self._values)

    def uses(self) -> tuple[tuple[int, int], ...]:
        """The device memory that the run needs until it is done."""
        written = [(memory.start, memory.stop) for memory, _ in self._writes]
        return (*self._read_uses, *written)

    def compute(self, real: Any) -> None:
        """Run with the inputs as they are now; outputs are allocated, with poison in them."""
        binding = real.io_binding()
        for name, read in self._name_to_read.items():
            binding.bind_ortvalue_input(name, ort_value(read()))
        for name in self._name_to_device:
            binding.bind_output(name, "cpu")
        real.run_with_iobinding(binding)
        outputs = zip(self._name_to_device.items(), binding.get_outputs(), strict=True)
        for (name, device_type), value in outputs:
            if device_type == "cpu":
                self._values.append(value)
                continue
            content = copy_of(value, self._spec(name).dtype).tobytes()
            gpu_value = GpuValue(self._runtime, self.session.device_id, len(content), value.shape())
            self._writes.append((gpu_value.memory, content))
            self._values.append(gpu_value)

    def write(self) -> None:
        """What the stream does at last."""
        for memory, content in self._writes:
            if content:
                self._runtime.machine.known(memory.start, len(content), "an output")
                bytes_at(memory.start, len(content))[:] = np.frombuffer(content, np.uint8)

    def _is_read_on_host(self, name: str) -> bool:
        arguments = self.session.get_inputs()
        infos = self.session.get_input_memory_infos()
        names = [a.name for a, info in zip(arguments, infos, strict=True) if info.name != "Cuda"]
        return name in names

    def _spec(self, name: str) -> TensorSpec:
        tensors = (*self.session.get_inputs(), *self.session.get_outputs())
        return next(tensor_spec(t, "tensor", "double") for t in tensors if t.name == name)


class GpuValue:
    """An OrtValue in the memory of a GPU, which is freed when nobody holds it any more."""

    def __init__(
        self, runtime: OnnxRuntimeDouble, device: int, num_bytes: int, shape: list[int]
    ) -> None:
        self.memory = runtime.machine.memory.allocate(max(num_bytes, 1), device)
        self._shape = shape
        self._num_bytes = num_bytes
        runtime.num_held_bytes += num_bytes
        start = self.memory.start

        def free() -> None:
            runtime.num_held_bytes -= num_bytes
            runtime.machine.memory.free(start)

        weakref.finalize(self, runtime.machine.later, free).atexit = False

    def data_ptr(self) -> int:
        """The address; 0 of an empty tensor."""
        return self.memory.start if self._num_bytes else 0

    def shape(self) -> list[int]:
        """The sizes of all axes."""
        return self._shape

    def device_name(self) -> str:
        """The device that the memory is of."""
        return "cuda"

    def numpy(self) -> NDArray[Any]:
        """The content, which ONNX Runtime would copy without regard to the compute stream."""
        raise AssertionError("an output on the GPU has to be read back in the compute stream")
