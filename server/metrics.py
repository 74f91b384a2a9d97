"""The metrics in Prometheus' text format, made at scrape time from snapshots of the counters.

Triton's names are used where the meaning is the same. They are written here and not by
prometheus_client, which would end the names of Triton's counters with `_total`.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from cache import Budget, FeatureCache
from server.model_manager import ServedModel
from server.nvml import GpuFigures, Nvml, memory_by_use
from server.statistics import HISTOGRAMS, StatisticsSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Family:
    """One metric with its samples; `kind` is counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)

    def add(self, value: float, /, **labels: str) -> None:
        """Adds the sample of one set of labels."""
        self.samples.append((self.name, tuple(labels.items()), value))

    def add_histogram(
        self, buckets: Iterable[tuple[float, int]], total: float, /, **labels: str
    ) -> None:
        """Adds the samples of a histogram: cumulative counts by upper bound, and the sum."""
        count = 0
        for bound, count in buckets:
            le = "+Inf" if math.isinf(bound) else f"{bound:g}"
            self.samples.append((f"{self.name}_bucket", (*labels.items(), ("le", le)), count))
        self.samples.append((f"{self.name}_sum", tuple(labels.items()), total))
        self.samples.append((f"{self.name}_count", tuple(labels.items()), count))

    def lines(self) -> Iterator[str]:
        """The lines of the text format."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for name, labels, value in self.samples:
            text = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
            yield f"{name}{{{text}}} {value!r}" if text else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# Name, kind, help, and where a model's snapshot has the value.
_MODEL_FAMILIES = (
    ("nv_inference_request_success", "counter", "Requests that were answered.", "num_success"),
    ("nv_inference_count", "counter", "Rows of answered requests.", "num_rows"),
    ("nv_inference_exec_count", "counter", "Runs of the model (batches).", "num_executions"),
    ("nv_inference_pending_request_count", "gauge", "Requests in the queue.", "num_pending"),
    (
        "nv_inference_request_duration_us", "counter",
        "Time of answered requests, from decoded to encoded.", "request.ns",
    ),
    (
        "nv_inference_queue_duration_us", "counter",
        "Time in the queue, and in a batch that waits for a frame or for its turn.", "queue.ns",
    ),
    (
        "nv_inference_compute_input_duration_us", "counter",
        "Time of joining inputs and looking up feature rows.", "compute_input.ns",
    ),
    (
        "nv_inference_compute_infer_duration_us", "counter",
        "Time of running the model.", "compute_infer.ns",
    ),
    (
        "nv_inference_compute_output_duration_us", "counter",
        "Time of checking and splitting outputs.", "compute_output.ns",
    ),
)  # fmt: skip

# Name, help, and where a reading has the value.
_GPU_FAMILIES = (
    ("nv_gpu_utilization", "Share of the time that the GPU worked, 0 to 1.", "utilization"),
    ("nv_gpu_memory_total_bytes", "Memory of the GPU.", "total_bytes"),
    ("nv_gpu_memory_used_bytes", "Memory that all processes use.", "used_bytes"),
    ("nv_gpu_power_usage", "Power that the GPU draws, in watts.", "power_watts"),
    ("nv_gpu_power_limit", "Power that the GPU may draw, in watts.", "power_limit_watts"),
)

_HISTOGRAM_HELP = {
    "request": "Time of an answered request, from decoded to encoded.",
    "queue": "Time in the queue, and in a batch that waits for a frame or for its turn.",
    "lookup": "Time of the feature lookup of the request's batch.",
    "compute": "Time of the model's run of the request's batch.",
    "encode": "Time of encoding the response.",
}


class Metrics:
    """Writes all metrics; may be called by any thread. Budgets go by the label `budget`.

    `gpu` is the GPU whose memory the budget `device` is, None where the device is no GPU.
    """

    def __init__(
        self, features: FeatureCache, budgets: Mapping[str, Budget], gpu: Nvml | None = None
    ) -> None:
        self._features = features
        self._budgets = budgets
        self._gpu = gpu
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def render(self, served: Iterable[ServedModel]) -> bytes:
        """The text of a scrape."""
        snapshots = [
            (one.model.name, one.model.version, one.statistics.snapshot()) for one in served
        ]
        families = [
            *_model_families(snapshots),
            *_table_families(self._features),
            *_budget_families(self._budgets),
            *self._gpu_families(),
            _page_faults(),
        ]
        text = "".join(f"{line}\n" for family in families for line in family.lines())
        return text.encode() + generate_latest(self._process)

    def _gpu_families(self) -> Iterator[Family]:
        figures = None if self._gpu is None else self._gpu.figures()
        uses = Family("hotshelf_gpu_memory_bytes", "gauge", "Memory of the GPU, by use.")
        if figures is not None:
            charges = self._budgets["device"].charges()
            for use, num_bytes in memory_by_use(charges, figures).items():
                uses.add(num_bytes, gpu_uuid=figures.uuid, use=use)
        yield from _nvml_families(figures)
        yield uses


def _model_families(snapshots: Iterable[tuple[str, str, StatisticsSnapshot]]) -> Iterator[Family]:
    snapshots = list(snapshots)
    for name, kind, help, attribute in _MODEL_FAMILIES:
        family = Family(name, kind, help)
        for model, version, snapshot in snapshots:
            value = attrgetter(attribute)(snapshot)
            family.add(
                value / 1000 if name.endswith("_us") else value, model=model, version=version
            )
        yield family
    failures = Family(
        "nv_inference_request_failure", "counter",
        "Requests that failed, by reason: REJECTED, TIMEOUT, CANCELED, BACKEND, OTHER.",
    )  # fmt: skip
    for model, version, snapshot in snapshots:
        for reason, num_failed in snapshot.reason_to_num_failed.items():
            failures.add(num_failed, model=model, version=version, reason=reason)
    yield failures
    for part in HISTOGRAMS:
        family = Family(f"hotshelf_{part}_seconds", "histogram", _HISTOGRAM_HELP[part])
        for model, version, snapshot in snapshots:
            histogram = snapshot.histograms[part]
            family.add_histogram(histogram.buckets, histogram.sum_s, model=model, version=version)
        yield family


def _table_families(features: FeatureCache) -> Iterator[Family]:
    stats = features.stats()
    lookups = Family(
        "hotshelf_table_lookups_total", "counter", "Keys looked up, by the tier that had the row."
    )
    misses = Family("hotshelf_table_misses_total", "counter", "Keys that a tier did not have.")
    evictions = Family(
        "hotshelf_table_evictions_total", "counter", "Rows that left a tier to make room."
    )
    spills = Family(
        "hotshelf_table_spills_total", "counter", "Rows moved from the device to the host tier."
    )
    rows = Family("hotshelf_table_rows", "gauge", "Rows that are in a tier now.")
    for table in stats.tables:
        tiers = {
            "device": table.device_hits,
            "host": table.host_hits,
            "source": table.source_rows,
            "absent": table.absent_keys,
        }
        for tier, num_keys in tiers.items():
            lookups.add(num_keys, table=table.name, tier=tier)
        misses.add(table.host_hits + table.source_rows, table=table.name, tier="device")
        misses.add(table.source_rows, table=table.name, tier="host")
        evictions.add(table.device_evictions, table=table.name, tier="device")
        evictions.add(table.host_evictions, table=table.name, tier="host")
        spills.add(table.spills, table=table.name)
        rows.add(table.device_rows, table=table.name, tier="device")
        rows.add(table.host_rows, table=table.name, tier="host")
        rows.add(table.num_rows, table=table.name, tier="source")
    slots = Family("hotshelf_slab_slots", "gauge", "Slots of a slab, by tier.")
    leases = Family("hotshelf_slab_leases", "gauge", "Leases of lookups on the slots of a slab.")
    for slab in stats.slabs:
        slots.add(slab.device_slots, slot_bytes=str(slab.slot_bytes), tier="device")
        slots.add(slab.host_slots, slot_bytes=str(slab.slot_bytes), tier="host")
        leases.add(slab.leases, slot_bytes=str(slab.slot_bytes))
    yield from (lookups, misses, evictions, spills, rows, slots, leases)


def _budget_families(budgets: Mapping[str, Budget]) -> Iterator[Family]:
    sizes = Family("hotshelf_budget_bytes", "gauge", "Size of a memory budget.")
    used = Family("hotshelf_budget_used_bytes", "gauge", "Bytes of a memory budget that are used.")
    charges = Family("hotshelf_budget_charge_bytes", "gauge", "Bytes of a budget, by their owner.")
    for name, budget in budgets.items():
        owners = budget.charges()
        sizes.add(budget.max_bytes, budget=name)
        used.add(sum(owners.values()), budget=name)
        for owner, num_bytes in owners.items():
            charges.add(num_bytes, budget=name, owner=owner)
    yield from (sizes, used, charges)


def _nvml_families(figures: GpuFigures | None) -> Iterator[Family]:
    for name, help, attribute in _GPU_FAMILIES:
        family = Family(name, "gauge", help)
        value = None if figures is None else getattr(figures, attribute)
        if figures is not None and value is not None:
            family.add(value, gpu_uuid=figures.uuid)
        yield family


def _page_faults() -> Family:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    family = Family("hotshelf_page_faults_total", "counter", "Page faults of the process.")
    family.add(usage.ru_majflt, kind="major")
    family.add(usage.ru_minflt, kind="minor")
    return family
