"""The kernels of `cache/kernels.cu`, compiled for the CPU: what a GPU would compute, without one.

    shim = load_shim(is_debug=True)
    shim.launch("execute_float32", grid, BLOCK_THREADS, arguments, seed=1)

`load_shim` compiles the very source file with g++ and `cuda_shim.h`, once for each state of the
sources; the library is kept in the temporary folder. `launch` runs all threads of the grid in the
calling thread, in an order shuffled by `seed`, and returns when they are done. `arguments` are the
kernel's `NUM_ARGUMENTS` parameters in their order, as integers; addresses are those of host memory,
slots at multiples of 16 bytes. `KernelTrap` is raised where a check of the debug build fails; what
other threads wrote before that stays. Launches may run at once in several Python threads; the GIL
is released. `shim_problem` says why there is no shim here, for a skip.

With `sanitize` the code is built with AddressSanitizer, and the process must have been started with
its library preloaded; see `sanitizer_environment`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

NUM_ARGUMENTS = 16
_KERNELS = Path(__file__).resolve().parents[2] / "cache" / "kernels.cu"
_HEADER = Path(__file__).with_name("cuda_shim.h")
_COMPILER = "g++"
_OPTIONS = (
    "-x", "c++", "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror",
    "-Wno-unknown-pragmas", "-shared", "-fPIC",
)  # fmt: skip


class KernelTrap(Exception):  # noqa: N818 (the word of CUDA)
    """A thread found that the plan breaks the rules of `cache.plan.Plan`."""


class Shim:
    """The kernels of one build."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._launch = self._library.shim_launch
        self._launch.restype = ctypes.c_int
        self._launch.argtypes = [
            ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64,
        ]  # fmt: skip

    def launch(
        self, kernel_name: str, grid: int, block: int, args: Sequence[int], seed: int
    ) -> None:
        """Run `grid` blocks of `block` threads; blocks. Raises `KernelTrap`.

        Raises `AttributeError` where there is no kernel of that name.
        """
        assert len(args) == NUM_ARGUMENTS, f"{len(args)} arguments, not {NUM_ARGUMENTS}"
        kernel = ctypes.cast(getattr(self._library, kernel_name), ctypes.c_void_p)
        words = (ctypes.c_int64 * NUM_ARGUMENTS)(*map(int, args))
        if self._launch(kernel, grid, block, words, seed):
            raise KernelTrap(kernel_name)


def shim_problem() -> str | None:
    """Why the kernels cannot be compiled here; None where they can."""
    return None if shutil.which(_COMPILER) else f"there is no {_COMPILER}"


@functools.cache
def load_shim(is_debug: bool, sanitize: bool = False) -> Shim:
    """The kernels, compiled if they have changed; blocks for seconds then.

    `is_debug` builds in the checks of the plan. Raises `RuntimeError` with the compiler's words.
    """
    options = [*_OPTIONS]
    if is_debug:
        options.append("-DHOTSHELF_DEBUG")
    if sanitize:
        options += ["-fsanitize=address", "-fno-omit-frame-pointer", "-g"]
    return Shim(_built(options))


def sanitizer_environment() -> dict[str, str] | None:
    """Variables for a process that loads a sanitized shim; None where there is no sanitizer."""
    if shim_problem() is not None:
        return None
    printed = subprocess.run(
        [_COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(printed):  # the compiler returns the bare name of what it has not got
        return None
    return {"LD_PRELOAD": printed, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


def _built(options: Sequence[str]) -> Path:
    """Compile into a folder of this user, under a name that says what it is made from.

    A build appears there as a whole, so that processes may build at once.
    """
    digest = hashlib.sha256(" ".join(options).encode())
    for source in (_KERNELS, _HEADER):
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"hotshelf-shim-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{digest.hexdigest()[:24]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as build:
            made = Path(build) / "shim.so"
            sources = ["-include", str(_HEADER), str(_KERNELS), "-o", str(made)]
            # The compiler itself is no place for a sanitizer's library.
            environment = {key: os.environ[key] for key in os.environ if key != "LD_PRELOAD"}
            done = subprocess.run(
                [_COMPILER, *options, *sources],
                capture_output=True, text=True, check=False, env=environment,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"the kernels do not compile:\n{done.stderr}")
            os.replace(made, library)
    return library
