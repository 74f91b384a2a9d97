"""Compiled functions: Numba with the GIL released and a compile cache that can be written."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _sources_digest() -> str:
    """Numba looks only at the file of the compiled function, not at those it calls into."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> str:
    """A folder of this version that can be written.

    It is in NUMBA_CACHE_DIR, else in the user's cache. Where that cannot be written, as in an image
    with a read-only file system, a temporary copy serves: Numba raises at import of a `cache=True`
    function when it finds no folder to write to.
    """
    digest = _sources_digest()
    folder = _base_folder()
    if folder.name != digest:  # else a parent process has put it there
        folder /= digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError:
        copy = tempfile.mkdtemp(prefix="hotshelf-numba-")
        if folder.is_dir():
            shutil.copytree(folder, copy, dirs_exist_ok=True)
        return copy


def _base_folder() -> Path:
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named)
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(user_cache) / "hotshelf" / "numba"


os.environ["NUMBA_CACHE_DIR"] = _cache_folder()

import numba  # noqa: E402 (the folder must be known before the import)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call, cached on disk; it runs without the GIL.

    Integer division and array indices are as in Python, without bounds checks: callers pass
    arrays that fit.
    """
    jitted: Callable[P, R] = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return jitted


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, and put in the place of each call: for what is called once a key.

    A call hands over each array as seven values, which can cost more than the work.
    """
    jitted: Callable[P, R] = numba.njit(
        nogil=True, cache=True, error_model="numpy", inline="always"
    )(function)
    return jitted


def c_function(name: str, returns: str, *arguments: str) -> Any:
    """A function of the C library for compiled code, by the names of Numba's types.

    It is found by name when the code is loaded, so that callers can be cached on disk.
    """
    types: Any = numba.types
    signature = getattr(types, returns)(*(getattr(types, argument) for argument in arguments))
    return types.ExternalFunction(name, signature)
