"""Figures of the GPU from the driver's management library (NVML), read when metrics are scraped."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """One reading; None is what NVML does not say, as for parts of a MIG device.

    Memory is of all processes, `process_bytes` of this one; `utilization` is from 0 to 1.
    """

    uuid: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    process_bytes: int | None = None
    utilization: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None


class _NoFiguresError(Exception):
    """The GPU cannot be found in NVML; the text says why."""


class Nvml:
    """The figures of the GPU at one PCI bus id. Thread-safe.

    NVML counts devices otherwise than CUDA does (`CUDA_VISIBLE_DEVICES`), so the bus id names the
    GPU. A call of a driver in trouble may never return: readings run in a thread of their own, and
    nobody waits for one longer than `timeout_s`.
    """

    def __init__(
        self,
        pci_bus_id: str,
        *,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
        process_id: int | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        self._pci_bus_id = pci_bus_id
        self._load = load
        self._process_id = os.getpid() if process_id is None else process_id
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._library: Any = None
        self._reading: Future[GpuFigures | None] | None = None
        self._is_late = False
        self._last_fault = ""

    def figures(self) -> GpuFigures | None:
        """A new reading, or None where there is none in time; a fault is logged once."""
        with self._mutex:
            if self._reading is None:
                self._reading = Future()
                # A daemon, since a call that never returns would keep the process alive.
                threading.Thread(
                    target=self._run, args=(self._reading,), name="nvml", daemon=True
                ).start()
            reading = self._reading
            timeout_s = 0.0 if self._is_late else self._timeout_s
        try:
            return reading.result(timeout_s)
        except TimeoutError:
            with self._mutex:
                self._is_late = self._reading is reading
            self._report(f"NVML has not answered within {self._timeout_s:g} s")
            return None

    def _run(self, reading: Future[GpuFigures | None]) -> None:
        figures = None
        try:
            figures = self._read()
        except (ImportError, _NoFiguresError) as error:
            self._report(str(error))
        except Exception as error:
            is_known = self._library is not None and isinstance(error, self._library.NVMLError)
            self._report(f"NVML: {error}", None if is_known else error)
        else:
            self._last_fault = ""
        with self._mutex:
            self._reading = None
            self._is_late = False
        reading.set_result(figures)

    def _report(self, fault: str, unknown: Exception | None = None) -> None:
        if fault != self._last_fault:
            self._last_fault = fault
            logger.warning("/metrics has no figures of the GPU: %s", fault, exc_info=unknown)

    def _read(self) -> GpuFigures:
        nvml = self._initialised()
        gpu = nvml.nvmlDeviceGetHandleByPciBusId(self._pci_bus_id)
        handle = self._instance(nvml, gpu)

        def ask(name: str) -> Any:
            return _ask(nvml, lambda: getattr(nvml, name)(handle))

        memory = ask("nvmlDeviceGetMemoryInfo")
        rates = ask("nvmlDeviceGetUtilizationRates")
        power = ask("nvmlDeviceGetPowerUsage")
        power_limit = ask("nvmlDeviceGetEnforcedPowerLimit")
        return GpuFigures(
            uuid=str(nvml.nvmlDeviceGetUUID(handle)),
            total_bytes=None if memory is None else int(memory.total),
            used_bytes=None if memory is None else int(memory.used),
            process_bytes=self._process_bytes(ask("nvmlDeviceGetComputeRunningProcesses")),
            utilization=None if rates is None else rates.gpu / 100,
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if power_limit is None else power_limit / 1000,
        )

    def _initialised(self) -> Any:
        if self._library is None:
            library = self._load()
            try:
                library.nvmlInit()
            except library.NVMLError as error:
                raise _NoFiguresError(f"NVML cannot be opened: {error}") from error
            self._library = library
        return self._library

    def _instance(self, nvml: Any, gpu: Any) -> Any:
        """The GPU, or the MIG device that is the only one of it that this process sees."""
        mode = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(gpu))
        if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return gpu
        instances = []
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            try:
                instances.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:
                    raise
        if len(instances) != 1:
            raise _NoFiguresError(
                f"GPU {self._pci_bus_id} is divided into {len(instances)} MIG devices, and NVML "
                "does not say which of them is in use"
            )
        return instances[0]

    def _process_bytes(self, processes: Any) -> int | None:
        sizes = [one.usedGpuMemory for one in processes or () if one.pid == self._process_id]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None


def memory_by_use(charges: Mapping[str, int], figures: GpuFigures) -> dict[str, int]:
    """Bytes of the GPU by use, from the ledger of device memory and a reading.

    slab, weights and buffers are what the ledger says. workspace is what this process has beyond
    that (CUDA's context, libraries, activations), others what is not this process's. Both are
    `unattributed` together where NVML does not show this process: in a container the process ids
    of NVML may be those of the host, or come without memory.
    """
    uses = {"slab": 0, "weights": 0, "buffers": 0}
    for owner, num_bytes in charges.items():
        uses[_use_of(owner)] += num_bytes
    if figures.used_bytes is None:
        return uses
    charged = sum(uses.values())
    process_bytes = figures.process_bytes
    # Weights are charged by the size of their file; the rest is memory that the process has.
    if process_bytes is None or process_bytes <= uses["slab"] + uses["buffers"]:
        return uses | {"unattributed": max(0, figures.used_bytes - charged)}
    return uses | {
        "workspace": max(0, process_bytes - charged),
        "others": max(0, figures.used_bytes - process_bytes),
    }


def _use_of(owner: str) -> str:
    if owner.startswith("slab of "):
        return "slab"
    return "weights" if owner.startswith("model:") else "buffers"


def _ask(nvml: Any, call: Callable[[], T]) -> T | None:
    """What the call returns, or None where this GPU, driver or user has no such figure."""
    try:
        return call()
    except nvml.NVMLError as error:
        if error.value not in (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_NO_PERMISSION,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        ):
            raise
        return None
