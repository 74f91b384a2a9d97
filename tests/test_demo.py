"""`hotshelf demo init` writes a DLRM and its tables, the same for the same seed."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from cache.table import read_tables
from loadtests.demo import (
    NUM_TABLES,
    DemoError,
    add_arguments,
    dlrm_weights,
    main,
    table_sizes,
    write_demo,
)
from loadtests.workloads import DEFAULT_NUM_ACCESSES, DISTINCT_PER_ACCESS
from tests.dlrm_reference import gather, numpy_scores, onnxruntime_scores


def files(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by relative path."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def run_cli(*arguments: str) -> int:
    """Run the command with these arguments."""
    parser = ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args(["--quiet", *arguments]))


def test_the_layout(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", num_rows=1000, dim=8)
    tables = read_tables(tmp_path / "demo" / "tables")
    assert [table.name for table in tables] == [f"category_{i:02d}" for i in range(26)]
    assert sum(table.num_rows for table in tables) == 1000
    assert {table.dim for table in tables} == {8}
    config = yaml.safe_load((tmp_path / "demo" / "models" / "dlrm" / "model.yaml").read_text())
    [feature] = config["features"]
    assert (feature["input"], feature["keys"]) == ("embeddings", "keys")
    assert feature["tables"] == [table.name for table in tables]
    model = onnx.load(tmp_path / "demo" / "models" / "dlrm" / "1" / "model.onnx")
    assert [value.name for value in model.graph.input] == ["dense", "embeddings"]
    assert [value.name for value in model.graph.output] == ["score"]
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        write_demo(tmp_path / name, num_rows=2000, seed=seed)
    assert files(tmp_path / "first") == files(tmp_path / "again")
    assert files(tmp_path / "first") != files(tmp_path / "other")


def test_the_model_computes_the_formula_of_the_dlrm(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", num_rows=2000, seed=5)
    rng = np.random.default_rng(0)
    smallest = min(table.num_rows for table in read_tables(tmp_path / "demo" / "tables"))
    keys = rng.integers(0, smallest, (40, NUM_TABLES))
    dense = rng.standard_normal((40, 13), dtype=np.float32)
    embeddings = gather(tmp_path / "demo", keys)
    scores = onnxruntime_scores(tmp_path / "demo", dense, embeddings)
    expected = numpy_scores(dlrm_weights(16, seed=5), dense, embeddings)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert scores.std() > 0.05  # the rows matter


def test_default_tables_differ_in_size_and_hold_the_default_trace() -> None:
    sizes = table_sizes(5_000_000, seed=0)
    assert sum(sizes) == 5_000_000
    assert 3 < max(sizes) / min(sizes) <= 4.01
    assert min(sizes) > 1.1 * DISTINCT_PER_ACCESS * DEFAULT_NUM_ACCESSES / NUM_TABLES


@pytest.mark.parametrize("num_rows", [26, 27, 1000])
def test_every_table_has_a_row(num_rows: int) -> None:
    sizes = table_sizes(num_rows, seed=1)
    assert sum(sizes) == num_rows
    assert min(sizes) >= 1


def test_a_folder_that_holds_something_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(str(tmp_path / "demo"), "--rows", "100") == 0
    before = files(tmp_path / "demo")
    assert run_cli(str(tmp_path / "demo"), "--rows", "200") == 2
    assert "is not empty; --force replaces an older demo" in capsys.readouterr().err
    assert files(tmp_path / "demo") == before


def test_force_replaces_an_older_demo(tmp_path: Path) -> None:
    assert run_cli(str(tmp_path / "demo"), "--rows", "100") == 0
    assert run_cli(str(tmp_path / "demo"), "--rows", "200", "--force") == 0
    assert sum(table.num_rows for table in read_tables(tmp_path / "demo" / "tables")) == 200
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_force_never_removes_what_is_no_demo(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DemoError, match="holds more than a demo"):
        write_demo(tmp_path, num_rows=100, is_replacing=True)
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    "foreign", ["models/fraud/model.yaml", "tables/users/rows.bin", "models/dlrm/2/model.onnx"]
)
def test_force_never_removes_a_repository_with_more_than_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: str
) -> None:
    directory = tmp_path / "demo"
    write_demo(directory, num_rows=100)
    (directory / foreign).parent.mkdir()
    (directory / foreign).write_text("years of work")
    before = files(directory)
    assert run_cli(str(directory), "--rows", "200", "--force") == 2
    name = str(Path(foreign).parent)
    assert f"holds more than a demo: {name}; remove it yourself" in capsys.readouterr().err
    assert files(directory) == before


def test_force_never_removes_a_model_that_only_has_the_name_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "demo"
    write_demo(directory, num_rows=100)
    (directory / "models" / "dlrm" / "model.yaml").write_text("backend: onnxruntime\n")
    before = files(directory)
    assert run_cli(str(directory), "--rows", "200", "--force") == 2
    assert "is no demo: models/dlrm/model.yaml does not begin" in capsys.readouterr().err
    assert files(directory) == before


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert run_cli(str(tmp_path / "file" / "demo"), "--rows", "100") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hotshelf demo init: ")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    write_demo(tmp_path / "demo", num_rows=100)
    assert (tmp_path / "demo" / "models").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rows", "25"), "--rows: expected at least 26 (one a table), got 25"),
        (("--rows", "2000000001"), "--rows: expected at most 2000000000, got 2000000001"),
        (("--dim", "0"), "--dim: expected at least 1, got 0"),
        (("--dim", "70000"), "--dim: expected at most 65536, got 70000"),
        (("--seed", "-1"), "--seed: expected a number from 0 up, got -1"),
    ],
)
def test_bad_numbers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, str], message: str
) -> None:
    assert run_cli(str(tmp_path / "demo"), *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
