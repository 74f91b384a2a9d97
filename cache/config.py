"""Reads a YAML file into a pydantic model; every fault becomes one plain line."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cache.errors import CacheError

ModelT = TypeVar("ModelT", bound=BaseModel)


class ConfigError(CacheError):
    """A configuration file is wrong; the text has one line a fault."""


def load_yaml(path: Path, model: type[ModelT], *, name: str | None = None) -> ModelT:
    """Return `path` as a `model`; an absent or empty file is one without fields.

    `name` stands for the path in error texts. Raises `ConfigError`.
    """
    label = name if name is not None else str(path)
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{label}: expected fields, got {type(content).__name__}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        faults = [_fault(detail, model) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{label}: {fault}" for fault in faults)) from error


def _fault(detail: ErrorDetails, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown field {where!r}{_suggestion(str(detail['loc'][-1]), model)}"
    if detail["type"] == "missing":
        return f"field {where!r} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    given = detail["input"]
    shown = repr(given) if len(repr(given)) <= 80 else repr(given)[:77] + "..."
    return f"{where}: {message}, got {shown}" if where else message


def _suggestion(field: str, model: type[BaseModel]) -> str:
    close = difflib.get_close_matches(field, _field_names(model), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


def _field_names(model: type[BaseModel]) -> list[str]:
    """Every field name of `model` and of the models nested in it."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        names.append(name)
        for nested in _nested_models(field.annotation):
            names += _field_names(nested)
    return names


def _nested_models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _nested_models(argument)]
