"""The Python code of a torch model: the files beside it, and the factory in them."""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch

from models.errors import ModelLoadError
from models.tensor_spec import TensorSpec
from models.torch_text import listed, reason

logger = logging.getLogger(__name__)

_package_numbers = itertools.count(1)  # of the process, as sys.modules is


class ModelCode:
    """The Python files beside one opened model, as a package with a name of its own.

    So `sys.path` stays as it is, models do not meet each other's modules, and a reload reads the
    files anew.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [str(folder) for folder in folders]
        self._package = f"hotshelf_model_{next(_package_numbers)}"

    def import_module(self, name: str) -> ModuleType:
        """Import from the folders, or else what is installed."""
        importlib.invalidate_caches()
        if not self.has(name):
            return importlib.import_module(name)
        package = ModuleType(self._package)
        package.__path__ = self._folders
        sys.modules[self._package] = package
        return importlib.import_module(f"{self._package}.{name}")

    def has(self, name: str) -> bool:
        """Whether the folders hold the first part of a module's name."""
        return PathFinder.find_spec(name.partition(".")[0], self._folders) is not None

    def reason(self, error: BaseException) -> str:
        """The error in one line, without our name for the package and the place of the folders."""
        text = reason(error).replace(f"{self._package}.", "")
        for folder in self._folders:
            text = text.replace(f"{folder}/", "")
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and self.has(missing):
            text += "; files beside the model are imported with a dot: from . import ..."
        return text

    def close(self) -> None:
        """Forget the modules; those that are in use stay alive."""
        for name in list(sys.modules):
            if name == self._package or name.startswith(f"{self._package}."):
                sys.modules.pop(name, None)


def built(code: ModelCode, factory: str, where: str) -> torch.nn.Module:
    """What the factory, `module:callable`, returns; raises `ModelLoadError`."""
    module_name, _, attribute = factory.partition(":")
    try:
        module = getattr(code.import_module(module_name), attribute)()
    except BaseException as error:  # code of a user raises anything, and may not end the server
        logger.warning("%s failed", where, exc_info=error)
        raise ModelLoadError(f"{where}: {code.reason(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ModelLoadError(
            f"{where}: returned {type(module).__name__}, expected a torch.nn.Module"
        )
    return module


def check_forward(module: torch.nn.Module, inputs: Sequence[TensorSpec], where: str) -> None:
    """Raise `ModelLoadError` where `forward` does not take the inputs by name."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # a callable without one; the first run will tell
        return
    try:
        signature.bind(**{spec.name: None for spec in inputs})
    except TypeError as error:
        raise ModelLoadError(
            f"{where}: the inputs are {listed(spec.name for spec in inputs)}, "
            f"but forward takes {listed(signature.parameters)}: {error}"
        ) from error
