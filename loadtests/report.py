"""Draws the curves of a sweep and writes one self-contained HTML page."""

from __future__ import annotations

import base64
import html
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from loadtests.machine import describe_machine, describe_versions
from loadtests.noise import Noise
from loadtests.percentiles import METHOD
from loadtests.results import COLUMNS, FAILED, OK, SERIES_TO_LABEL, Row, format_bytes
from loadtests.samples import NUM_WINDOWS

SERIES_TO_COLOR = {"none": "#c2410c", "host": "#1d4ed8"}
SERIES_TO_MARKER = {"none": "o", "host": "s"}

MEASUREMENT = (
    "Arrivals are planned before the run and do not wait for answers (open loop). Latency counts "
    "from the planned send time to the last byte of the answer; when all users of the load "
    "generator are busy, the lateness of the request is part of it. The figures are made from raw "
    "samples, over successes only: other statuses, time-outs and broken connections are errors and "
    "are counted apart. The achieved rate counts successes within the planned duration. A point is "
    "overloaded, and its latency says nothing about lower rates, when the achieved rate is below "
    "95 % of the planned one or the error rate above the threshold. Server and load generator "
    "share this machine."
)


def write_report(
    out: Path, rows: Sequence[Row], noise: Noise, repository: Path, method: Mapping[str, str]
) -> list[Path]:
    """Write the pictures and `report.html` into `out`; returns the pictures."""
    pictures = draw(out, rows, noise)
    title = _headline(rows)
    page = Template(Path(__file__).with_name("report.html").read_text("utf-8")).substitute(
        title=html.escape(title),
        date=time.strftime("%Y-%m-%d %H:%M"),
        pictures="".join(_picture(path, title) for path in pictures),
        noise=html.escape(str(noise)),
        head="".join(f"<th>{html.escape(column.heading)}</th>" for column in COLUMNS),
        rows="".join(_table_row(row) for row in rows),
        num_windows=NUM_WINDOWS,
        facts=_facts(
            {
                **method,
                "percentiles": METHOD,
                **describe_machine(repository),
                "versions": ", ".join(f"{k} {v}" for k, v in describe_versions().items()),
            }
        ),
        measurement=html.escape(MEASUREMENT),
    )
    (out / "report.html").write_text(page, encoding="utf-8")
    return pictures


def draw(out: Path, rows: Sequence[Row], noise: Noise) -> list[Path]:
    """Draw what the rows can show; returns the files."""
    measured = [row for row in rows if row.state != FAILED]
    if not measured:
        return []
    if len({row.rate for row in measured}) > 1:
        path = out / "p99_vs_rate.png"
        _draw_curves(path, measured, noise, lambda row: row.rate, _style_rates)
    else:
        path = out / "p99_vs_cache.png"
        _draw_curves(path, measured, noise, lambda row: row.share_percent, _style_sizes)
    return [path]


def _draw_curves(
    path: Path,
    rows: Sequence[Row],
    noise: Noise,
    x_of: Callable[[Row], float],
    style: Callable[[Any, Sequence[Row]], None],
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), dpi=150, layout="constrained")
    latency, hits = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for series in dict.fromkeys(row.series for row in rows):
        _draw_series(latency, hits, [row for row in rows if row.series == series], x_of)
    latency.axhline(
        noise.p99_ms, color="#6b7280", linewidth=1.2, linestyle=":",
        label=f"machine noise (p99 of a {noise.p50_ms:.1g} ms task)",
    )  # fmt: skip
    _mark_overloaded(latency, [row for row in rows if not row.is_valid], x_of)
    latency.set_ylabel("latency from the planned send time (ms)")
    _set_log_scale(latency, [noise.p99_ms, *(v for row in rows for v in (row.p50_ms, row.p99_ms))])
    hits.set_ylabel("hit rate of the device tier")
    hits.legend(frameon=False, fontsize=9, loc="lower right")
    hits.set_ylim(0, 1.03)
    hits.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axes in (latency, hits):
        axes.grid(True, which="major", color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_headline(rows), x=0.01, ha="left", fontsize=13, fontweight="bold")
    latency.legend(
        frameon=False, fontsize=9, ncols=3, columnspacing=1.2, loc="lower left",
        bbox_to_anchor=(-0.09, 1.0),
    )  # fmt: skip
    style(hits, rows)
    figure.savefig(path)


