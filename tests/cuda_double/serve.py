"""The command `hotshelf` on a machine with a double of a GPU: `python -m tests.cuda_double.serve`.

It takes the same arguments. A misuse of CUDA that the double has seen ends it with an error.
"""

from __future__ import annotations

import sys
from types import ModuleType

import onnxruntime

from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import Machine, MachineConfig
from tests.cuda_double.onnx_runtime import OnnxRuntimeDouble


def main() -> int:
    """Runs one command; returns its exit code. Raises `MisuseError`."""
    machine = Machine(MachineConfig(seed=1))
    sys.modules["cupy"] = cupy_of(machine)
    sys.modules["onnxruntime"] = _onnxruntime_of(machine)
    # Only now, as these import both.
    from server.cli import main as run_command

    exit_code = run_command()
    machine.check()
    return exit_code


def _onnxruntime_of(machine: Machine) -> ModuleType:
    """The installed package, with what the double has in the place of its own."""
    double = OnnxRuntimeDouble(machine)
    module = ModuleType("onnxruntime")
    vars(module).update(vars(onnxruntime))
    vars(module).update(
        {name: getattr(double, name) for name in dir(double) if hasattr(onnxruntime, name)}
    )
    return module


if __name__ == "__main__":
    sys.exit(main())
