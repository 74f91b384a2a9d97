"""Settings: where they come from, who wins, and the one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from cache import open_device
from server.settings import (
    NAME_TO_OPTION,
    Settings,
    SettingsError,
    format_size,
    parse_size,
    read_settings,
    table_memory,
)

SERVE = {"repository": "/srv/repo"}
DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"


def test_defaults() -> None:
    settings = read_settings(SERVE, {})
    assert settings == Settings(repository=Path("/srv/repo"))
    assert (settings.host, settings.port, settings.device) == ("127.0.0.1", 8000, "auto")
    assert settings.device_memory is None
    assert settings.table_memory is None
    assert settings.host_memory == 2 * 2**30


def test_command_line_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    config = tmp_path / "hotshelf.yaml"
    config.write_text("port: 1\nhost: file\ntable_memory: 64MiB\nrepository: /file\n")
    settings = read_settings(
        {"config": str(config), "port": "3"},
        {"HOTSHELF_PORT": "2", "HOTSHELF_HOST": "environment", "PATH": "/bin"},
    )
    assert settings.port == 3
    assert settings.host == "environment"
    assert settings.table_memory == 64 * 2**20
    assert settings.host_memory == 2 * 2**30
    assert settings.repository == Path("/file")


def test_the_config_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "hotshelf.yaml"
    config.write_text("repository: /file\nreserve: 0.25\nio: buffered\n")
    settings = read_settings({}, {"HOTSHELF_CONFIG": str(config)})
    assert settings.repository == Path("/file")
    assert (settings.reserve, settings.io) == (0.25, "buffered")


def test_a_model_file_on_the_command_line_replaces_a_repository_of_the_environment() -> None:
    settings = read_settings({"model_file": "m.onnx"}, {"HOTSHELF_REPOSITORY": "/srv/repo"})
    assert settings.model_file == Path("m.onnx")
    assert settings.repository is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1073741824", 2**30),
        ("1GiB", 2**30),
        ("256 MiB", 2**28),
        ("64MB", 64_000_000),
        ("1.5kib", 1536),
        ("100B", 100),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0B"), (1023, "1023B"), (2**30, "1GiB"), (1536, "1.5KiB"), (5 * 2**40, "5TiB")],
)
def test_sizes_are_written_short(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "http"),
        ("port", "65536"),
        ("port", "-1"),
        ("port", "８０"),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device_memory", "1Gb/s"),
        ("device_memory", "0"),
        ("device_memory", "-1GiB"),
        ("device_memory", "9" * 400),
        ("device_memory", f"{'9' * 400}.5GiB"),
        ("host_memory", "99999999TiB"),
        ("table_memory", ""),
        ("host_memory", "much"),
        ("reserve", "1"),
        ("reserve", "nan"),
        ("reserve", "ten"),
        ("io", "DIRECT"),
        ("pipeline_depth", "0"),
        ("load", "some"),
        ("max_body_bytes", "0"),
        ("shutdown_grace_s", "-1"),
        ("shutdown_grace_s", "inf"),
        ("log_format", "xml"),
        ("log_level", "loud"),
        ("host", ""),
        ("repository", ""),
    ],
)
def test_a_wrong_value_is_one_line_with_name_given_and_allowed(name: str, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(SERVE | {name: text}, {})
    line = str(caught.value)
    option = f"option --{name.replace('_', '-')}"
    assert line == f"{name}: expected {NAME_TO_OPTION[name].allowed}, got {text!r} ({option})"


def test_a_wrong_value_says_where_it_came_from(tmp_path: Path) -> None:
    config = tmp_path / "hotshelf.yaml"
    config.write_text("port: true")
    with pytest.raises(SettingsError, match=r"got True \(.*hotshelf.yaml\)"):
        read_settings({"config": str(config)}, {})
    with pytest.raises(SettingsError, match=r"got 'x' \(environment variable HOTSHELF_PORT\)"):
        read_settings({}, {"HOTSHELF_PORT": "x"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("device_memry: 1GiB", "device_memry: unknown option, did you mean device_memory?"),
        ("zzz: 1", "zzz: unknown option, expected one of model_file, repository, "),
        ("1: 1", "1: unknown option"),
        ("[1, 2]", "config: expected options with values"),
        ("{", "is not valid YAML"),
        ("repository:", "repository: expected a path, got None"),
        ("port: [1]", r"port: expected an integer from 0 to 65535, got \[1\]"),
    ],
)
def test_a_wrong_config_file(tmp_path: Path, content: str, text: str) -> None:
    config = tmp_path / "hotshelf.yaml"
    config.write_text(content)
    with pytest.raises(SettingsError, match=text) as caught:
        read_settings({"config": str(config)}, {})
    assert "\n" not in str(caught.value)


def test_a_config_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"config: cannot read .*: No such file"):
        read_settings({"config": str(tmp_path / "none.yaml")}, {})


def test_an_unknown_environment_variable() -> None:
    with pytest.raises(SettingsError, match="did you mean HOTSHELF_DEVICE_MEMORY"):
        read_settings(SERVE, {"HOTSHELF_DEVICE_MEMRY": "1GiB"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "got neither"),
        ({"repository": "r", "model_file": "m.onnx"}, "got both: m.onnx and r"),
        (
            SERVE | {"device_memory": "100MiB", "table_memory": "95MiB"},
            r"table_memory: expected at most 90MiB \(94371840 bytes: .*\), got 95MiB",
        ),
    ],
)
def test_values_that_do_not_fit_together(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        read_settings(arguments, {})


def test_the_memory_of_tables_is_a_quarter_unless_it_is_given() -> None:
    device = open_device("cpu", max_bytes=None, max_host_bytes=0)
    assert table_memory(read_settings(SERVE, {}), device) == 256 * 2**20
    assert table_memory(read_settings(SERVE | {"table_memory": "1MiB"}, {}), device) == 2**20
    with pytest.raises(SettingsError, match=r"table_memory: expected at most 921.6MiB .*got 1GiB"):
        table_memory(read_settings(SERVE | {"table_memory": "1GiB"}, {}), device)
    narrow = open_device("cpu", max_bytes=1000, max_host_bytes=0, reserve_fraction=0.875)
    assert table_memory(read_settings(SERVE, {}), narrow) == 125


def test_every_option_is_documented() -> None:
    rows = {
        cells[1].strip().strip("`"): cells
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and len(cells := line.split("|")) > 4
    }
    assert rows.keys() == NAME_TO_OPTION.keys()
    for name, option in NAME_TO_OPTION.items():
        assert rows[name][2].strip().strip("`") == (option.default_text or "none")
