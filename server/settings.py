"""The settings of the server: each option is declared once and read once."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from cache import Device

ENVIRONMENT_PREFIX = "HOTSHELF_"

# The values of a flag.
YES, NO = "yes", "no"

_SIZE = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(|b|kb|mb|gb|tb|kib|mib|gib|tib)", re.IGNORECASE
)
_MAX_SIZE = 2**62
_WHAT_TO_SERVE = frozenset({"model_file", "repository"})
_UNIT_TO_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


class SettingsError(Exception):
    """A setting is wrong; the text is one line: its name, what was given and what is allowed."""


@dataclass(frozen=True, slots=True)
class Option:
    """How one setting is read: `parse` raises ValueError for what is not allowed."""

    parse: Callable[[str], object]
    allowed: str
    help: str
    default_text: str
    is_flag: bool = False  # on the command line it has no value, in a file it may be true or false


def parse_size(text: str) -> int:
    """Bytes of a size such as 1GiB, 64MB or 1073741824."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    number, unit = match.groups()
    multiplier = _UNIT_TO_BYTES[unit.lower()]
    size = int(number) * multiplier if number.isdigit() else int(float(number) * multiplier)
    if size > _MAX_SIZE:
        raise ValueError(text)
    return size


def format_size(num_bytes: int) -> str:
    """A size with a binary unit and at most two decimals: 1GiB, 1.5MiB, 100B."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.2f}".rstrip("0").rstrip(".") + unit
        size /= 1024
    return f"{size:.2f}".rstrip("0").rstrip(".") + "TiB"


def _positive_size(text: str) -> int:
    if (size := parse_size(text)) <= 0:
        raise ValueError(text)
    return size


def _auto_or(parse: Callable[[str], int]) -> Callable[[str], int | None]:
    return lambda text: None if text == "auto" else parse(text)


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(text)
        return int(text)

    return parse


def _number(low: float, below: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not low <= (number := float(text)) < below:
            raise ValueError(text)
        return number

    return parse


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse


def _yes_or_no(text: str) -> bool:
    if text not in (YES, NO):
        raise ValueError(text)
    return text == YES


def _text(pattern: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return parse


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError(text)
    return Path(text)


def _option(parse: Callable[[str], object], default: str | None, allowed: str, help: str) -> Any:
    option = Option(parse, allowed, help, "" if default is None else default)
    value = None if default is None else parse(default)
    return dataclasses.field(default=value, metadata={"option": option})


def _flag(help: str) -> Any:
    option = Option(_yes_or_no, f"{YES} or {NO}", help, NO, is_flag=True)
    return dataclasses.field(default=False, metadata={"option": option})


_SIZES = "a size such as 1GiB, 256MiB, 64MB or 1073741824"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one server was told; sizes are in bytes.

    Exactly one of `model_file` and `repository` is set.
    """

    model_file: Path | None = _option(  # noqa: RUF009
        _path, None, "a path", "a single .onnx file to serve, with no configuration"
    )
    repository: Path | None = _option(  # noqa: RUF009
        _path, None, "a path", "the folder that holds models/ and tables/, or Triton's layout"
    )
    host: str = _option(
        _text(r"[^\s/]+"), "127.0.0.1", "an address or host name", "the address to listen on"
    )
    port: int = _option(
        _integer(0, 65535), "8000", "an integer from 0 to 65535", "the port; 0 takes a free one"
    )
    device: str = _option(
        _text(r"cpu|auto|cuda:[0-9]{1,3}"), "auto", "cpu, cuda:N or auto", "the near shelf's device"
    )
    device_memory: int | None = _option(
        _auto_or(_positive_size), "auto", f"{_SIZES}, above 0, or auto",
        "the whole budget of the near shelf: models, table slabs and the reserve. auto is 1GiB on "
        "the cpu, and all that is free on a GPU",
    )  # fmt: skip
    table_memory: int | None = _option(
        _auto_or(parse_size), "auto", f"{_SIZES}, or auto",
        "the ceiling of the table slabs within device_memory; auto is a quarter of it",
    )  # fmt: skip
    host_memory: int = _option(
        parse_size, "2GiB", _SIZES,
        "the budget of the host tier and the staging buffers; 0 means no host tier",
    )  # fmt: skip
    reserve: float = _option(
        _number(0.0, 1.0), "0.1", "a number from 0 up to, but not including, 1",
        "the fraction of device_memory that is kept free",
    )  # fmt: skip
    io: str = _option(
        _choice("direct", "buffered"), "direct", "direct or buffered",
        "how table files are read: past the page cache, or through it",
    )  # fmt: skip
    pipeline_depth: int = _option(
        _integer(1, 64), "4", "an integer from 1 to 64", "how many batches may be in work at once"
    )
    max_lookup_keys: int = _option(
        _integer(1, 1_000_000), "8192", "an integer from 1 to 1000000",
        "keys of one slab that are looked up at once; larger batches are looked up in parts. "
        "Staging buffers grow with it",
    )  # fmt: skip
    load: str = _option(
        _choice("all", "none"), "all", "all or none",
        "which models to load at the start; the others wait for a load request",
    )  # fmt: skip
    trust_model_code: bool = _flag(
        "run the Python code that torch models name as their factory; without it they are refused"
    )
    max_body_bytes: int = _option(
        _positive_size, "64MiB", f"{_SIZES}, above 0",
        "the largest request body, counted after decompression",
    )  # fmt: skip
    shutdown_grace_s: float = _option(
        _number(0.0, 86400.0), "30", "seconds, from 0 to below 86400",
        "how long accepted requests may take to finish after SIGTERM",
    )  # fmt: skip
    nvtx: bool = _flag("mark the stages of every batch for a profiler (NVTX ranges, through CuPy)")
    log_format: str = _option(
        _choice("text", "json"), "text", "text or json", "the form of the log lines"
    )
    log_level: str = _option(
        _choice("debug", "info", "warning", "error"), "info", "debug, info, warning or error",
        "the least severe log line that is written",
    )  # fmt: skip


