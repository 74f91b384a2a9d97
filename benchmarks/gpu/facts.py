"""What machine the figures are of."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Beside CuPy, of which `cache.cuda.probe` tells more.
NEEDED = ("numpy", "numba", "pydantic", "yaml", "tqdm", "psutil", "ml_dtypes")
_DISTRIBUTIONS = (
    *("numpy", "numba", "torch", "onnxruntime", "onnxruntime-gpu"),
    *("fastapi", "uvicorn", "pytest"),
)


def missing_packages(names: Sequence[str] = NEEDED) -> list[str]:
    """Those that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def machine_facts(cupy: Any, index: int) -> dict[str, Any]:
    """The GPU, the driver, versions and the commit; `cupy` None is CuPy itself, a package."""
    from cache.cuda import probe

    module = importlib.import_module("cupy") if cupy is None else cupy
    report = probe(module, index)
    info = report.devices[index]
    return {
        "device": f"cuda:{index} {info.name}",
        "is_double": not hasattr(module, "__path__"),
        "compute_capability": ".".join(map(str, info.compute_capability)),
        "total_bytes": info.total_bytes,
        "free_bytes": info.free_bytes,
        "num_multiprocessors": info.num_multiprocessors,
        "driver_cuda_version": report.driver_version,
        "runtime_cuda_version": report.runtime_version,
        "driver": _driver() if cupy is None else None,
        "cupy": report.cupy_version,
        "packages": {name: found for name in _DISTRIBUTIONS if (found := _version(name))},
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "num_cpus": os.cpu_count(),
        "commit": _commit(),
    }


def headline(facts: dict[str, Any]) -> str:
    """One line of them."""
    if facts["is_double"]:
        return f"NOT A GPU: the device object is a double ({facts['device']}); times mean nothing"
    if facts.get("is_quick"):
        return f"{facts['device']}, a quick check: times mean nothing"
    driver = facts["driver"] or f"for CUDA {facts['driver_cuda_version']}"
    return (
        f"{facts['device']}, {facts['total_bytes'] / 1e9:.0f} GB, driver {driver}, "
        f"CuPy {facts['cupy']}, Python {facts['python']}, commit {facts['commit'] or 'unknown'}"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The driver's version, where NVML's package is there."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    pynvml = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else None


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
