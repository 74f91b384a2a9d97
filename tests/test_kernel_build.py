"""The CUDA compilers take the kernels, and what they make of them is as fast as it should be."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache.kernel_launch import BLOCK_THREADS
from cache.row_format import RowFormat

KERNELS = Path(__file__).resolve().parents[1] / "cache" / "kernels.cu"
OPTIONS = ("--std=c++17", "--fmad=false")
NAMES = {f"execute_{row_format.value}" for row_format in RowFormat}
ARCHITECTURES = ("80", "90", "100")
BUILDS: dict[str, tuple[str, ...]] = {"release": (), "debug": ("-DHOTSHELF_DEBUG",)}

# Of a multiprocessor, and the blocks that `__launch_bounds__` promises on it.
NUM_REGISTERS = 65536
REGISTERS_GRANULARITY = 8
MIN_BLOCKS = 4

# 16 bytes at a time, once in each place of the source at the least.
UNITS_IN_FLIGHT = 4
UNIT_ACCESSES = UNITS_IN_FLIGHT + 1  # several rows together, or one
FILL_ACCESSES = 2  # the new row, and the old one, which is spilled
MOVE_ACCESSES = 1

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")


@dataclass(frozen=True)
class Usage:
    """What ptxas says about one kernel."""

    name: str
    architecture: str
    stack_bytes: int
    spill_bytes: int
    num_registers: int


def usages(printed: str) -> list[Usage]:
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    return [
        Usage(name, architecture, int(stack), int(stores) + int(loads), int(registers))
        for name, architecture, stack, stores, loads, registers in pattern.findall(printed)
    ]


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("build", BUILDS)
def test_nvcc_keeps_everything_in_registers(build: str, architecture: str, tmp_path: Path) -> None:
    command = [
        "nvcc", *OPTIONS, *BUILDS[build], f"-arch=sm_{architecture}", "-cubin", "-Xptxas=-v",
        "--keep", f"--keep-dir={tmp_path}", "-o", str(tmp_path / "kernels.cubin"), str(KERNELS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    found = usages(done.stderr)
    assert {(usage.name, usage.architecture) for usage in found} == {
        (name, architecture) for name in NAMES
    }
    if build == "release":
        for usage in found:
            assert (usage.stack_bytes, usage.spill_bytes) == (0, 0), usage
            assert num_blocks(usage.num_registers) >= MIN_BLOCKS, usage
        assert_fast_and_exact(next(tmp_path.glob("*.ptx")).read_text())


def num_blocks(num_registers: int) -> int:
    """How many blocks of a kernel a multiprocessor has registers for."""
    allocated = -(-num_registers // REGISTERS_GRANULARITY) * REGISTERS_GRANULARITY
    return NUM_REGISTERS // (allocated * BLOCK_THREADS)


def assert_fast_and_exact(ptx: str) -> None:
    """Wide loads of rows, for units and copies; wide stores of rows and slots; no fused sums."""
    name_to_body = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", ptx, re.DOTALL))
    assert name_to_body.keys() == NAMES
    for name, body in name_to_body.items():
        num_loads = len(re.findall(r"\bld\.global\S*\.v4\.", body))
        num_row_stores = len(re.findall(r"\bst\.global\S*\.v4\.[fb]32", body))
        num_slot_stores = len(re.findall(r"\bst\.global\S*\.v4\.[ub]32", body))
        assert num_loads >= UNIT_ACCESSES + FILL_ACCESSES + MOVE_ACCESSES, name
        assert num_row_stores >= UNIT_ACCESSES, name
        assert num_slot_stores >= FILL_ACCESSES + MOVE_ACCESSES, name
        assert not re.search(r"\bfma\.|\bmad\.\S*f32", body), name
        assert re.search(r"\badd\S*\.f32", body), name
        assert not re.search(r"\.local\b", body), name


@pytest.mark.parametrize("build", BUILDS)
def test_nvrtc_takes_the_source_without_headers(build: str) -> None:
    """As CuPy compiles it at start; NVRTC needs no GPU and no driver."""
    nvrtc = usable_nvrtc()
    source = KERNELS.read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, b"kernels.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [*OPTIONS, *BUILDS[build], "--gpu-architecture=compute_90"]
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    # NVRTC writes into it. Python shares objects of one byte, so an empty log must be NUL already.
    log = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytes(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    if build == "release":
        assert_fast_and_exact(ptx.decode())


def usable_nvrtc() -> Any:
    """The bindings of NVRTC, where its library is installed."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="there is no cuda-bindings")
    not_found = importlib.import_module("cuda.pathfinder").DynamicLibNotFoundError
    try:
        nvrtc.nvrtcVersion()
    except (not_found, RuntimeError) as error:
        pytest.skip(f"there is no NVRTC: {str(error).splitlines()[0]}")
    return nvrtc
