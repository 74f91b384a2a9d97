"""Types of command-line options; each refuses what cannot be measured and says what is allowed."""

from __future__ import annotations

from argparse import ArgumentTypeError


def number_above_0(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def numbers_above_0(text: str) -> list[float]:
    """Finite numbers above 0 with commas between them."""
    return [number_above_0(part) for part in text.split(",")]


def number_from_0(text: str) -> float:
    """A finite number from 0 up."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"expected a number from 0 up, got {text!r}")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def whole_from_0(text: str) -> int:
    """A whole number from 0 up."""
    if not (text.isascii() and text.isdecimal()):
        raise ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return int(text)


def whole_from_1(text: str) -> int:
    """A whole number from 1 up."""
    value = whole_from_0(text)
    if value == 0:
        raise ArgumentTypeError("expected a whole number from 1 up, got 0")
    return value


def _number(text: str) -> float:
    """The number, NaN where the text is none: it fails every comparison."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
