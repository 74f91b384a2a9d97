"""What a check has found: figures, notes and failures, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["met", "missed", "reported"]


@dataclass(frozen=True, slots=True)
class Aim:
    """What the ratio of a figure to its ceiling should be."""

    is_at_least: bool
    ratio: float

    def __str__(self) -> str:
        return f"{'>=' if self.is_at_least else '<='} {self.ratio:.2f}"

    def is_met_by(self, ratio: float) -> bool:
        """Whether a ratio is on the right side."""
        return ratio >= self.ratio if self.is_at_least else ratio <= self.ratio


@dataclass(frozen=True, slots=True)
class Figure:
    """A median of one run, with its 10th and 90th percentile.

    `ceiling` is what the same run measured for `ceiling_is`, in the same unit. `ratio` is the
    median of the ratios of the rounds, in which the two took turns.
    """

    what: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    ceiling: float | None = None
    ceiling_is: str = ""
    ratio: float | None = None
    aim: Aim | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Whether the aim is met; `reported` where there is none."""
        if self.aim is None or self.ratio is None:
            return "reported"
        return "met" if self.aim.is_met_by(self.ratio) else "missed"

    def as_json(self) -> dict[str, Any]:
        """Its fields, with the verdict; the aim as text."""
        aim = None if self.aim is None else str(self.aim)
        return asdict(self) | {"aim": aim, "verdict": self.verdict}


@dataclass(slots=True)
class PartReport:
    """What one part has found. `skipped` says why it found nothing, `failure` what went wrong."""

    name: str
    figures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None
    failure: str | None = None
    seconds: float = 0.0

    def add_line(self, line: dict[str, Any]) -> None:
        """Take in a line of a results file."""
        for kind, content in line.items():
            if kind == "figure":
                self.figures.append(content)
            elif kind == "note":
                self.notes.append(content)
            elif kind == "skipped":
                self.skipped = content
            else:
                assert kind == "failure", kind
                self.failure = content


class ResultsFile:
    """Lines of JSON, written one by one, so that a part that is stopped leaves what it had."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: Literal["figure", "note", "skipped", "failure"], content: Any) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: content}) + "\n")

    def read_into(self, report: PartReport) -> None:
        """Add all lines to the report; a last line that was cut off is left out."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                report.add_line(json.loads(line))


_HEADINGS = ("what", "figure", "p10 to p90", "ceiling", "ratio", "aim", "verdict")


def table(parts: Iterable[PartReport]) -> str:
    """The figures of all parts, one a line, under headings; then what was skipped or failed."""
    parts = list(parts)
    rows = [_HEADINGS, *(_row(figure) for part in parts for figure in part.figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines += [f"note ({part.name}): {note}" for part in parts for note in part.notes]
    lines += [f"skipped ({part.name}): {part.skipped}" for part in parts if part.skipped]
    lines += [f"FAILED ({part.name}): {part.failure}" for part in parts if part.failure]
    return "\n".join(lines)


def summary(parts: Sequence[PartReport]) -> str:
    """One line that counts."""
    verdicts = [figure["verdict"] for part in parts for figure in part.figures]
    failed = [part.name for part in parts if part.failure]
    text = f"aims: {verdicts.count('met')} met, {verdicts.count('missed')} missed; failed parts: "
    return text + (", ".join(failed) or "none")


def _row(figure: dict[str, Any]) -> tuple[str, ...]:
    has_ceiling = figure["ceiling"] is not None
    spread = figure["low"] is not None
    return (
        figure["what"],
        f"{_number(figure['value'])} {figure['unit']}",
        f"{_number(figure['low'])} to {_number(figure['high'])}" if spread else "",
        f"{_number(figure['ceiling'])} ({figure['ceiling_is']})" if has_ceiling else "",
        "" if figure["ratio"] is None else f"{figure['ratio']:.2f}",
        figure["aim"] or "",
        figure["verdict"],
    )


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
