"""Weights of torch modules: safetensors files only, and only those that fit."""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.errors import ModelLoadError
from models.torch_text import listed, one_line, reason

_PICKLE_SUFFIXES = (".pt", ".pt2", ".pth", ".ckpt", ".bin", ".pkl")
_PICKLE_STARTS = (b"PK\3\4", b"\x80")  # torch.save, TorchScript and .pt2; torch.save of old
_HEADER_AT = 8  # a safetensors file begins with the length of its header, of any value


def refuse_pickles(path: Path, label: str) -> None:
    """Refuse what is no safetensors file but another format of torch; it is not read further.

    Raises `ModelLoadError`, also for what is no file at all, such as a pipe that nobody writes to.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelLoadError(f"{label}: is not a regular file, expected a safetensors file")
        with path.open("rb") as file:
            start = file.read(_HEADER_AT + 1)
        is_pickle = start.startswith(_PICKLE_STARTS) and start[_HEADER_AT:] != b"{"
        found = path.name
    except FileNotFoundError:
        others = sorted(other.name for other in path.parent.glob("*"))
        found = next((name for name in others if name.endswith(_PICKLE_SUFFIXES)), path.name)
        is_pickle = found != path.name
        if not is_pickle:
            raise ModelLoadError(f"{label}: No such file or directory") from None
    except OSError as error:
        raise ModelLoadError(f"{label}: {error.strerror or error}") from error
    if is_pickle:
        raise ModelLoadError(
            f"{label}: {found} is of torch.save, TorchScript or torch.export, whose loading can "
            "run any code, so it is never loaded; write the weights with "
            "safetensors.torch.save_model and give a factory"
        )


def load_weights(module: torch.nn.Module, path: Path, label: str) -> None:
    """Copy all weights of the file into the module; names, shapes and dtypes must be equal."""
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ModelLoadError(
            f"{label}: is not a safetensors file, or is cut short ({one_line(error)})"
        ) from error
    except OSError as error:
        raise ModelLoadError(f"{label}: {error.strerror or 'cannot be read'}") from error
    except Exception as error:  # such as TypeError for a shape of more than 63 bits
        raise ModelLoadError(f"{label}: cannot be read as safetensors ({reason(error)})") from error
    try:
        faults = _faults(module, weights)
        if not faults:
            module.load_state_dict(weights, strict=False)  # tied weights are once in the file
    except BaseException as error:  # a module may have a state_dict of its own
        raise ModelLoadError(f"{label}: {reason(error)}") from error
    if faults:
        raise ModelLoadError(f"{label}: the weights do not fit the module: {'; '.join(faults)}")


def _faults(module: torch.nn.Module, weights: dict[str, torch.Tensor]) -> list[str]:
    """What keeps the weights from being loaded, as parts of one line."""
    state = module.state_dict()
    given = {_memory(tensor) for name, tensor in state.items() if name in weights}
    missing = [n for n, t in state.items() if n not in weights and _memory(t) not in given]
    unexpected = [name for name in weights if name not in state]
    both = [(name, state[name], weights[name]) for name in state if name in weights]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "without memory (device meta)": [
            name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if tensor.is_meta
        ],
        "of another shape": [
            f"{name} {list(got.shape)}, expected {list(own.shape)}"
            for name, own, got in both
            if got.shape != own.shape
        ],
        "of another dtype": [
            f"{name} {_dtype_name(got)}, expected {_dtype_name(own)}"
            for name, own, got in both
            if got.dtype != own.dtype
        ],
    }
    return [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]


def _memory(tensor: object) -> tuple[object, ...]:
    """Equal for tensors that are one, such as tied weights."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
