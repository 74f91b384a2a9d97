"""What the doctor found, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a finding means: nothing to do, something to know, something to mend."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `fix` says what to do."""

    name: str
    value: str
    verdict: Verdict = Verdict.OK
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, and the devices that can serve: `cpu`, `cuda:N`."""

    device: str
    findings: tuple[Finding, ...]
    usable: tuple[str, ...]

    @property
    def can_serve(self) -> bool:
        """Whether the device that was asked for is among them; any will do for `auto`."""
        return bool(self.usable) if self.device == "auto" else self.device in self.usable

    def text(self) -> str:
        """A line a finding, and the fix below it."""
        width = max(len(finding.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.name:{width}}  {finding.verdict:7}  {finding.value}")
            if finding.fix:
                lines.append(f"{'':{width}}           -> {finding.fix}")
        usable = ", ".join(self.usable) or "no device"
        refused = "" if self.can_serve or not self.usable else f", and not on {self.device}"
        return "\n".join([*lines, f"Hotshelf can serve on {usable}{refused}."])

    def as_json(self) -> str:
        """The same for machines."""
        fields = {
            "device": self.device,
            "can_serve": self.can_serve,
            "usable": self.usable,
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(fields, indent=2)
