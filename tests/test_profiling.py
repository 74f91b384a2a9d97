"""NVTX ranges: nothing while off, closed in order whatever passes through."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cache.device import DeviceError
from cache.profiling import load_nvtx, nvtx_range, use_nvtx


class FakeNvtx:
    """Notes the ranges that are open, and what was."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.calls: list[str] = []

    def RangePush(self, message: str) -> None:  # noqa: N802
        self.open.append(message)
        self.calls.append(f"push {message}")

    def RangePop(self) -> None:  # noqa: N802
        self.calls.append(f"pop {self.open.pop()}")


@pytest.fixture
def nvtx() -> Iterator[FakeNvtx]:
    fake = FakeNvtx()
    use_nvtx(fake)
    yield fake
    use_nvtx(None)


def test_ranges_are_off_by_default_and_cost_no_object() -> None:
    assert nvtx_range("join") is nvtx_range("lookup")
    with nvtx_range("join"):
        pass


def test_ranges_nest(nvtx: FakeNvtx) -> None:
    with nvtx_range("lookup"):
        with nvtx_range("probe"):
            assert nvtx.open == ["lookup", "probe"]
        with nvtx_range("fetch"):
            pass
    assert nvtx.calls == [
        "push lookup", "push probe", "pop probe", "push fetch", "pop fetch", "pop lookup",
    ]  # fmt: skip


def test_an_exception_closes_the_ranges_that_it_passes(nvtx: FakeNvtx) -> None:
    with suppress(ZeroDivisionError), nvtx_range("lookup"), nvtx_range("fetch"):
        raise ZeroDivisionError
    assert nvtx.open == []


def test_a_range_that_is_open_while_ranges_are_turned_off_is_closed(nvtx: FakeNvtx) -> None:
    with nvtx_range("compute"):
        use_nvtx(None)
    assert nvtx.open == []


def test_without_cupy_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", None)
    with pytest.raises(DeviceError, match=r"nvtx: CuPy cannot be imported .* leave nvtx off"):
        load_nvtx()
