"""`hotshelf doctor`: on this machine as a command, and on machines made of stand-ins."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache.cuda import CudaDevice, CudaDeviceInfo, CudaReport, probe
from cache.device import Device, DeviceError, open_device
from cache.errors import OutOfMemoryError
from server.doctor import Probes, examine
from server.findings import Finding, Report, Verdict
from server.host_checks import HostFacts
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import Machine, MachineConfig
from tests.serving import ROOT, server_environment

GIB = 1 << 30
GPU = CudaDeviceInfo(
    index=0,
    name="NVIDIA H200",
    compute_capability=(9, 0),
    total_bytes=140 * GIB,
    free_bytes=139 * GIB,
    num_multiprocessors=132,
    pci_bus_id="00000000:0F:00.0",
)
NO_CUPY = CudaReport(None, None, None, (), "CuPy is not installed; install it")
NO_DRIVER = CudaReport("14.2.0", None, 13020, (), "there is no NVIDIA driver; install one")
ONE_GPU = CudaReport("14.2.0", 13000, 13020, (GPU,), None)

FILES = {
    "proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n",
    "proc/self/cgroup": "0::/\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-3,8\n",
    "sys/devices/system/node/node1/cpulist": "4-7\n",
    "sys/bus/pci/devices/0000:0f:00.0/numa_node": "1\n",
}
DRIVER_FILE = {
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
}


class FakeNvmlError(Exception):
    """Like pynvml's."""


def fake_modules(
    *, has_headers: bool = True, has_compiler: bool = True, runs_on_gpu: bool = True
) -> dict[str, Any]:
    """Stand-ins of the packages for a GPU."""

    def compiler_version() -> tuple[int, int]:
        if not has_compiler:
            raise RuntimeError('Failure finding "libnvrtc.so.13"')
        return (13, 5)

    def session(model: bytes, providers: list[Any]) -> Any:
        assert providers == [("CUDAExecutionProvider", {"device_id": 0})]
        names = ["CUDAExecutionProvider"] if runs_on_gpu else []
        return SimpleNamespace(get_providers=lambda: [*names, "CPUExecutionProvider"])

    def preload() -> None:
        print("Failed to load libcudnn.so.9")

    import onnx

    headers = "/cuda/include" if has_headers else None
    return {
        "cupy": SimpleNamespace(
            cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=compiler_version))
        ),
        "cuda.pathfinder": SimpleNamespace(find_nvidia_header_directory=lambda name: headers),
        "pynvml": SimpleNamespace(
            NVMLError=FakeNvmlError,
            nvmlInit=lambda: None,
            nvmlSystemGetDriverVersion=lambda: "580.65.06",
        ),
        "onnx": onnx,
        "onnxruntime": SimpleNamespace(
            __version__="1.31.1",
            get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
            set_default_logger_severity=lambda severity: None,
            preload_dlls=preload,
            InferenceSession=session,
        ),
    }