NAME_TO_OPTION: Mapping[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(Settings)
}


def read_settings(arguments: Mapping[str, str], environment: Mapping[str, str]) -> Settings:
    """The settings from command line (by option name), environment, config file and defaults.

    An earlier source wins. `arguments` may hold `config`, the path of the file, and so may the
    environment. Raises SettingsError.
    """
    from_environment = _environment_values(environment)
    config = arguments.get("config", from_environment.pop("config", (None, ""))[0])
    from_arguments = {
        name: (arguments[name], f"option --{name.replace('_', '-')}")
        for name in arguments
        if name != "config"
    }
    from_file = {} if config is None else _file_values(Path(config))
    values = _merge(_merge(from_file, from_environment), from_arguments)
    parsed = {name: _parse(name, text, origin) for name, (text, origin) in values.items()}
    return _check(Settings(**parsed))


def _parse(name: str, text: str, origin: str) -> Any:
    option = NAME_TO_OPTION[name]
    try:
        return option.parse(text)
    except ValueError:
        raise SettingsError(_wrong(name, repr(text), origin)) from None


def _wrong(name: str, given: str, origin: str) -> str:
    return f"{name}: expected {NAME_TO_OPTION[name].allowed}, got {given} ({origin})"


def _environment_values(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    values = {}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        known = [f"{ENVIRONMENT_PREFIX}{known.upper()}" for known in (*NAME_TO_OPTION, "config")]
        if variable not in known:
            raise SettingsError(_unknown("environment variable", variable, known))
        values[name] = (environment[variable], f"environment variable {variable}")
    return values


def _file_values(path: Path) -> dict[str, tuple[str, str]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SettingsError(f"config: {path} is not valid YAML: {_one_line(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"config: expected options with values in {path}, got {content!r}")
    values = {}
    for name, value in content.items():
        if name not in NAME_TO_OPTION:
            raise SettingsError(f"{_unknown('option', str(name), list(NAME_TO_OPTION))} ({path})")
        if isinstance(value, bool) and NAME_TO_OPTION[name].is_flag:
            value = YES if value else NO
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise SettingsError(_wrong(name, repr(value), str(path)))
        values[name] = (str(value), str(path))
    return values


def _merge(
    lower: Mapping[str, tuple[str, str]], upper: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Values of both; a choice of model or repository above replaces the one below."""
    hidden = _WHAT_TO_SERVE if upper.keys() & _WHAT_TO_SERVE else frozenset()
    return {name: lower[name] for name in lower if name not in hidden} | dict(upper)


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(known)}"
    return f"{name}: unknown {kind}, {hint}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check(settings: Settings) -> Settings:
    if settings.model_file is not None and settings.repository is not None:
        raise SettingsError(
            "repository: expected a model file or a repository, got both: "
            f"{settings.model_file} and {settings.repository}"
        )
    if settings.model_file is not None and settings.model_file.is_dir():
        raise SettingsError(
            f"model_file: expected a .onnx file, got the folder {settings.model_file}; "
            f"for a folder use --repository {settings.model_file}"
        )
    if settings.model_file is None and settings.repository is None:
        raise SettingsError(
            "repository: expected --repository DIR or a model file to serve, got neither"
        )
    if settings.device_memory is not None:
        usable = int(settings.device_memory * (1 - settings.reserve))
        _check_table_memory(settings, settings.device_memory, usable)
    return settings


def table_memory(settings: Settings, device: Device) -> int:
    """The bytes that tables may take on the device; raises SettingsError where they cannot."""
    usable = device.budget.max_bytes
    if settings.table_memory is None:
        return min(device.max_bytes // 4, usable)
    _check_table_memory(settings, device.max_bytes, usable)
    return settings.table_memory


def _check_table_memory(settings: Settings, device_memory: int, usable: int) -> None:
    if settings.table_memory is not None and settings.table_memory > usable:
        raise SettingsError(
            f"table_memory: expected at most {format_size(usable)} ({usable} bytes: device_memory "
            f"{format_size(device_memory)} less the reserve of {settings.reserve:g}), "
            f"got {format_size(settings.table_memory)}"
        )
