"""ONNX Runtime on a GPU, with doubles of CuPy and of ONNX Runtime's providers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from cache.cuda import CudaDevice
from models.errors import BackendError, ModelConfigError, ModelLoadError
from models.onnx_backend import OnnxBackend
from models.onnx_cuda import FIXED_OPTIONS, SESSION_CONFIG, provider_options
from models.onnx_providers import REFUSE_CPU_NODES, TELL_CPU_NODES
from models.repository import ModelRepository
from models.tensor_spec import DATATYPE_TO_DTYPE
from tests import model_zoo
from tests.cuda_double import onnx_runtime
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import LAUNCH_FAILURE, Machine, MachineConfig
from tests.cuda_double.memory import POISON, bytes_at
from tests.cuda_double.onnx_runtime import Binding, OnnxRuntimeDouble

MIB = 2**20


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(MachineConfig(num_devices=2))
    yield machine
    machine.check()


@pytest.fixture
def device(machine: Machine) -> CudaDevice:
    return opened_device(machine, 0)


@pytest.fixture
def runtime(machine: Machine) -> OnnxRuntimeDouble:
    return OnnxRuntimeDouble(machine)


@pytest.fixture
def repository(tmp_path: Path, device: CudaDevice, runtime: OnnxRuntimeDouble) -> ModelRepository:
    return ModelRepository(tmp_path, tables={}, device=device, onnx_runtime=runtime)


def opened_device(machine: Machine, index: int) -> CudaDevice:
    return CudaDevice(index, max_bytes=64 * MIB, max_host_bytes=MIB, cupy=cupy_of(machine))


def rows(num_rows: int, first: float = 0.0) -> NDArray[np.float32]:
    return np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4) + np.float32(first)


def node(operator: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output], name=f"{operator}_{output}")


class Model:
    """An open model, and inputs that are copied to the GPU while the run is enqueued."""

    def __init__(self, backend: Any, device: CudaDevice) -> None:
        self.backend = backend
        self._device = device

    def run(self, names: Sequence[str], *, waits: bool = True, **inputs: Any) -> Any:
        buffers = self._device.new_buffers()
        arrays = {name: buffers.put(name, [array]) for name, array in inputs.items()}
        copied = buffers.copied()
        try:
            return self.backend.run(arrays, names, [copied] if waits else [])
        finally:
            copied.wait()
            buffers.close()


def opened(repository: ModelRepository, device: CudaDevice, path: Path) -> Model:
    """The model of a file that `model_zoo` has written."""
    (model,) = repository.open(path.parents[1].name)
    assert model.backend.takes_device_arrays
    return Model(model.backend, device)


def load_error(repository: ModelRepository, path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        repository.open(path.parents[1].name)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_runs_wait_for_their_inputs(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    model = opened(repository, device, model_zoo.add1(tmp_path))
    for num_rows in (64, 5, 1, 64, 0):
        y = model.run(["y"], x=rows(num_rows))["y"]
        np.testing.assert_array_equal(y, rows(num_rows, 1.0), strict=True)
    late = model.run(["y"], x=rows(5), waits=False)["y"]
    assert not np.array_equal(late, rows(5, 1.0)), "the double shows what is not waited for"


@pytest.mark.parametrize("datatype", sorted(set(DATATYPE_TO_DTYPE) - {"BYTES"}))
def test_every_datatype_comes_back_bit_for_bit(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, datatype: str
) -> None:
    model = opened(repository, device, model_zoo.identity(tmp_path, datatype))
    dtype = DATATYPE_TO_DTYPE[datatype]
    content = np.random.default_rng(7).bytes(12 * dtype.itemsize)
    if datatype == "BOOL":
        content = bytes(byte % 2 for byte in content)
    x = np.frombuffer(content, dtype).reshape(3, 4)
    y = model.run(["y"], x=x)["y"]
    assert (y.dtype, y.shape, y.tobytes()) == (dtype, (3, 4), content)
    assert model.run(["y"], x=x[:0])["y"].shape == (0, 4)


def test_only_what_is_asked_for_is_computed(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    model = opened(repository, device, model_zoo.two_inputs(tmp_path))
    inputs: dict[str, Any] = {"a": rows(2), "b": rows(2, 5.0)}
    for names in (["b_out"], ["b_out", "a_out"], []):
        outputs = model.run(names, **inputs)
        assert list(outputs) == names
        for name, y in outputs.items():
            np.testing.assert_array_equal(y, inputs[name.removesuffix("_out")])


@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
def test_an_output_that_is_an_input_or_a_weight_is_copied(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, datatype: str
) -> None:
    shapes: dict[str, list[str | int]] = {"x": ["batch", 4], "y": ["batch", 4], "w": [2]}
    built = model_zoo.build(
        [node("Identity", ["x"], "y")],
        [model_zoo.value("x", datatype, shapes["x"])],
        [
            model_zoo.value(name, "FP32" if name == "w" else datatype, shape)
            for name, shape in shapes.items()
        ],
        w=np.array([3, 4], np.float32),
    )
    x = rows(2).astype(DATATYPE_TO_DTYPE[datatype])
    model = opened(repository, device, model_zoo.write(tmp_path, "m", built))
    for names in (["x"], ["x", "y"], ["w"], ["y", "w", "x"]):
        outputs = model.run(names, x=x)
        assert list(outputs) == names
        for name, y in outputs.items():
            expected = np.array([3, 4], np.float32) if name == "w" else x
            np.testing.assert_array_equal(y, expected, strict=True)


def test_what_the_host_reads_and_writes_is_not_left_to_onnx_runtime_to_copy(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    built = model_zoo.build(
        [node("Reshape", ["x", "shape"], "y"), node("Shape", ["y"], "s")],
        [model_zoo.value("x", "FP32", [None, 4]), model_zoo.value("shape", "INT64", [2])],
        [model_zoo.value("y", "FP32", [None, None]), model_zoo.value("s", "INT64", [2])],
    )
    model = opened(repository, device, model_zoo.write(tmp_path, "m", built))
    outputs = model.run(["s", "y"], x=rows(2), shape=np.array([4, 2]))
    np.testing.assert_array_equal(outputs["y"], rows(2).reshape(4, 2))
    assert outputs["s"].tolist() == [4, 2]


def test_runs_of_several_threads_do_not_meet(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    models = [
        opened(repository, device, model_zoo.add1(tmp_path, name=name, increment=increment))
        for name, increment in (("a", 1.0), ("b", 2.0))
    ]

    def run(seed: int) -> bool:
        x = np.full((seed % 7 + 1, 4), seed, np.float32)
        y = models[seed % 2].run(["y"], x=x)["y"]
        return bool((y == x + seed % 2 + 1).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(200)))


def test_a_failed_run_says_why_and_the_next_one_works(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    model = opened(repository, device, model_zoo.gather(tmp_path))
    with pytest.raises(BackendError, match="idx=99 must be within"):
        model.run(["y"], idx=np.array([3, 99]))
    assert model.run(["y"], idx=np.array([3]))["y"].tolist() == [[12, 13, 14, 15]]


def test_a_run_that_fails_half_way_still_reads_its_inputs(
    tmp_path: Path,
    repository: ModelRepository,
    device: CudaDevice,
    runtime: OnnxRuntimeDouble,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = opened(repository, device, model_zoo.add1(tmp_path))
    (session,) = runtime.sessions
    buffers = device.new_buffers()
    x = buffers.put("x", [rows(2)])
    seen: list[NDArray[np.uint8]] = []

    def fail_half_way(binding: Any) -> None:
        """What comes first is enqueued, and reads the input when the stream comes to it."""
        machine.enqueue(
            session.stream_pointer, lambda: seen.append(bytes_at(x.data.ptr, x.nbytes).copy())
        )
        raise Fail("[ONNXRuntimeError] : 1 : FAIL : the second node failed")

    monkeypatch.setattr(session, "run_with_iobinding", fail_half_way)
    with pytest.raises(BackendError, match=r"^the second node failed$"):
        model.backend.run({"x": x}, ["y"], [buffers.copied()])
    buffers.put("x", [rows(2, 50.0)])
    buffers.copied().wait()
    buffers.close()
    machine.run_everything()
    np.testing.assert_array_equal(seen[0].view(np.float32).reshape(2, 4), rows(2))


def test_a_fault_of_the_gpu_is_an_error_of_the_run(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, machine: Machine
) -> None:
    model = opened(repository, device, model_zoo.add1(tmp_path))
    machine.fail("onnxruntime.run", LAUNCH_FAILURE)
    with pytest.raises(BackendError, match="unspecified launch failure"):
        model.run(["y"], x=rows(1))


def test_results_outlive_the_model(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    model = opened(repository, device, model_zoo.add1(tmp_path))
    y = model.run(["y"], x=rows(2))["y"]
    model.backend.close()
    model.backend.close()
    np.testing.assert_array_equal(y, rows(2, 1.0))


def test_what_onnx_runtime_is_told(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, runtime: OnnxRuntimeDouble
) -> None:
    opened(repository, device, model_zoo.add1(tmp_path))
    (session,) = runtime.sessions
    assert session.provider_options == {
        "CUDAExecutionProvider": {
            "device_id": "0",
            "user_compute_stream": str(device.compute.pointer),
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": "HEURISTIC",
            "do_copy_in_default_stream": "1",
        }
    }
    assert session.config == {
        "session.disable_cpu_ep_fallback": "1",
        "session.intra_op.allow_spinning": "0",
        "session.use_device_allocator_for_initializers": "1",
        "session.use_env_allocators": "1",
    }


def test_tensorrt_is_a_line_of_configuration(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, runtime: OnnxRuntimeDouble
) -> None:
    providers = [{"tensorrt": {"trt_fp16_enable": True, "trt_max_workspace_size": 1024}}, "cuda"]
    model = opened(repository, device, model_zoo.add1(tmp_path, providers=providers))
    np.testing.assert_array_equal(model.run(["y"], x=rows(2))["y"], rows(2, 1.0))
    tensorrt, cuda = runtime.sessions[-1].provider_options.items()
    assert tensorrt == (
        "TensorrtExecutionProvider",
        {
            "device_id": "0",
            "user_compute_stream": str(device.compute.pointer),
            "trt_fp16_enable": "1",
            "trt_max_workspace_size": "1024",
        },
    )
    assert cuda == ("CUDAExecutionProvider", provider_options("CUDAExecutionProvider", device))


def test_options_of_the_user_win(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, runtime: OnnxRuntimeDouble
) -> None:
    options = {"use_tf32": False, "cudnn_conv_algo_search": "EXHAUSTIVE"}
    opened(repository, device, model_zoo.add1(tmp_path, providers=[{"cuda": options}]))
    given = runtime.sessions[-1].provider_options["CUDAExecutionProvider"]
    assert (given["use_tf32"], given["cudnn_conv_algo_search"]) == ("0", "EXHAUSTIVE")


def test_all_models_of_a_gpu_share_one_arena(
    tmp_path: Path, machine: Machine, runtime: OnnxRuntimeDouble
) -> None:
    for index in (0, 1):
        device = opened_device(machine, index)
        device.budget.charge("slab", MIB)
        repository = ModelRepository(tmp_path, tables={}, device=device, onnx_runtime=runtime)
        sizes = [model_zoo.add1(tmp_path, name=name).stat().st_size for name in "ab"]
        models = [
            opened(repository, device, tmp_path / "models" / name / "1" / "m") for name in "ab"
        ]
        for model in models:
            np.testing.assert_array_equal(model.run(["y"], x=rows(1))["y"], rows(1, 1.0))
        arena = runtime.arenas[-1]
        assert (arena.device_id, arena.extend_strategy) == (index, 1)
        assert arena.max_mem == device.budget.max_bytes - MIB - sizes[0]
    assert len(runtime.arenas) == 2


def test_a_full_budget_leaves_no_arena(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice
) -> None:
    path = model_zoo.add1(tmp_path)
    device.budget.charge("slab", device.budget.max_bytes - path.stat().st_size)
    assert load_error(repository, path).startswith(
        "models/add1/1/model.onnx: the device memory has no room left for what the model computes"
    )


def det(tmp_path: Path, **config: object) -> Path:
    """A model of three nodes, one of which CUDA has no kernel for."""
    built = model_zoo.build(
        [node("Neg", ["x"], "a"), node("Det", ["a"], "b"), node("Neg", ["b"], "y")],
        [model_zoo.value("x", "FP32", ["batch", 2, 2])],
        [model_zoo.value("y", "FP32", ["batch"])],
    )
    return model_zoo.write(tmp_path, "det", built, config)


def test_a_model_that_needs_the_cpu_is_refused_unless_that_is_allowed(
    tmp_path: Path,
    repository: ModelRepository,
    device: CudaDevice,
    runtime: OnnxRuntimeDouble,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime.cpu_operators = frozenset({"Det"})
    assert load_error(repository, det(tmp_path)) == (
        "models/det/1/model.onnx: cuda cannot run all of the model, or would be slower than the "
        "CPU: ONNX Runtime leaves 1 of 3 nodes (Det 'Det_b') to the CPU; set cpu_fallback: true in "
        "model.yaml to let it, or providers: [cpu] to run all nodes there"
    )
    model = opened(repository, device, det(tmp_path, cpu_fallback=True))
    x = np.array([[[1, 2], [3, 4]]], np.float32)
    assert model.run(["y"], x=x)["y"] == pytest.approx([2.0])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "models/det/1/model.onnx: ONNX Runtime runs 1 of 3 nodes (Det 'Det_b') on the CPU"
    )
    caplog.clear()
    runtime.cpu_operators = frozenset()
    opened(repository, device, det(tmp_path, cpu_fallback=True))
    assert not caplog.records


def test_strings_stay_on_the_cpu(
    tmp_path: Path, repository: ModelRepository, runtime: OnnxRuntimeDouble
) -> None:
    runtime.cpu_operators = frozenset({"Identity"})  # of strings
    for cpu_fallback in (False, True):
        path = model_zoo.identity(tmp_path, "BYTES", cpu_fallback=cpu_fallback)
        assert load_error(repository, path) == (
            "models/id_bytes/model.yaml: providers: the model has BYTES tensors, such as 'x', "
            "which a GPU cannot take; set providers: [cpu] (models/id_bytes/1/model.onnx)"
        )
    model_zoo.identity(tmp_path, "BYTES", providers=["cpu"])
    (model,) = repository.open("id_bytes")
    x = np.array([b"a", b"b"], np.object_)
    assert model.backend.run({"x": x}, ["y"])["y"].tolist() == [b"a", b"b"]


def test_a_model_on_the_cpu_beside_a_gpu_takes_arrays_of_the_host(
    tmp_path: Path, repository: ModelRepository, device: CudaDevice, runtime: OnnxRuntimeDouble
) -> None:
    model_zoo.add1(tmp_path, providers=["cpu"])
    (model,) = repository.open("add1")
    assert not model.backend.takes_device_arrays
    buffers = device.new_buffers(is_on_host=True)
    x = buffers.rows("x", 2, 4)
    x[:] = -1

    class Arrival:
        """An event of rows that are written when it is waited for."""

        def wait(self) -> None:
            x[:] = rows(2)

    np.testing.assert_array_equal(model.backend.run({"x": x}, ["y"], [Arrival()])["y"], rows(2, 1))
    assert (runtime.sessions, runtime.arenas) == ([], [])
    buffers.close()


@pytest.mark.parametrize(
    ("providers", "fault"),
    [
        (["cdua"], "unknown provider 'cdua'; installed are tensorrt, cuda, cpu"),
        (["cuda", "CUDAExecutionProvider"], "'cuda' is listed twice"),
        (["cuda", "cpu"], "leave 'cpu' out of the list and set cpu_fallback: true"),
        (
            [{"cuda": {"device_id": 1}}],
            "option 'device_id' of 'cuda' is the server's; leave it out",
        ),
        ([{"cuda": {"enable_cuda_graph": True}}], "option 'enable_cuda_graph' of 'cuda' is the"),
    ],
)
def test_wrong_providers(
    tmp_path: Path, repository: ModelRepository, providers: list[object], fault: str
) -> None:
    text = load_error(repository, model_zoo.add1(tmp_path, providers=providers))
    assert text.startswith(f"models/add1/model.yaml: providers: {fault}")


def test_unknown_options_are_refused_by_onnx_runtime(
    tmp_path: Path, repository: ModelRepository
) -> None:
    path = model_zoo.add1(tmp_path, providers=[{"cuda": {"use_tf23": 0}}])
    expected = 'models/add1/1/model.onnx: Unknown provider option: "use_tf23".'
    assert load_error(repository, path) == expected


def test_onnx_runtime_of_the_cpu_beside_a_gpu(
    tmp_path: Path, device: CudaDevice, runtime: OnnxRuntimeDouble
) -> None:
    runtime.available_providers = ("AzureExecutionProvider", "CPUExecutionProvider")
    repository = ModelRepository(tmp_path, tables={}, device=device, onnx_runtime=runtime)
    assert load_error(repository, model_zoo.add1(tmp_path)) == (
        "model add1: providers: 'cuda' is not installed, only AzureExecutionProvider, cpu; pip "
        "uninstall onnxruntime, then pip install -c constraints.txt -c constraints-gpu.txt "
        "-e '.[gpu]' (the extras cpu and gpu exclude each other) (models/add1/1/model.onnx)"
    )


def test_libraries_of_cuda_that_are_missing(
    tmp_path: Path,
    repository: ModelRepository,
    runtime: OnnxRuntimeDouble,
    capfd: pytest.CaptureFixture[str],
) -> None:
    runtime.broken_providers = frozenset({"CUDAExecutionProvider"})
    for cpu_fallback in (False, True):
        path = model_zoo.add1(tmp_path, cpu_fallback=cpu_fallback)
        assert load_error(repository, path) == (
            "models/add1/1/model.onnx: providers: ONNX Runtime cannot load 'cuda'; it needs the "
            "libraries of CUDA and cuDNN, as pip install 'onnxruntime-gpu[cuda,cudnn]' brings "
            "them; see `hotshelf doctor` "
            "(Failed to load libcublasLt.so.13: cannot open shared object file)"
        )
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("cpu_fallback", [False, True])
@pytest.mark.parametrize("operators", [[], ["Neg"]])
def test_cuda_that_is_left_out_of_a_session(
    tmp_path: Path,
    repository: ModelRepository,
    runtime: OnnxRuntimeDouble,
    operators: list[str],
    cpu_fallback: bool,
) -> None:
    built = model_zoo.build(
        [node(operator, ["x"], "y") for operator in operators],
        [model_zoo.value("x", "FP32", [2])],
        [model_zoo.value(name, "FP32", [2]) for name in ["x", *"y" * len(operators)]],
    )
    path = model_zoo.write(tmp_path, "m", built, {"cpu_fallback": cpu_fallback})
    repository.open("m")
    runtime.broken_providers = frozenset({"CUDAExecutionProvider"})
    assert load_error(repository, path).startswith(
        "models/m/1/model.onnx: providers: ONNX Runtime cannot load 'cuda'; "
        "it needs the libraries of CUDA and cuDNN, "
    )


@pytest.mark.parametrize("providers", [["tensorrt"], ["tensorrt", "cuda"]])
def test_libraries_of_tensorrt_that_are_missing(
    tmp_path: Path,
    repository: ModelRepository,
    runtime: OnnxRuntimeDouble,
    providers: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    runtime.broken_providers = frozenset({"TensorrtExecutionProvider"})
    text = load_error(repository, model_zoo.add1(tmp_path, providers=providers))
    assert text.startswith("models/add1/1/model.onnx: Please install TensorRT libraries")
    assert capfd.readouterr() == ("", "")


def test_an_output_of_an_unsynchronised_run_is_late(
    tmp_path: Path, device: CudaDevice, runtime: OnnxRuntimeDouble, machine: Machine
) -> None:
    backend = OnnxBackend(model_zoo.add1(tmp_path), device=device, runtime=runtime)
    (session,) = runtime.sessions
    x = device.to_device(rows(2))
    options = runtime.RunOptions()
    options.add_run_config_entry(onnx_runtime.DISABLE_SYNCHRONIZE, "1")
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, (2, 4), x.data.ptr)
    binding.bind_output("y", "cuda", 0)
    session.run_with_iobinding(binding, options)
    (y,) = binding.get_outputs()
    assert (bytes_at(y.data_ptr(), 32) == POISON).all()
    read = device.read_back([(y.data_ptr(), (2, 4), np.dtype(np.float32))])
    np.testing.assert_array_equal(read[0], rows(2, 1.0))
    assert machine.num_pending == 0
    backend.close()


# Names. The options of the providers are only in the GPU package, so the double's lists are copied
# from ONNX Runtime 1.31's source (cuda_execution_provider_info.cc and, of TensorRT,
# tensorrt_execution_provider_info.cc).


def test_the_double_has_what_onnx_runtime_has() -> None:
    for name in dir(OnnxRuntimeDouble):
        if not name.startswith("_") and name not in _OF_THE_DOUBLE:
            assert hasattr(onnxruntime, name), name
    pairs = [
        (onnxruntime.IOBinding, Binding),
        (onnxruntime.InferenceSession, onnx_runtime.GpuSession),
    ]
    for real, double in pairs:
        for name, method in inspect.getmembers(double, inspect.isfunction):
            if name.startswith("_") or name in _OF_THE_DOUBLE:
                continue
            expected = inspect.signature(getattr(real, name)).parameters
            assert set(inspect.signature(method).parameters) <= set(expected), name
    parameters = [*inspect.signature(onnxruntime.preload_dlls).parameters]
    assert [*inspect.signature(OnnxRuntimeDouble.preload_dlls).parameters][1:] == parameters
    assert '"enable_fallback"' in inspect.getsource(onnxruntime.InferenceSession.__init__)
    names = {"data_ptr", "shape", "device_name", "numpy"}
    assert all(callable(getattr(onnxruntime.OrtValue, name)) for name in names)
    for cls, attributes in (
        (onnxruntime.OrtEpAssignedSubgraph, ("ep_name", "get_nodes")),
        (onnxruntime.OrtEpAssignedNode, ("domain", "name", "op_type")),
        (onnxruntime.OrtMemoryInfo, ("name",)),
    ):
        assert all(hasattr(cls, attribute) for attribute in attributes)


_OF_THE_DOUBLE = {
    "machine", "cpu_operators", "available_providers", "broken_providers", "arenas", "sessions",
    "num_held_bytes", "held_bytes", "compute", "write", "uses",
}  # fmt: skip


def test_keys_exist_in_the_installed_library() -> None:
    folder = Path(onnxruntime.__file__).parent / "capi"
    (library,) = folder.glob("onnxruntime_pybind11_state*")
    content = library.read_bytes()
    keys = {*SESSION_CONFIG, *REFUSE_CPU_NODES, *TELL_CPU_NODES}
    for key in {*keys, *onnx_runtime.SESSION_KEYS, onnx_runtime.DISABLE_SYNCHRONIZE}:
        assert b"\0" + key.encode() + b"\0" in content, key
    assert keys <= onnx_runtime.SESSION_KEYS


def test_options_exist(device: CudaDevice) -> None:
    assert provider_options("CUDAExecutionProvider", device).keys() <= onnx_runtime.CUDA_OPTIONS
    tensorrt = provider_options("TensorrtExecutionProvider", device)
    assert tensorrt.keys() <= onnx_runtime.TENSORRT_OPTIONS
    assert FIXED_OPTIONS <= onnx_runtime.CUDA_OPTIONS | onnx_runtime.TENSORRT_OPTIONS


def test_the_arena_as_onnx_runtime_takes_it() -> None:
    config = onnxruntime.OrtArenaCfg({"max_mem": MIB, "arena_extend_strategy": 1})
    assert (config.max_mem, config.arena_extend_strategy) == (MIB, 1)
    memory = onnxruntime.OrtMemoryInfo(
        "Cuda", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 1, onnxruntime.OrtMemType.DEFAULT
    )
    assert (memory.name, memory.device_id) == ("Cuda", 1)
    assert memory.device_vendor_id == onnxruntime.OrtDeviceVendorId.NVIDIA
    with pytest.raises(RuntimeError, match="CUDAExecutionProvider is not implemented"):
        onnxruntime.create_and_register_allocator_v2("CUDAExecutionProvider", memory, {}, config)


def test_a_config_error_is_one_of_the_load(tmp_path: Path) -> None:
    path = model_zoo.add1(tmp_path)
    with pytest.raises(ModelConfigError, match="'cuda' needs a GPU, but the device is the cpu"):
        OnnxBackend(path, providers=["cuda"])