def machine(
    root: Path,
    report: CudaReport = ONE_GPU,
    *,
    files: Mapping[str, str] = FILES | DRIVER_FILE,
    modules: Mapping[str, Any] | None = None,
    packages: Mapping[str, str] | None = None,
    open_device: Callable[..., Device] = lambda name, **sizes: open_device("cpu", **sizes),
    memlock: int = resource.RLIM_INFINITY,
    affinity: frozenset[int] = frozenset({4, 5}),
) -> Probes:
    """A machine with a GPU that works, but for what is given."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    known = fake_modules() if modules is None else modules

    def load(name: str) -> Any:
        if name not in known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return known[name]

    installed = {"onnxruntime-gpu": "1.31.1", "cupy-cuda13x": "14.2.0"}
    installed = installed if packages is None else dict(packages)
    host = HostFacts(root, memlock=lambda: memlock, affinity=lambda: set(affinity))
    return Probes(host, lambda: report, open_device, load, installed.get)


def named(report: Report, name: str) -> Finding:
    """The only finding of that name."""
    (finding,) = (finding for finding in report.findings if finding.name == name)
    return finding


def problems(report: Report) -> set[str]:
    return {one.name for one in report.findings if one.verdict is Verdict.PROBLEM}


# ---- the command


def run_doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", "doctor", *arguments],
        capture_output=True, text=True, cwd=ROOT, env=server_environment() | variables,
        check=False,
    )  # fmt: skip


def test_the_device_of_the_environment_counts_as_for_serve() -> None:
    done = run_doctor(HOTSHELF_DEVICE="tpu")
    assert done.returncode == 2
    assert "device: expected cpu, cuda:N or auto, got 'tpu'" in done.stderr
    assert run_doctor("--device", "cpu", HOTSHELF_DEVICE="tpu").returncode == 0


def test_the_command_says_that_this_machine_can_serve() -> None:
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Hotshelf can serve on cpu" in done.stdout
    assert "onnxruntime" in done.stdout


def test_the_command_in_json_says_the_same_as_its_exit_code() -> None:
    for device in ("cuda:0", "cuda:99"):
        done = run_doctor("--json", "--device", device)
        report = json.loads(done.stdout)
        assert report["device"] == device
        assert done.returncode == (0 if report["can_serve"] else 1)
        assert "Traceback" not in done.stderr
    assert report["can_serve"] is False
    faults = [one for one in report["findings"] if one["verdict"] == "problem"]
    assert faults
    assert all(one["fix"] for one in faults)


def test_a_device_that_cannot_be_is_a_wrong_option() -> None:
    done = run_doctor("--device", "gpu")
    assert done.returncode == 2
    assert done.stderr == "hotshelf: device: expected cpu, cuda:N or auto, got 'gpu'\n"


# ---- a GPU that works


def test_the_device_is_opened_as_the_server_does_it(tmp_path: Path) -> None:
    cupy = cupy_of(Machine(MachineConfig()))

    def opened(name: str, **sizes: Any) -> Device:
        return CudaDevice(int(name.removeprefix("cuda:")), cupy=cupy, **sizes)

    report = examine("cuda:0", machine(tmp_path, probe(cupy), open_device=opened))
    assert report.can_serve, report.text()
    assert problems(report) == set()


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_a_machine_with_a_gpu(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examine(device, machine(tmp_path))
    assert report.can_serve
    assert report.usable == ("cpu", "cuda:0")
    assert {finding.verdict for finding in report.findings} == {Verdict.OK}
    assert named(report, "driver").value == "580.65.06, supports CUDA 13.0"
    assert named(report, "cuda:0").value == (
        "NVIDIA H200, 139GiB of 140GiB free, compute capability 9.0, 132 multiprocessors, "
        "PCI 00000000:0F:00.0"
    )
    assert named(report, "compiler").value == "NVRTC 13.5, headers in /cuda/include"
    assert named(report, "pinned memory").value == "1MiB was pinned; ulimit -l is unlimited"
    assert report.text().endswith("Hotshelf can serve on cpu, cuda:0.")
    assert capsys.readouterr().out == ""  # what libraries print would break the JSON


def test_the_gpu_is_left_alone_when_the_cpu_is_asked_for(tmp_path: Path) -> None:
    def fail(name: str, **sizes: Any) -> Device:
        raise AssertionError(name)

    report = examine("cpu", machine(tmp_path, open_device=fail))
    assert report.can_serve
    assert report.usable == ("cpu",)
    assert problems(report) == set()


def test_the_right_gpu_of_several_is_opened(tmp_path: Path) -> None:
    opened: list[str] = []

    def note(name: str, **sizes: Any) -> Device:
        opened.append(name)
        return open_device("cpu", **sizes)

    second = CudaDeviceInfo(1, "NVIDIA L4", (8, 9), 24 * GIB, 23 * GIB, 58, "0000:1F:00.0")
    both = CudaReport("14.2.0", 13000, 13020, (GPU, second), None)
    modules = fake_modules()
    modules["onnxruntime"].InferenceSession = lambda model, providers: SimpleNamespace(
        get_providers=lambda: [provider for provider, options in providers]
    )
    report = examine("cuda:1", machine(tmp_path, both, modules=modules, open_device=note))
    assert opened == ["cuda:1"]
    assert report.usable == ("cpu", "cuda:1")
    missing = examine("cuda:2", machine(tmp_path, both, open_device=note))
    assert not missing.can_serve
    assert "the driver shows cuda:0, cuda:1" in named(missing, "cuda:2").fix
    assert missing.text().endswith("Hotshelf can serve on cpu, and not on cuda:2.")


# ---- what may be wrong


def test_without_a_driver_the_cpu_is_enough_unless_a_gpu_is_asked_for(tmp_path: Path) -> None:
    there = machine(tmp_path, NO_DRIVER, files=FILES)
    report = examine("auto", there)
    assert report.can_serve
    assert problems(report) == set()
    assert named(report, "driver").verdict is Verdict.NOTE
    asked = examine("cuda:0", there)
    assert not asked.can_serve
    assert problems(asked) == {"driver"}
    assert "install an NVIDIA driver, release 580 or newer" in named(asked, "driver").fix


def test_a_driver_that_is_not_let_into_the_container(tmp_path: Path) -> None:
    report = examine("auto", machine(tmp_path, NO_DRIVER))
    assert report.usable == ("cpu",)
    assert problems(report) == {"driver"}
    finding = named(report, "driver")
    assert finding.value == "580.65.06, but CUDA does not reach it"
    assert "docker run --gpus all" in finding.fix


def test_no_cupy(tmp_path: Path) -> None:
    report = examine("cuda:0", machine(tmp_path, NO_CUPY))
    assert not report.can_serve
    assert problems(report) == {"cupy"}
    assert named(report, "cupy").fix == NO_CUPY.problem
    assert named(report, "driver").value == "580.65.06"


def test_a_driver_too_old_for_cupy(tmp_path: Path) -> None:
    problem = "CuPy is built for CUDA 13.2, the driver supports 12.4; update the driver"
    old = CudaReport("14.2.0", 12040, 13020, (), problem)
    report = examine("cuda:0", machine(tmp_path, old))
    assert not report.can_serve
    assert named(report, "devices").fix == problem


def test_cupy_of_another_cuda_than_onnxruntime(tmp_path: Path) -> None:
    other = CudaReport("14.2.0", 13000, 12080, (GPU,), None)
    finding = named(examine("auto", machine(tmp_path, other)), "cupy")
    assert finding.verdict is Verdict.PROBLEM
    assert finding.value == "14.2.0, built for CUDA 12.8"


def test_two_packages_of_cupy(tmp_path: Path) -> None:
    packages = {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0", "onnxruntime-gpu": "1.31.1"}
    report = examine("auto", machine(tmp_path, packages=packages))
    assert problems(report) == {"cupy packages"}
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in named(report, "cupy packages").fix


@pytest.mark.parametrize(
    ("modules", "value"),
    [
        (fake_modules(has_headers=False), "NVRTC 13.5, CUDA's headers are not found"),
        (
            fake_modules(has_compiler=False),
            'CUDA\'s compiler NVRTC cannot be loaded (Failure finding "libnvrtc.so.13")',
        ),
    ],
)
def test_what_cupy_compiles_with(modules: Mapping[str, Any], value: str, tmp_path: Path) -> None:
    finding = named(examine("auto", machine(tmp_path, modules=modules)), "compiler")
    assert (finding.value, finding.verdict) == (value, Verdict.PROBLEM)
    assert "-c constraints-gpu.txt -e '.[gpu]'" in finding.fix


def test_a_gpu_that_is_too_old(tmp_path: Path) -> None:
    old = CudaDeviceInfo(0, "Tesla V100", (7, 0), 16 * GIB, 15 * GIB, 80, "0000:0f:00.0")
    finding = named(
        examine("auto", machine(tmp_path, CudaReport("14.2.0", 13000, 13020, (old,), None))),
        "cuda:0",
    )
    assert finding.verdict is Verdict.PROBLEM
    assert "compute capability 7.5 or newer" in finding.fix


@pytest.mark.parametrize("error", [DeviceError("out of\norder"), OSError("out of order")])
def test_a_gpu_that_does_not_open(error: Exception, tmp_path: Path) -> None:
    def fail(name: str, **sizes: Any) -> Device:
        raise error

    report = examine("cuda:0", machine(tmp_path, open_device=fail))
    assert not report.can_serve
    finding = named(report, "cuda:0 opens")
    assert (finding.value, finding.verdict) == ("no: out of order", Verdict.PROBLEM)


def test_memory_that_cannot_be_pinned(tmp_path: Path) -> None:
    def opened(name: str, **sizes: Any) -> Device:
        device = open_device("cpu", **sizes)

        def refuse(owner: str, max_bytes: int) -> Any:
            raise OutOfMemoryError("doctor: 1048576 bytes of host memory cannot be pinned")

        device.reserve_host = refuse  # type: ignore[method-assign]
        return device

    report = examine("cuda:0", machine(tmp_path, open_device=opened, memlock=65536))
    assert not report.can_serve
    finding = named(report, "pinned memory")
    assert finding.value.endswith("cannot be pinned; ulimit -l is 64KiB")
    assert "--ulimit memlock=-1" in finding.fix


# ---- backends


def test_both_packages_of_onnxruntime(tmp_path: Path) -> None:
    packages = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    report = examine("auto", machine(tmp_path, packages=packages))
    assert problems(report) == {"onnxruntime packages"}
    finding = named(report, "onnxruntime packages")
    assert "they share files" in finding.fix


def test_onnxruntime_without_the_cuda_provider(tmp_path: Path) -> None:
    modules = fake_modules()
    modules["onnxruntime"].get_available_providers = lambda: ["CPUExecutionProvider"]
    report = examine("cuda:0", machine(tmp_path, modules=modules))
    assert not report.can_serve
    assert problems(report) == {"onnxruntime", "backends"}
    assert named(report, "backends").value == "no model can run on the GPU"


def test_a_cuda_provider_that_does_not_start(tmp_path: Path) -> None:
    modules = fake_modules(runs_on_gpu=False)
    report = examine("cuda:0", machine(tmp_path, modules=modules))
    assert not report.can_serve
    assert "the CUDA provider does not start" in named(report, "onnxruntime").value
    assert "CUDA 13 and cuDNN 9" in named(report, "onnxruntime").fix


def fake_torch(cuda: str | None) -> Any:
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: cuda is not None),
    )


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    modules = {**fake_modules(), "torch": fake_torch("13.0")}
    del modules["onnxruntime"]
    there = machine(tmp_path, modules=modules, packages={"torch": "2.13.0"})
    report = examine("cuda:0", there)
    assert report.usable == ("cpu", "cuda:0")
    assert named(report, "torch").value == "2.13.0, built for CUDA 13.0, sees a GPU"
    assert named(report, "onnxruntime").verdict is Verdict.NOTE


def test_torch_without_cuda_is_a_note(tmp_path: Path) -> None:
    modules = {**fake_modules(), "torch": fake_torch(None)}
    packages = {"torch": "2.13.0", "onnxruntime-gpu": "1.31.1"}
    report = examine("cuda:0", machine(tmp_path, modules=modules, packages=packages))
    assert report.can_serve
    finding = named(report, "torch")
    assert (finding.value, finding.verdict) == (
        "2.13.0, a CPU build, sees no GPU", Verdict.NOTE,
    )  # fmt: skip


def test_no_backend_at_all(tmp_path: Path) -> None:
    report = examine("auto", machine(tmp_path, NO_CUPY, files=FILES, modules={}, packages={}))
    assert not report.can_serve
    assert problems(report) == {"backends"}
    assert report.text().endswith("Hotshelf can serve on no device.")


def test_a_check_that_fails_does_not_end_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modules = {**fake_modules(), "pynvml": SimpleNamespace()}
    report = examine("auto", machine(tmp_path, modules=modules))
    assert report.can_serve
    assert named(report, "nvml").value.startswith("could not be looked at: ")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info is not None


def test_a_cupy_that_breaks_while_it_is_imported_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text("raise OSError('libcuda is of another world')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    report = examine("auto", machine(tmp_path, probe()))
    assert report.usable == ("cpu",)
    assert "libcuda is of another world" in named(report, "cupy").fix


# ---- the host


def test_memory_of_a_cgroup(tmp_path: Path) -> None:
    files = {
        **FILES,
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/pods/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/pods/one/memory.max": "max\n",
    }
    finding = named(examine("cpu", machine(tmp_path, files=files)), "host memory")
    assert finding.value == "16GiB of 32GiB free, cgroup limit 4GiB: 1GiB are left"
    assert finding.verdict is Verdict.NOTE
    assert "the default of --host-memory is 2GiB" in finding.fix


def test_memory_of_a_cgroup_of_version_1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        **FILES,
        "proc/self/cgroup": "4:memory:/one\n3:cpuset:/\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/one/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{folder}/one/memory.usage_in_bytes": f"{2 * GIB}\n",
    }
    finding = named(examine("cpu", machine(tmp_path, files=files)), "host memory")
    assert finding.value == "16GiB of 32GiB free, cgroup limit 8GiB: 6GiB are left"
    assert finding.verdict is Verdict.OK


def test_huge_pages_that_are_off(tmp_path: Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    there = machine(tmp_path, files={**FILES, path: "always madvise [never]\n"})
    finding = named(examine("cpu", there), "huge pages")
    assert (finding.value, finding.verdict) == ("transparent, never", Verdict.NOTE)
    assert f"echo madvise > /{path}" in finding.fix


def test_a_process_away_from_its_gpu(tmp_path: Path) -> None:
    near = named(examine("auto", machine(tmp_path)), "numa")
    assert near.value == "2 nodes, 2 CPUs for this process, the GPU is at node 1"
    assert near.verdict is Verdict.OK
    far = named(examine("auto", machine(tmp_path, affinity=frozenset({3, 4, 8}))), "numa")
    assert far.value.endswith("the GPU is at node 1, this process at 0, 1")
    assert "numactl --cpunodebind=1 --membind=1" in far.fix


def test_a_gpu_of_no_known_node(tmp_path: Path) -> None:
    path = "sys/bus/pci/devices/0000:0f:00.0/numa_node"
    finding = named(examine("auto", machine(tmp_path, files={**FILES, path: "-1\n"})), "numa")
    assert finding.verdict is Verdict.OK
    assert finding.value.endswith("the GPU's node is not known")


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    report = examine("cpu", machine(tmp_path, files={}))
    for name in ("host memory", "huge pages", "numa"):
        finding = named(report, name)
        assert finding.verdict is Verdict.OK
        assert finding.value.startswith("unknown: ")
