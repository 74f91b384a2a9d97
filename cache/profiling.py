"""NVTX ranges: the stages of a batch by name in a profiler such as Nsight Systems."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from cache.device import DeviceError

_NO_RANGE = nullcontext()
# Of the whole process, like the profiler that looks at it.
_nvtx: Any = None


def nvtx_range(name: str) -> AbstractContextManager[None]:
    """A range of this thread around a `with` block; nothing at all while ranges are off.

    Ranges nest. One that an exception passes through is closed.
    """
    return _NO_RANGE if _nvtx is None else _NvtxRange(_nvtx, name)


def use_nvtx(nvtx: Any) -> None:
    """Turn ranges on, with a module that has `RangePush` and `RangePop`, or off, with None."""
    global _nvtx
    _nvtx = nvtx


def load_nvtx() -> Any:
    """CuPy's module of NVTX; it needs no GPU. Raises `DeviceError`."""
    try:
        return importlib.import_module("cupy.cuda.nvtx")
    except ImportError as error:
        raise DeviceError(
            f"nvtx: CuPy cannot be imported ({error}); install it with: "
            "pip install -c constraints.txt cupy-cuda13x, or leave nvtx off"
        ) from error


class _NvtxRange:
    def __init__(self, nvtx: Any, name: str) -> None:
        self._nvtx = nvtx
        self._name = name

    def __enter__(self) -> None:
        self._nvtx.RangePush(self._name)

    def __exit__(self, *_: object) -> None:
        self._nvtx.RangePop()
