"""What the operator sees at the start: device, budgets, models, tables and URL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cache import Device, FeatureCache
from server.model_manager import IndexEntry
from server.settings import Settings, format_size


def banner(
    settings: Settings,
    device: Device,
    features: FeatureCache,
    models: Iterable[IndexEntry],
    url: str,
    max_table_bytes: int,
) -> str:
    """The text of the banner; the models that are not ready have their reasons."""
    rows = [
        ("device", [device.name]),
        ("budgets", _budgets(settings, device, max_table_bytes)),
        ("models", [_model(entry) for entry in models] or ["none"]),
        ("tables", _tables(features) or ["none"]),
        ("url", [f"{url}  (docs: {url}/docs, metrics: {url}/metrics)"]),
    ]
    lines = ["Hotshelf"]
    for name, values in rows:
        for number, value in enumerate(values):
            lines.append(f"  {name if number == 0 else '':8}{value}")
    return "\n".join(lines)


def serving_fields(
    settings: Settings,
    device: Device,
    features: FeatureCache,
    models: Iterable[IndexEntry],
    url: str,
    max_table_bytes: int,
) -> dict[str, Any]:
    """What the banner says, as the fields of a log line."""
    return {
        "device": device.name,
        "budgets": {
            "device": {
                "max_bytes": device.max_bytes,
                "reserve": settings.reserve,
                "max_table_bytes": max_table_bytes,
                "used_bytes": device.budget.used_bytes,
            },
            "host": {
                "max_bytes": settings.host_memory,
                "used_bytes": device.host_budget.used_bytes,
            },
        },
        "models": {f"{entry.name}:{entry.version}": entry.state for entry in models},
        "tables": [
            {
                "names": slab.tables,
                "num_rows": sum(features.tables[name].num_rows for name in slab.tables),
                "device_slots": slab.device_slots,
                "host_slots": slab.host_slots,
                "host_tier": slab.mode,
            }
            for slab in features.stats().slabs
        ],
        "url": url,
    }


def _budgets(settings: Settings, device: Device, max_table_bytes: int) -> list[str]:
    used = format_size(device.budget.used_bytes)
    host_used = format_size(device.host_budget.used_bytes)
    return [
        f"device {format_size(device.max_bytes)}, of it {settings.reserve:.0%} in reserve, "
        f"tables up to {format_size(max_table_bytes)}; {used} used",
        f"host {format_size(settings.host_memory)}; {host_used} used",
    ]


def _model(entry: IndexEntry) -> str:
    name = f"{entry.name}:{entry.version}" if entry.version else entry.name
    return f"{name}  {entry.state}" + (f"  ({entry.reason})" if entry.reason else "")


def _tables(features: FeatureCache) -> list[str]:
    """One line a slab: its tables, and where their rows are kept."""
    lines = []
    for slab in features.stats().slabs:
        tables = [features.tables[name] for name in slab.tables]
        names = ", ".join(slab.tables[:3]) + (", ..." if len(tables) > 3 else "")
        num_rows = sum(table.num_rows for table in tables)
        dims = sorted({table.dim for table in tables})
        lines.append(
            f"{len(tables)} of dim {', '.join(map(str, dims))} ({names}): {num_rows:,} rows, "
            f"{slab.device_slots:,} fit on the device, host tier {slab.mode}"
            + (f" of {slab.host_slots:,}" if slab.host_slots else "")
        )
    return lines
