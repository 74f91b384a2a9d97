"""What a report must say about the machine and the versions it was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil

PACKAGES = ("hotshelf", "numpy", "numba", "onnxruntime", "fastapi", "uvicorn", "locust", "gevent")


def describe_machine(repository: Path) -> dict[str, str]:
    """Processor, cores, memory, system, and the file system that holds `repository`."""
    return {
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
        if hasattr(os, "sched_getaffinity")
        else str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "repository on": _file_system(repository),
    }


def describe_versions() -> dict[str, str]:
    """Python and the packages that matter for the figures."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(path: Path) -> str:
    mounts = psutil.disk_partitions(all=True)
    inside = [m for m in mounts if path.resolve().is_relative_to(m.mountpoint)]
    if not inside:
        return "unknown"
    mount = max(inside, key=lambda m: len(m.mountpoint))
    return f"{mount.fstype} ({mount.device})"
