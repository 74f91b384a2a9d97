"""`hotshelf doctor`: what was found of what Hotshelf can use, and what to do about the rest."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cache import Device, open_device
from cache.cuda import CudaDeviceInfo, CudaReport, probe
from cache.errors import CacheError
from server.findings import Finding, Report, Verdict
from server.host_checks import HostFacts, host_memory, huge_pages, memlock_text, numa
from server.settings import NAME_TO_OPTION, format_size, parse_size

logger = logging.getLogger(__name__)

CUDA_MAJOR = 13  # of the packages of the extra `gpu`
MIN_DRIVER = "580"  # the first driver release for it
MIN_COMPUTE_CAPABILITY = (7, 5)  # the oldest GPUs that its compiler knows

_CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
_CUDA_PROVIDER = "CUDAExecutionProvider"
_TRIED_BYTES = 64 << 20
_PINNED_BYTES = 1 << 20
_INSTALL = (
    "in Hotshelf's folder: pip uninstall onnxruntime; "
    "pip install -c constraints.txt -c constraints-gpu.txt -e '.[gpu]'"
)
_MAX_ERROR_CHARACTERS = 160


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Probes:
    """How the doctor looks at a machine."""

    host: HostFacts = field(default_factory=HostFacts)
    probe: Callable[[], CudaReport] = probe
    open_device: Callable[..., Device] = open_device
    load: Callable[[str], Any] = importlib.import_module
    package_version: Callable[[str], str | None] = _package_version


class Doctor:
    """Looks at a machine for one device: `cpu`, `cuda:N`, or `auto` for what is there."""

    def __init__(self, device: str, probes: Probes) -> None:
        self._device = device
        self._probes = probes
        self._cuda = probes.probe()
        # What a GPU needs is no fault of a machine that has none and was not asked for one.
        has_driver = self._driver_release() is not None or self._cuda.driver_version is not None
        wants_gpu = device.startswith("cuda:") or (device == "auto" and has_driver)
        self._gpu_fault = Verdict.PROBLEM if wants_gpu else Verdict.NOTE
        self._backends: dict[str, set[str]] = {"cpu": set(), "gpu": set()}
        self._is_gpu_open = False

    def examine(self) -> Report:
        """All findings; never raises."""
        checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
            ("driver", self._driver),
            ("devices", self._devices),
            ("nvml", self._nvml),
            ("cupy", self._cupy),
            ("compiler", self._compiler),
            ("gpu", self._gpu),
            ("onnxruntime", self._onnxruntime),
            ("torch", self._torch),
            ("backends", self._no_backend),
            ("host memory", self._host_memory),
            ("huge pages", self._huge_pages),
            ("numa", self._numa),
        ]
        findings = [finding for name, check in checks for finding in _guarded(name, check)]
        return Report(self._device, tuple(findings), tuple(self._usable()))

    def _usable(self) -> Iterator[str]:
        if self._backends["cpu"]:
            yield "cpu"
        if self._is_gpu_open and self._backends["gpu"]:
            yield f"cuda:{self._index}"

    @property
    def _index(self) -> int:
        """The GPU that is looked at closely."""
        return int(self._device.removeprefix("cuda:")) if self._device.startswith("cuda:") else 0

    @property
    def _gpu_info(self) -> CudaDeviceInfo | None:
        if self._cuda.problem is not None:
            return None
        return next((one for one in self._cuda.devices if one.index == self._index), None)

    def _driver_release(self) -> str | None:
        """As `/proc/driver/nvidia` has it: 580.65.06."""
        first = self._probes.host.read("proc/driver/nvidia/version").partition("\n")[0]
        words = (word for word in first.split() if word.replace(".", "").isdigit() and "." in word)
        return next(words, None) if first else None

    def _driver(self) -> Iterator[Finding]:
        release, supported = self._driver_release(), self._cuda.driver_version
        if supported is not None:
            supports = f"supports CUDA {_dotted(supported)}"
            yield Finding("driver", f"{release}, {supports}" if release else supports)
        elif release is None:
            install = f"install an NVIDIA driver, release {MIN_DRIVER} or newer"
            yield Finding(
                "driver", "no NVIDIA driver", self._gpu_fault,
                f"for a GPU {install}; in a container: docker run --gpus all",
            )  # fmt: skip
        elif self._cuda.cupy_version is None:
            yield Finding("driver", release)
        else:
            yield Finding(
                "driver", f"{release}, but CUDA does not reach it", self._gpu_fault,
                f"{self._cuda.problem}; in a container: docker run --gpus all",
            )  # fmt: skip

    def _devices(self) -> Iterator[Finding]:
        for info in self._cuda.devices:
            yield self._device_finding(info)
        has_cupy = self._cuda.cupy_version is not None
        if self._cuda.problem is not None and has_cupy and self._cuda.driver_version is not None:
            yield Finding("devices", "none usable", self._gpu_fault, self._cuda.problem)
        elif self._device.startswith("cuda:") and self._cuda.devices and self._gpu_info is None:
            known = ", ".join(f"cuda:{info.index}" for info in self._cuda.devices)
            fix = f"the driver shows {known}; see CUDA_VISIBLE_DEVICES and nvidia-smi"
            yield Finding(self._device, "not found", Verdict.PROBLEM, fix)

    def _device_finding(self, info: CudaDeviceInfo) -> Finding:
        major, minor = info.compute_capability
        value = (
            f"{info.name}, {format_size(info.free_bytes)} of {format_size(info.total_bytes)} free, "
            f"compute capability {major}.{minor}, {info.num_multiprocessors} multiprocessors, "
            f"PCI {info.pci_bus_id}"
        )
        if info.compute_capability < MIN_COMPUTE_CAPABILITY:
            oldest = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
            fix = f"CUDA {CUDA_MAJOR} needs compute capability {oldest} or newer: take another GPU"
            return Finding(f"cuda:{info.index}", value, self._gpu_fault, fix)
        return Finding(f"cuda:{info.index}", value)

    def _nvml(self) -> Iterator[Finding]:
        lost = "without it /metrics has no figures of the GPU"
        try:
            nvml = self._probes.load("pynvml")
        except ImportError:
            fix = f"{lost}: pip install nvidia-ml-py"
            yield Finding("nvml", "nvidia-ml-py is not installed", Verdict.NOTE, fix)
            return
        try:
            nvml.nvmlInit()
            yield Finding("nvml", f"answers, driver {nvml.nvmlSystemGetDriverVersion()}")
        except nvml.NVMLError as error:
            fix = f"{lost}; in a container NVIDIA_DRIVER_CAPABILITIES must name utility"
            yield Finding("nvml", f"not available: {error}", Verdict.NOTE, fix)

    def _cupy(self) -> Iterator[Finding]:
        installed = [name for name in _CUPY_PACKAGES if self._probes.package_version(name)]
        if len(installed) > 1:
            fix = f"they share files: pip uninstall {' '.join(installed)}, then {_INSTALL}"
            yield Finding("cupy packages", ", ".join(installed), self._gpu_fault, fix)
        report = self._cuda
        if report.cupy_version is None:
            yield Finding("cupy", "not usable", self._gpu_fault, report.problem or _INSTALL)
            return
        value = report.cupy_version
        if report.runtime_version is not None:
            value += f", built for CUDA {_dotted(report.runtime_version)}"
            if report.runtime_version // 1000 != CUDA_MAJOR:
                yield Finding(
                    "cupy", value, self._gpu_fault,
                    f"ONNX Runtime's package is built for CUDA {CUDA_MAJOR}: {_INSTALL}",
                )  # fmt: skip
                return
        yield Finding("cupy", value)

    def _compiler(self) -> Iterator[Finding]:
        """CuPy compiles with NVRTC, and demands CUDA's headers even for code that has none."""
        if self._cuda.cupy_version is None:
            return
        try:
            compiler = self._probes.load("cupy").cuda.nvrtc.getVersion()
        except Exception as error:  # a broken package fails in ways of its own
            value = f"CUDA's compiler NVRTC cannot be loaded ({_line(error)})"
            yield Finding("compiler", value, self._gpu_fault, _INSTALL)
            return
        headers = self._probes.load("cuda.pathfinder").find_nvidia_header_directory("cudart")
        value = f"NVRTC {'.'.join(map(str, compiler))}"
        if headers is None:
            value += ", CUDA's headers are not found"
            yield Finding("compiler", value, self._gpu_fault, _INSTALL)
        else:
            yield Finding("compiler", f"{value}, headers in {headers}")

    def _gpu(self) -> Iterator[Finding]:
        """Opens the GPU as the server does, and pins some memory."""
        not_tried = Finding("pinned memory", f"not tried; {memlock_text(self._probes.host)}")
        if self._gpu_info is None or self._device == "cpu":
            yield not_tried
            return
        name = f"cuda:{self._index} opens"
        try:
            device = self._probes.open_device(
                f"cuda:{self._index}", max_bytes=_TRIED_BYTES, max_host_bytes=_TRIED_BYTES
            )
        except Exception as error:  # a broken driver fails in ways of its own
            fix = "mend what is said above; if all of that is ok, this line is the fault"
            yield Finding(name, f"no: {_line(error)}", self._gpu_fault, fix)
            yield not_tried
            return
        with contextlib.closing(device):
            yield Finding(name, "yes, the kernels compile")
            yield self._pinning(device)

    def _pinning(self, device: Device) -> Finding:
        limit = memlock_text(self._probes.host)
        try:
            with contextlib.closing(device.reserve_host("doctor", _PINNED_BYTES)) as arena:
                arena.commit(0, _PINNED_BYTES)
        except CacheError as error:
            fix = "raise the limit: ulimit -l unlimited; docker run --ulimit memlock=-1"
            return Finding("pinned memory", f"{_line(error)}; {limit}", self._gpu_fault, fix)
        self._is_gpu_open = True
        return Finding("pinned memory", f"{format_size(_PINNED_BYTES)} was pinned; {limit}")

    def _onnxruntime(self) -> Iterator[Finding]:
        both = ("onnxruntime", "onnxruntime-gpu")
        installed = [
            f"{name} {found}" for name in both if (found := self._probes.package_version(name))
        ]
        if len(installed) > 1:
            yield Finding(
                "onnxruntime packages", ", ".join(installed), Verdict.PROBLEM,
                "they share files, and the last one wins: pip uninstall onnxruntime "
                "onnxruntime-gpu, then install one of them",
            )  # fmt: skip
        try:
            onnxruntime = self._probes.load("onnxruntime")
        except Exception as error:  # a broken package fails in ways of its own
            fix = f"models of ONNX cannot run: pip install onnxruntime, or for a GPU {_INSTALL}"
            verdict = Verdict.PROBLEM if installed else Verdict.NOTE
            yield Finding("onnxruntime", f"cannot be imported ({_line(error)})", verdict, fix)
            return
        self._backends["cpu"].add("onnx")
        providers = onnxruntime.get_available_providers()
        value = f"{', '.join(installed) or onnxruntime.__version__}: {', '.join(providers)}"
        if self._device == "cpu" or (self._gpu_info is None and self._device == "auto"):
            yield Finding("onnxruntime", value)
        elif _CUDA_PROVIDER not in providers:
            fix = f"ONNX models stay on the CPU: {_INSTALL}"
            yield Finding("onnxruntime", value, self._gpu_fault, fix)
        elif self._gpu_info is None:
            yield Finding("onnxruntime", value)
        elif not self._runs_on_gpu(onnxruntime):
            value += "; the CUDA provider does not start"
            fix = f"it needs the libraries of CUDA {CUDA_MAJOR} and cuDNN 9; {_INSTALL}"
            yield Finding("onnxruntime", value, self._gpu_fault, fix)
        else:
            self._backends["gpu"].add("onnx")
            yield Finding("onnxruntime", value)

    def _runs_on_gpu(self, onnxruntime: Any) -> bool:
        """Whether a model of one node gets the provider, which is left out where it cannot load."""
        onnx = self._probes.load("onnx")
        make, kind = onnx.helper, onnx.TensorProto.FLOAT
        graph = make.make_graph(
            [make.make_node("Add", ["x", "x"], ["y"])],
            "doctor",
            [make.make_tensor_value_info("x", kind, [1])],
            [make.make_tensor_value_info("y", kind, [1])],
        )
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
        onnxruntime.set_default_logger_severity(4)
        # It finds the libraries of the nvidia packages, and prints what it does not find.
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=[(_CUDA_PROVIDER, {"device_id": self._index})]
        )
        return _CUDA_PROVIDER in session.get_providers()

    def _torch(self) -> Iterator[Finding]:
        if self._probes.package_version("torch") is None:
            yield Finding("torch", "not installed; only models of torch need it")
            return
        try:
            torch = self._probes.load("torch")
            has_gpu = bool(torch.cuda.is_available())
        except Exception as error:  # a broken package fails in ways of its own
            fix = "models of torch cannot run: pip install torch"
            yield Finding("torch", f"cannot be imported ({_line(error)})", Verdict.NOTE, fix)
            return
        self._backends["cpu"].add("torch")
        built_for = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        value = f"{torch.__version__}, {built_for}, sees {'a' if has_gpu else 'no'} GPU"
        if has_gpu:
            self._backends["gpu"].add("torch")
        if has_gpu or self._gpu_info is None or self._device == "cpu":
            yield Finding("torch", value)
        else:
            fix = "models of torch stay on the CPU: install a CUDA build, see pytorch.org"
            yield Finding("torch", value, Verdict.NOTE, fix)

    def _no_backend(self) -> Iterator[Finding]:
        if not self._backends["cpu"]:
            fix = f"pip install onnxruntime, or for a GPU {_INSTALL}"
            yield Finding("backends", "neither onnxruntime nor torch", Verdict.PROBLEM, fix)
        elif self._is_gpu_open and not self._backends["gpu"]:
            fix = f"{_INSTALL}, or a CUDA build of torch"
            yield Finding("backends", "no model can run on the GPU", self._gpu_fault, fix)

    def _host_memory(self) -> Iterator[Finding]:
        needed_bytes = parse_size(NAME_TO_OPTION["host_memory"].default_text)
        yield host_memory(self._probes.host, needed_bytes)

    def _huge_pages(self) -> Iterator[Finding]:
        yield huge_pages(self._probes.host)

    def _numa(self) -> Iterator[Finding]:
        bus_id = None if self._gpu_info is None else self._gpu_info.pci_bus_id
        yield numa(self._probes.host, bus_id)


def examine(device: str, probes: Probes) -> Report:
    """Looks for what the device (`cpu`, `cuda:N` or `auto`) needs; never raises."""
    return Doctor(device, probes).examine()


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # one check's fault must not end the others
        logger.warning("doctor: %s could not be looked at", name, exc_info=error)
        yield Finding(name, f"could not be looked at: {_line(error)}", Verdict.NOTE)


def _dotted(cuda_version: int) -> str:
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return textwrap.shorten(text, _MAX_ERROR_CHARACTERS, placeholder=" ...")
