"""Texts of errors around torch, in one line."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_NAMED = 5


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more if names else "none"


def one_line(error: BaseException) -> str:
    """The whole text of an error."""
    return " ".join(str(error).split())


def reason(error: BaseException) -> str:
    """The kind of an error and the first line of its text; torch puts hints and stacks below."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
