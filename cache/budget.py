"""A ledger of memory: who holds how many bytes of one budget."""

from __future__ import annotations

import threading

from cache.errors import OutOfMemoryError


class Budget:
    """At most `max_bytes`, charged by named owners. Thread-safe, never blocks for long."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self._owner_to_bytes: dict[str, int] = {}
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"<Budget {self.name!r} used={self.used_bytes} of {self.max_bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        """The sum of all charges."""
        with self._mutex:
            return sum(self._owner_to_bytes.values())

    def charges(self) -> dict[str, int]:
        """A copy of the ledger: owner to bytes."""
        with self._mutex:
            return dict(self._owner_to_bytes)

    def charge(self, owner: str, num_bytes: int) -> None:
        """Add `num_bytes` to the owner's charge; raise `OutOfMemoryError` where they do not fit."""
        assert num_bytes >= 0
        with self._mutex:
            free = self.max_bytes - sum(self._owner_to_bytes.values())
            if num_bytes > free:
                raise OutOfMemoryError(
                    f"{owner} needs {num_bytes} bytes of {self.name}, "
                    f"free are {free} of {self.max_bytes}"
                )
            self._owner_to_bytes[owner] = self._owner_to_bytes.get(owner, 0) + num_bytes

    def make_room(self, num_bytes: int) -> None:
        """Raise the limit so that `num_bytes` fit: for what is needed whatever the limit is."""
        with self._mutex:
            used_bytes = sum(self._owner_to_bytes.values())
            self.max_bytes = max(self.max_bytes, used_bytes + num_bytes)

    def discharge(self, owner: str, num_bytes: int) -> None:
        """Take `num_bytes` off the owner's charge."""
        with self._mutex:
            left = self._owner_to_bytes[owner] - num_bytes
            assert left >= 0, f"{owner} gave back more than it was charged"
            self._owner_to_bytes[owner] = left
            if left == 0:
                del self._owner_to_bytes[owner]
