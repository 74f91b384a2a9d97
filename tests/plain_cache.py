"""The cache as a few lines of plain Python: the definition that the index must agree with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class PlainCache:
    """Two LRU tiers; with `is_inclusive` the host has every row."""

    num_device_slots: int
    num_host_slots: int
    is_inclusive: bool = False
    device: OrderedDict[int, None] = field(default_factory=OrderedDict)
    host: OrderedDict[int, None] = field(default_factory=OrderedDict)
    hits: dict[str, int] = field(
        default_factory=lambda: {"device": 0, "host": 0, "source": 0, "spills": 0, "evictions": 0}
    )

    def lookup(self, rows: Sequence[int]) -> list[str]:
        """Return the tier that served each position."""
        origin = []
        missing: dict[int, bool] = {}  # row -> whether it comes from the source
        used = set()
        for row in rows:
            if row in self.device:
                self.device.move_to_end(row)
                used.add(row)
                origin.append("device")
            elif row in missing:
                origin.append("device")  # a repeat costs no fetch
            else:
                in_host = self.is_inclusive or row in self.host
                if row in self.host:
                    self.host.move_to_end(row)
                missing[row] = not in_host
                origin.append("host" if in_host else "source")
        for tier in origin:
            self.hits[tier] += 1
        for row, is_fetched in missing.items():
            self._admit(row, is_fetched, used)
        return origin

    def _admit(self, row: int, is_fetched: bool, used: set[int]) -> None:
        victim = None
        if len(self.device) == self.num_device_slots:
            victim = next((entry for entry in self.device if entry not in used), None)
            if victim is None:
                if is_fetched:
                    self._enter_host(row)
                return
        self.host.pop(row, None)
        if victim is not None:
            del self.device[victim]
            self.hits["evictions"] += 1
            if not self.is_inclusive and self.num_host_slots:
                self.hits["spills"] += 1
                self._enter_host(victim)
        self.device[row] = None
        used.add(row)

    def _enter_host(self, row: int) -> None:
        if self.is_inclusive or self.num_host_slots == 0:
            return
        if len(self.host) == self.num_host_slots:
            self.host.popitem(last=False)
        self.host[row] = None
