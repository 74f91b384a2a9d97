"""What `hotshelf doctor` says of the host: memory, huge pages, NUMA."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.findings import Finding, Verdict
from server.settings import format_size

_NO_LIMIT = 1 << 60  # cgroups write numbers near 2^63 where there is no limit


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The files below `root`, and what the kernel says of this process.

    `memlock` is the soft limit in bytes, `resource.RLIM_INFINITY` for none.
    """

    root: Path = Path("/")
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    affinity: Callable[[], set[int]] = lambda: os.sched_getaffinity(0)

    def read(self, path: str) -> str:
        """The text of a file, empty where it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def memlock_text(host: HostFacts) -> str:
    """The limit of locked memory, in words."""
    limit = host.memlock()
    is_endless = limit == resource.RLIM_INFINITY
    return f"ulimit -l is {'unlimited' if is_endless else format_size(limit)}"


def host_memory(host: HostFacts, needed_bytes: int) -> Finding:
    """What is free of the memory of the machine, or of this process's cgroup."""
    sizes = dict(
        line.split(":", 1) for line in host.read("proc/meminfo").splitlines() if ":" in line
    )
    total, free = (_kib(sizes.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    if total is None or free is None:
        return Finding("host memory", "unknown: /proc/meminfo cannot be read")
    value = f"{format_size(free)} of {format_size(total)} free"
    limits = _cgroup_limits(host)
    if limits:
        limit = min(limit for limit, _ in limits)
        free = min(free, *(max(0, limit - used) for limit, used in limits))
        value += f", cgroup limit {format_size(limit)}: {format_size(free)} are left"
    if free >= needed_bytes:
        return Finding("host memory", value)
    needed = format_size(needed_bytes)
    fix = f"the default of --host-memory is {needed}: give a smaller one, or free memory"
    return Finding("host memory", value, Verdict.NOTE, fix)


def huge_pages(host: HostFacts) -> Finding:
    """The mode of transparent huge pages; the tiers ask for them."""
    modes = host.read("sys/kernel/mm/transparent_hugepage/enabled")
    if "[" not in modes:
        return Finding("huge pages", "unknown: the kernel does not say")
    mode = modes.partition("[")[2].partition("]")[0]
    if mode != "never":
        return Finding("huge pages", f"transparent, {mode}")
    return Finding(
        "huge pages", "transparent, never", Verdict.NOTE,
        "rows are found faster with them: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )  # fmt: skip


def numa(host: HostFacts, pci_bus_id: str | None) -> Finding:
    """The NUMA nodes, and whether this process runs at the one of its GPU."""
    node_to_cpus = {
        node: _numbers(host.read(f"sys/devices/system/node/node{node}/cpulist"))
        for node in sorted(_numbers(host.read("sys/devices/system/node/online")))
    }
    if not node_to_cpus:
        return Finding("numa", "unknown: the kernel does not say")
    allowed = host.affinity()
    nodes = [node for node, cpus in node_to_cpus.items() if cpus & allowed]
    value = f"{_count(len(node_to_cpus), 'node')}, {_count(len(allowed), 'CPU')} for this process"
    if pci_bus_id is None:
        return Finding("numa", value)
    gpu_node = _gpu_node(host, pci_bus_id)
    if gpu_node is None or gpu_node not in node_to_cpus:
        return Finding("numa", f"{value}, the GPU's node is not known")
    value += f", the GPU is at node {gpu_node}"
    if nodes == [gpu_node]:
        return Finding("numa", value)
    return Finding(
        "numa", f"{value}, this process at {', '.join(map(str, nodes)) or 'none'}", Verdict.NOTE,
        "misses are read across the nodes; keep to one: "
        f"numactl --cpunodebind={gpu_node} --membind={gpu_node} hotshelf serve ...",
    )  # fmt: skip


def _gpu_node(host: HostFacts, pci_bus_id: str) -> int | None:
    # The driver writes the domain with 4 or 8 digits and letters of either case.
    domain, _, rest = pci_bus_id.lower().partition(":")
    text = host.read(f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return int(text) if text.isdigit() else None


def _cgroup_limits(host: HostFacts) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of every cgroup above this process that has a limit."""
    limits = []
    for line in host.read("proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            folder = "/".join((mount, *parts[:depth]))
            limit, used = (host.read(f"{folder}/{name}") for name in names)
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                limits.append((int(limit), int(used) if used.isdigit() else 0))
    return limits


def _kib(text: str) -> int | None:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdigit() else None


def _numbers(text: str) -> set[int]:
    """The numbers of a kernel list such as 0-3,8."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
