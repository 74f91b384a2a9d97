"""Requests in order, and which of them leave together."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.pacing import size_class


@dataclass(slots=True, eq=False)
class Queued:
    """A request as the policy sees it; times are in seconds of the caller's clock.

    Only requests with equal `shape_key` share a batch. After `deadline_s` it is never taken.
    """

    num_rows: int
    shape_key: Hashable
    arrived_s: float
    deadline_s: float = math.inf


Item = TypeVar("Item", bound=Queued)


@dataclass(frozen=True, slots=True)
class Take(Generic[Item]):
    """What to do now: run `batch`, or when it is empty, ask again after `wait_s`.

    `wait_s` is None when nothing is queued. `expired` items have left the queue unexecuted.
    """

    batch: list[Item]
    expired: list[Item]
    wait_s: float | None = None


class _Group(OrderedDict[Item, None]):
    """Items of one shape key in order of arrival, and their rows in all."""

    num_rows = 0

    def head(self) -> Item:
        return next(iter(self))


class BatchQueue(Generic[Item]):
    """The batching policy: what runs next, and what it waits for.

    Whole requests leave in order of arrival within one shape key, up to `max_batch_size` rows; one
    that does not fit ends the batch. The oldest head goes first. A batch that is not full waits
    until its head is `max_queue_delay_s` old, and for the time that the caller says; one without
    rows does not wait. With a `max_batch_size` of 0 each request runs alone and at once. It has no
    clock and no lock.
    """

    def __init__(
        self, max_batch_size: int, max_queue_size: int, max_queue_delay_s: float = 0.0
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_queue_size = max_queue_size
        self.max_queue_delay_s = max_queue_delay_s
        self._key_to_group: dict[Hashable, _Group[Item]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __repr__(self) -> str:
        groups = [[item.num_rows for item in group] for group in self._key_to_group.values()]
        return f"BatchQueue(rows={groups})"

    def is_full(self) -> bool:
        """Whether no further request may be added."""
        return self._num_requests >= self.max_queue_size

    def add(self, item: Item) -> bool:
        """Queues a request; returns whether the answer of `take` may have changed by it."""
        assert not self.is_full()
        assert not self.max_batch_size or item.num_rows <= self.max_batch_size
        group = self._key_to_group.setdefault(item.shape_key, _Group())
        old_size = size_class(group.num_rows)
        group[item] = None
        group.num_rows += item.num_rows
        self._num_requests += 1
        has_new_size = size_class(group.num_rows) != old_size  # so `not_before_s` may have changed
        return len(group) == 1 or has_new_size or self._cannot_grow(group)

    def cancel(self, item: Item) -> bool:
        """Takes a request out of the queue; False when it is not (or no longer) queued."""
        group = self._key_to_group.get(item.shape_key)
        if group is None or item not in group:
            return False
        self._remove(group, item)
        return True

    def take(
        self,
        now_s: float,
        *,
        is_draining: bool = False,
        not_before_s: Callable[[int], float] = lambda num_rows: -math.inf,
    ) -> Take[Item]:
        """The next batch, if one is due; with `is_draining` nothing waits for more to come.

        `not_before_s` says, for the rows so far, until when a batch that can grow waits at least.
        It says the same for all rows of one `size_class`.
        """
        expired: list[Item] = []
        while groups := self._key_to_group.values():
            due_s = [self._due_s(group, not_before_s) for group in groups]
            due = [g for g, at_s in zip(groups, due_s, strict=True) if is_draining or at_s <= now_s]
            if not due:
                return Take([], expired, min(due_s) - now_s)
            oldest = min(due, key=lambda group: group.head().arrived_s)
            if batch := self._take_from(oldest, now_s, expired):
                return Take(batch, expired)
        return Take([], expired)

    def _cannot_grow(self, group: _Group[Item]) -> bool:
        # Rows beyond the limit, too, mean that the next request does not fit.
        return group.num_rows >= self.max_batch_size

    def _due_s(self, group: _Group[Item], not_before_s: Callable[[int], float]) -> float:
        if self._cannot_grow(group) or not group.num_rows:
            return -math.inf
        return max(group.head().arrived_s + self.max_queue_delay_s, not_before_s(group.num_rows))

    def _take_from(self, group: _Group[Item], now_s: float, expired: list[Item]) -> list[Item]:
        batch: list[Item] = []
        num_rows = 0
        while group:
            item = group.head()
            is_expired = item.deadline_s <= now_s
            if not is_expired and batch and num_rows + item.num_rows > self.max_batch_size:
                break
            self._remove(group, item)
            if is_expired:
                expired.append(item)
            else:
                batch.append(item)
                num_rows += item.num_rows
        return batch

    def _remove(self, group: _Group[Item], item: Item) -> None:
        del group[item]
        group.num_rows -= item.num_rows
        self._num_requests -= 1
        if not group:
            del self._key_to_group[item.shape_key]
