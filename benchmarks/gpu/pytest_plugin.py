"""A pytest plugin: runs the tests of a real GPU alone, and skips files that need other packages.

A test is of a GPU when one of its parameters is `cuda`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

FOLDERS = ("server", "cache", "models", "loadtests", "tests", "benchmarks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all others."""
    others = [item for item in items if not is_of_gpu(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if is_of_gpu(item)]


def is_of_gpu(item: pytest.Item) -> bool:
    """Whether the test runs on a real GPU."""
    callspec = getattr(item, "callspec", None)
    parameters: list[Any] = [] if callspec is None else list(callspec.params.values())
    return any(isinstance(value, str) and value == "cuda" for value in parameters)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the error of a package that is not installed into a skip with its name."""
    report = yield
    call = getattr(report, "call", None)
    error = None if call is None or call.excinfo is None else call.excinfo.value
    missing = _missing_package(error)
    if report.outcome == "failed" and missing is not None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {missing} is not installed")
    return report


def _missing_package(error: BaseException | None) -> str | None:
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.split(".")[0]
            return None if package in FOLDERS else package
        error = error.__cause__ or error.__context__
    return None
