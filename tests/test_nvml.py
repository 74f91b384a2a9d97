"""Figures of the GPU: from a stand-in for NVML to the text of /metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from cache import Budget, FeatureCache
from server.metrics import Metrics
from server.nvml import GpuFigures, Nvml, memory_by_use

MIB = 1 << 20
BUS_ID = "0000:0F:00.0"
PID = 4711


class FakeError(Exception):
    """Like pynvml's: the code is `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Memory(NamedTuple):
    total: int
    used: int


class Rates(NamedTuple):
    gpu: int
    memory: int


class Process(NamedTuple):
    pid: int
    usedGpuMemory: int | None  # noqa: N815 (NVML's name)


@dataclass
class FakeGpu:
    """One GPU or MIG device; a missing figure is an error code instead of a value."""

    uuid: str = "GPU-1"
    memory: Memory | int = field(default_factory=lambda: Memory(1000 * MIB, 600 * MIB))
    rates: Rates | int = field(default_factory=lambda: Rates(37, 20))
    power: int = 250_000
    processes: list[Process] | int = field(default_factory=list)
    instances: list[FakeGpu | None] | None = None


class FakeNvml:
    """The part of pynvml that is used, with GPUs by bus id."""

    NVMLError = FakeError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, gpus: Mapping[str, FakeGpu]) -> None:
        self.gpus = gpus
        self.fault: int | None = None
        self.num_inits = 0
        self.gate = threading.Event()
        self.gate.set()

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_inits += 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> FakeGpu:  # noqa: N802
        self.gate.wait(60)
        if self.fault is not None:
            raise FakeError(self.fault)
        return self.gpus[bus_id]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        if gpu.instances is None:
            raise FakeError(self.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return len(gpu.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        instance = (gpu.instances or [])[index]
        if instance is None:
            raise FakeError(self.NVML_ERROR_NOT_FOUND)
        return instance

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return _value(gpu.memory)

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return _value(gpu.rates)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        return gpu.power

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return _value(gpu.processes)


def _value(value: Any) -> Any:
    if isinstance(value, int):
        raise FakeError(value)
    return value


def nvml_of(library: FakeNvml, *, timeout_s: float = 60.0) -> Nvml:
    return Nvml(BUS_ID, load=lambda: library, process_id=PID, timeout_s=timeout_s)


def figures_of(gpu: FakeGpu) -> GpuFigures | None:
    return nvml_of(FakeNvml({"0000:01:00.0": FakeGpu("GPU-0"), BUS_ID: gpu})).figures()


def test_figures_are_of_the_gpu_at_the_bus_id_and_in_base_units() -> None:
    processes = [Process(1, 7), Process(PID, 500 * MIB)]
    assert figures_of(FakeGpu(processes=processes)) == GpuFigures(
        uuid="GPU-1",
        total_bytes=1000 * MIB,
        used_bytes=600 * MIB,
        process_bytes=500 * MIB,
        utilization=0.37,
        power_watts=250.0,
        power_limit_watts=700.0,
    )


@pytest.mark.parametrize("code", [3, 4, 13])
def test_what_the_driver_does_not_say_is_left_out(code: int) -> None:
    figures = figures_of(FakeGpu(memory=code, rates=code, processes=code))
    assert figures is not None
    assert figures.total_bytes is figures.used_bytes is figures.process_bytes is None
    assert figures.utilization is None
    assert figures.power_watts == 250.0


def test_a_mig_device_that_is_alone_is_the_gpu() -> None:
    instance = FakeGpu("MIG-7", memory=Memory(100 * MIB, 60 * MIB), rates=3)
    figures = figures_of(FakeGpu(instances=[None, instance, None]))
    assert figures is not None
    assert (figures.uuid, figures.total_bytes) == ("MIG-7", 100 * MIB)
    assert figures.utilization is None


def test_of_several_mig_devices_none_is_guessed(caplog: pytest.LogCaptureFixture) -> None:
    assert figures_of(FakeGpu(instances=[FakeGpu("MIG-1"), FakeGpu("MIG-2")])) is None
    assert "divided into 2 MIG devices" in caplog.text


def missing_package() -> Any:
    raise ModuleNotFoundError("No module named 'pynvml'")


def unopened_library() -> Any:
    library = FakeNvml({})

    def fail() -> None:
        raise FakeError(12)

    library.nvmlInit = fail  # type: ignore[method-assign]
    return library


@pytest.mark.parametrize("load", [missing_package, unopened_library])
def test_missing_nvml_is_one_line_in_the_log(
    load: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Nvml(BUS_ID, load=load, timeout_s=60.0)
    assert [nvml.figures() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info is None


def test_a_gpu_that_is_lost_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeNvml({BUS_ID: FakeGpu()})
    nvml = nvml_of(library)
    assert nvml.figures() is not None
    library.fault = library.NVML_ERROR_GPU_IS_LOST
    assert nvml.figures() is nvml.figures() is None
    assert len(caplog.records) == 1
    library.fault = None
    assert nvml.figures() is not None
    library.fault = library.NVML_ERROR_GPU_IS_LOST
    assert nvml.figures() is None
    assert len(caplog.records) == 2
    assert library.num_inits == 1


def test_a_fault_that_nobody_expects_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nvml = nvml_of(FakeNvml({}))  # no such bus id: KeyError
    assert nvml.figures() is nvml.figures() is None
    (record,) = caplog.records
    assert record.exc_info is not None


def test_nobody_waits_twice_for_a_driver_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeNvml({BUS_ID: FakeGpu()})
    nvml = nvml_of(library, timeout_s=0.01)
    library.gate.clear()
    before = set(threading.enumerate())
    assert [nvml.figures() for _ in range(5)] == [None] * 5
    (thread,) = set(threading.enumerate()) - before
    assert len(caplog.records) == 1
    library.gate.set()
    thread.join(60)
    assert nvml_of(library).figures() is not None


def test_only_the_first_scrape_waits_for_a_driver_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_s: list[float | None] = []
    result = Future.result

    def noted(self: Future[Any], timeout: float | None = None) -> Any:
        waits_s.append(timeout)
        return result(self, 0)

    monkeypatch.setattr(Future, "result", noted)
    library = FakeNvml({BUS_ID: FakeGpu()})
    nvml = nvml_of(library, timeout_s=1.0)
    library.gate.clear()
    before = set(threading.enumerate())
    assert [nvml.figures() for _ in range(3)] == [None] * 3
    assert waits_s == [1.0, 0.0, 0.0]
    (thread,) = set(threading.enumerate()) - before
    library.gate.set()
    thread.join(60)
    nvml.figures()
    assert waits_s[-1] == 1.0  # it is back


# ---- memory by use

CHARGES = {
    "slab of 64 B slots": 100 * MIB,
    "slab of 512 B slots": 50 * MIB,
    "model:ranker:1": 30 * MIB,
    "plans": 5 * MIB,
    "inputs": 15 * MIB,
}
HELD = {"slab": 150 * MIB, "weights": 30 * MIB, "buffers": 20 * MIB}


def test_memory_that_the_process_has_beyond_the_ledger_is_workspace() -> None:
    figures = GpuFigures("GPU-1", 1000 * MIB, 600 * MIB, 500 * MIB)
    assert memory_by_use(CHARGES, figures) == HELD | {"workspace": 300 * MIB, "others": 100 * MIB}


@pytest.mark.parametrize("process_bytes", [None, 0, 60 * MIB])
def test_where_the_process_is_not_found_the_rest_is_not_divided(process_bytes: int | None) -> None:
    figures = GpuFigures("GPU-1", 1000 * MIB, 600 * MIB, process_bytes)
    assert memory_by_use(CHARGES, figures) == HELD | {"unattributed": 400 * MIB}


def test_without_a_figure_of_the_whole_there_is_only_the_ledger() -> None:
    assert memory_by_use(CHARGES, GpuFigures("MIG-1")) == HELD


def test_weights_smaller_than_their_file_make_no_negative_workspace() -> None:
    figures = GpuFigures("GPU-1", 1000 * MIB, 185 * MIB, 180 * MIB)
    assert memory_by_use(CHARGES, figures) == HELD | {"workspace": 0, "others": 5 * MIB}


# ---- /metrics


def metrics(gpu: Nvml | None) -> str:
    budget = Budget("device memory", 1000 * MIB)
    for owner, num_bytes in CHARGES.items():
        budget.charge(owner, num_bytes)
    return Metrics(FeatureCache((), 1), {"device": budget}, gpu).render([]).decode()


def test_metrics_of_a_gpu() -> None:
    gpu = FakeGpu(processes=[Process(PID, 500 * MIB)])
    lines = metrics(nvml_of(FakeNvml({BUS_ID: gpu}))).splitlines()
    assert 'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.37' in lines
    assert f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-1"}} {1000 * MIB}' in lines
    assert f'nv_gpu_memory_used_bytes{{gpu_uuid="GPU-1"}} {600 * MIB}' in lines
    assert 'nv_gpu_power_usage{gpu_uuid="GPU-1"} 250.0' in lines
    assert 'nv_gpu_power_limit{gpu_uuid="GPU-1"} 700.0' in lines
    by_use = [line for line in lines if line.startswith("hotshelf_gpu_memory_bytes{")]
    assert sum(int(line.split()[-1]) for line in by_use) == 600 * MIB
    assert f'hotshelf_gpu_memory_bytes{{gpu_uuid="GPU-1",use="slab"}} {150 * MIB}' in by_use


@pytest.mark.parametrize("gpu", [None, Nvml(BUS_ID, load=missing_package)])
def test_metrics_without_a_gpu_or_nvml_have_no_figures_and_do_not_fail(gpu: Nvml | None) -> None:
    text = metrics(gpu)
    assert "gpu_uuid" not in text
    assert "hotshelf_budget_bytes" in text
