"""Where the files of a model lie: our layout, Triton's layout, or a single file."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.errors import ModelLoadError, ModelNotFoundError

logger = logging.getLogger(__name__)

MODEL_FILE = "model.onnx"
CONFIG_FILE = "model.yaml"
TRITON_CONFIG_FILE = "config.pbtxt"
MAX_NAME_BYTES = 255
VERSION_PATTERN = re.compile(r"[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file and how error texts and logs call it: its path within the repository."""

    path: Path
    label: str


class Layout(Protocol):
    """Finds models on disk; every call looks anew. Names come from clients and are not trusted."""

    def names(self) -> list[str]:
        """The models that there are, sorted."""
        ...

    def versions(self, name: str) -> list[str]:
        """The versions of a model, ascending by number; raises `ModelNotFoundError`."""
        ...

    def config_file(self, name: str) -> ModelFile | None:
        """The model's `model.yaml`, if it has one; raises `ModelNotFoundError`."""
        ...

    def model_file(self, name: str, version: str, file_name: str) -> ModelFile:
        """The model file of a version; raises `ModelNotFoundError` or `ModelLoadError`.

        `file_name` is what it is called where the folders, not the file, tell which model it is.
        """
        ...


def _not_found(name: str) -> ModelNotFoundError:
    shown = name if len(name) <= 100 else name[:100] + "..."
    return ModelNotFoundError(f"unknown model {shown!r}")


def _is_version(name: str) -> bool:
    return VERSION_PATTERN.fullmatch(name) is not None


def _is_legal(name: str) -> bool:
    """Whether a name can be that of a folder in the repository, and of no other."""
    if not name or name.startswith(".") or any(char in name for char in "/\\\0"):
        return False
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # a name on disk, or from a client, that is not UTF-8
        return False


def _listed(folder: Path, label: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise ModelLoadError(f"{label}: {error.strerror}") from error


def _is_folder(path: Path, label: str) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # such as that of a folder above it that may not be searched
        raise ModelLoadError(f"{label}: {error.strerror}") from error


class FolderLayout:
    """`<root>/models/<name>/<version>/model.onnx`, or without `models/` as Triton has it.

    Names that are no plain folder names do not exist, nor do links that leave the root.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))

    def names(self) -> list[str]:
        """See `Layout.names`."""
        names = _listed(self._models_folder(), str(self._models_folder()))
        return sorted(name for name in names if self._is_model(name))

    def versions(self, name: str) -> list[str]:
        """See `Layout.versions`."""
        folder = self._folder(name)
        paths = [folder / entry for entry in _listed(folder, name) if _is_version(entry)]
        versions = [path.name for path in paths if _is_folder(path, name) and self._is_inside(path)]
        return sorted(versions, key=int)

    def config_file(self, name: str) -> ModelFile | None:
        """See `Layout.config_file`."""
        folder = self._folder(name)
        if os.path.exists(folder / TRITON_CONFIG_FILE):
            logger.warning(
                "model %s: %s is ignored; settings are read from %s only",
                name,
                TRITON_CONFIG_FILE,
                CONFIG_FILE,
            )
        path = folder / CONFIG_FILE
        return self._inside(path) if os.path.lexists(path) else None

    def model_file(self, name: str, version: str, file_name: str) -> ModelFile:
        """See `Layout.model_file`."""
        if version not in self.versions(name):
            raise ModelNotFoundError(f"model {name!r} has no version {version!r}")
        return self._inside(self._folder(name) / version / file_name)

    def _models_folder(self) -> Path:
        ours = self._root / "models"
        return ours if _is_folder(ours, str(ours)) else self._root

    def _folder(self, name: str) -> Path:
        if not _is_legal(name) or not self._is_model(name):
            raise _not_found(name)
        return self._models_folder() / name

    def _is_model(self, name: str) -> bool:
        """In our layout every folder is a model, in Triton's one with versions or a config.

        The second rule holds for the `lost+found` of a volume, which is often not ours to read.
        """
        models = self._models_folder()
        folder = models / name
        if not _is_legal(name) or not self._is_inside(folder) or not _is_folder(folder, name):
            return False
        if models != self._root and name != "lost+found":
            return True
        if name == "tables":
            return False
        try:
            content = os.listdir(folder)
        except OSError:
            return False
        return bool({CONFIG_FILE, TRITON_CONFIG_FILE}.intersection(content)) or any(
            map(_is_version, content)
        )

    def _is_inside(self, path: Path) -> bool:
        return os.path.realpath(path).startswith(os.path.realpath(self._root) + os.sep)

    def _inside(self, path: Path) -> ModelFile:
        """The file, or an error that does not tell whether a link's target exists."""
        label = str(path.relative_to(self._root))
        if not self._is_inside(path):
            raise ModelLoadError(f"{label}: is a link that leaves the repository")
        return ModelFile(path, label)


class SingleFileLayout:
    """One model file and no configuration; its version is 1.

    The name is the file's without its suffix; of a `model.onnx`, which says nothing, it is that of
    the folder, a version folder left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.abspath(path))
        self._name = _single_name(self._path)

    def names(self) -> list[str]:
        """See `Layout.names`."""
        return [self._name]

    def versions(self, name: str) -> list[str]:
        """See `Layout.versions`."""
        self._check(name)
        return ["1"]

    def config_file(self, name: str) -> ModelFile | None:
        """See `Layout.config_file`."""
        self._check(name)
        return None

    def model_file(self, name: str, version: str, file_name: str) -> ModelFile:
        """See `Layout.model_file`."""
        if version not in self.versions(name):
            raise ModelNotFoundError(f"model {name!r} has no version {version!r}")
        return ModelFile(self._path, self._path.name)

    def _check(self, name: str) -> None:
        if name != self._name:
            raise _not_found(name)


def _single_name(path: Path) -> str:
    if path.name != MODEL_FILE:
        return path.stem
    folder = path.parent.parent if _is_version(path.parent.name) else path.parent
    return folder.name or path.stem