def _draw_series(
    latency: Any, hits: Any, rows: Sequence[Row], x_of: Callable[[Row], float]
) -> None:
    series = rows[0].series
    color, marker = SERIES_TO_COLOR[series], SERIES_TO_MARKER[series]
    x = [x_of(row) for row in rows]
    label = SERIES_TO_LABEL[series]
    p99, p50 = [row.p99_ms for row in rows], [row.p50_ms for row in rows]
    latency.plot(x, p99, color=color, marker=marker, linewidth=2, label=f"p99, {label}")
    latency.plot(
        *(x, p50), color=color, marker=marker, markersize=4, linewidth=1.2, linestyle="--",
        label=f"p50, {label}",
    )  # fmt: skip
    # The series coincide here where all is well: the first is wide, the second thin on top of it.
    is_wide = series == "none"
    hits.plot(
        *(x, [row.hit_rate_device for row in rows]), color=color, marker=marker,
        markersize=9 if is_wide else 5, linewidth=5 if is_wide else 1.5,
        alpha=0.45 if is_wide else 1, label=label,
    )  # fmt: skip


def _mark_overloaded(axes: Any, rows: Sequence[Row], x_of: Callable[[Row], float]) -> None:
    if rows:
        axes.plot(
            *([x_of(row) for row in rows], [row.p99_ms for row in rows]), color="black", marker="x",
            markersize=12, markeredgewidth=2, linestyle="none", label="overloaded: not valid",
        )  # fmt: skip


def _style_sizes(axes: Any, rows: Sequence[Row]) -> None:
    shares = sorted({row.share_percent for row in rows})
    share_to_bytes = {row.share_percent: row.cache_bytes for row in rows}
    axes.set_xscale("log")
    labels = [f"{share:g} %\n{format_bytes(share_to_bytes[share])}" for share in shares]
    axes.set_xticks(shares, labels)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("device tier: share of all table bytes")


def _style_rates(axes: Any, rows: Sequence[Row]) -> None:
    rates = sorted({row.rate for row in rows})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("planned requests per second")


def _set_log_scale(axes: Any, values: Sequence[float]) -> None:
    """A log scale of y between round numbers, with plain ones at 1, 2 and 5 times powers of ten."""
    round_numbers = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]
    known = [value for value in values if not math.isnan(value)]
    low = max((tick for tick in round_numbers if tick <= min(known)), default=round_numbers[0])
    high = min((tick for tick in round_numbers if tick >= max(known)), default=max(known))
    ticks = [tick for tick in round_numbers if low <= tick <= high]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low * 0.95, high * 1.05)


def _headline(rows: Sequence[Row]) -> str:
    rates = sorted({row.rate for row in rows if row.state != FAILED})
    if len(rates) > 1:
        return (
            f"Latency against throughput, device tier of {rows[0].share_percent:g} % of the tables"
        )
    rate = f" at {rates[0]:g} requests/s" if rates else ""
    return f"Latency against cache size{rate}"


def _picture(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def _table_row(row: Row) -> str:
    kind = "" if row.state == OK else f' class="{row.state}"'
    cells = "".join(f"<td>{html.escape(column.text(row))}</td>" for column in COLUMNS)
    text = f"<tr{kind}>{cells}</tr>\n"
    if row.note:
        note = html.escape(f"{row.state}: {row.note}")
        text += f'<tr class="{row.state} note"><td colspan="{len(COLUMNS)}">{note}</td></tr>\n'
    return text


def _facts(facts: Mapping[str, str]) -> str:
    pairs = (f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>\n" for k, v in facts.items())
    return "".join(pairs)
