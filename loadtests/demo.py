"""`hotshelf demo init`: writes a model repository with a DLRM of the Criteo shape, from a seed.

The model is the one of Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (2019): 13 dense features through a bottom MLP, 26 embeddings, the dot
products of all pairs of these 27 vectors, and a top MLP.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tqdm import tqdm

from cache.table import write_table
from loadtests.workloads import MODEL, NUM_DENSE

NUM_TABLES = 26
BOTTOM_HIDDEN = 64
TOP_HIDDEN = (256, 64)
BLOCK_ROWS = 65_536
MAX_ROWS = 2_000_000_000  # a table may have 2**31 - 1 rows
MAX_DIM = 65_536  # of a table
SIZE_SPREAD = 4.0  # the largest table has about four times the rows of the smallest

WRITTEN_BY = "# Written by"  # how the model.yaml of every demo begins
MODEL_YAML = f"""\
{WRITTEN_BY} `hotshelf demo init`.
backend: onnxruntime
max_batch_size: 256
features:
  # Column j of `keys` is looked up in the j-th table.
  - input: embeddings
    keys: keys
    tables:
"""

Weights = dict[str, NDArray[np.float32]]


class DemoError(Exception):
    """The demo repository cannot be written; the text says why."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `hotshelf demo init`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the repository")
    parser.add_argument(
        "--rows", type=int, default=5_000_000, help="rows of all tables together (default 5000000)"
    )
    parser.add_argument("--dim", type=int, default=16, help="floats in a row (default 16)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--force", action="store_true", help="replace an older demo in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def main(args: Namespace) -> int:
    """Run `hotshelf demo init`; return the exit code."""
    try:
        write_demo(
            args.directory,
            num_rows=args.rows,
            dim=args.dim,
            seed=args.seed,
            is_replacing=args.force,
            show_progress=not args.quiet,
        )
    except DemoError as error:
        print(f"hotshelf demo init: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hotshelf demo init: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.directory}: model {MODEL}, {NUM_TABLES} tables, {args.rows} rows")
    command = [*_running_command(), "serve", "--repository", str(args.directory)]
    print(f"serve it with: {shlex.join(command)}")
    return 0


def _running_command() -> list[str]:
    """What a shell starts this program with, on the search path or not."""
    program = Path(sys.argv[0]).absolute()
    is_script = program.name == "hotshelf"
    return [str(program)] if is_script else [sys.executable, "-m", "server"]


def write_demo(
    directory: Path,
    *,
    num_rows: int = 5_000_000,
    dim: int = 16,
    seed: int = 0,
    is_replacing: bool = False,
    show_progress: bool = False,
) -> None:
    """Write the repository beside `directory`, then rename it, so that it is never half there.

    Raises DemoError for bad numbers and where `directory` holds something; with `is_replacing`
    only where what it holds is not a demo.
    """
    if num_rows < NUM_TABLES:
        raise DemoError(f"--rows: expected at least {NUM_TABLES} (one a table), got {num_rows}")
    if num_rows > MAX_ROWS:
        raise DemoError(f"--rows: expected at most {MAX_ROWS}, got {num_rows}")
    if dim < 1:
        raise DemoError(f"--dim: expected at least 1, got {dim}")
    if dim > MAX_DIM:
        raise DemoError(f"--dim: expected at most {MAX_DIM}, got {dim}")
    if seed < 0:
        raise DemoError(f"--seed: expected a number from 0 up, got {seed}")
    directory = directory.absolute()
    _check_target(directory, is_replacing=is_replacing)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".demo-") as scratch:
        fresh = Path(scratch) / "fresh"
        _write_model(fresh, dim, seed)
        _write_tables(fresh, num_rows, dim, seed, show_progress=show_progress)
        if directory.exists():
            directory.rename(Path(scratch) / "old")
        fresh.rename(directory)


def _check_target(directory: Path, *, is_replacing: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise DemoError(f"{directory} is not a folder")
    names = {path.name for path in directory.iterdir()}
    if names and not is_replacing:
        raise DemoError(f"{directory} is not empty; --force replaces an older demo")
    if names:
        _check_is_demo(directory)


def _check_is_demo(directory: Path) -> None:
    """Raise DemoError where `directory` holds anything that `write_demo` does not write."""
    model = Path("models", MODEL)
    known = {
        Path(): {"models", "tables"},
        Path("models"): {MODEL},
        model: {"model.yaml", "1"},
        Path("tables"): {table_name(table) for table in range(NUM_TABLES)},
    }
    for folder, names in known.items():
        if not (directory / folder).is_dir():
            raise DemoError(f"{directory} is no demo: it has no folder {folder}")
        if foreign := sorted({path.name for path in (directory / folder).iterdir()} - names):
            raise DemoError(
                f"{directory} holds more than a demo: {folder / foreign[0]}; "
                "remove it yourself if you mean it"
            )
    config = directory / model / "model.yaml"
    if not config.exists() or not config.read_bytes().startswith(WRITTEN_BY.encode()):
        raise DemoError(
            f"{directory} is no demo: {model / 'model.yaml'} does not begin with {WRITTEN_BY!r}"
        )


def table_sizes(num_rows: int, seed: int) -> list[int]:
    """Rows of each table; they differ by up to SIZE_SPREAD and sum to `num_rows`."""
    rng = np.random.default_rng([seed, 1])
    weights = SIZE_SPREAD ** rng.random(NUM_TABLES)
    spare = num_rows - NUM_TABLES
    ends = np.rint(np.cumsum(weights) / weights.sum() * spare).astype(np.int64)
    return [int(size) + 1 for size in np.diff(ends, prepend=0)]


def _write_tables(root: Path, num_rows: int, dim: int, seed: int, *, show_progress: bool) -> None:
    with tqdm(total=num_rows, unit=" rows", unit_scale=True, disable=not show_progress) as bar:
        for table, size in enumerate(table_sizes(num_rows, seed)):
            blocks = _row_blocks(size, dim, np.random.default_rng([seed, 2, table]), bar)
            write_table(root / "tables" / table_name(table), blocks, dim=dim)


def table_name(table: int) -> str:
    """The name of the table that column `table` of the keys is looked up in."""
    return f"category_{table:02d}"


def _row_blocks(
    size: int, dim: int, rng: np.random.Generator, bar: Any
) -> Iterator[NDArray[np.float32]]:
    scale = np.float32(dim**-0.25)  # so that a dot product has a variance of about 1
    for start in range(0, size, BLOCK_ROWS):
        count = min(BLOCK_ROWS, size - start)
        yield rng.standard_normal((count, dim), dtype=np.float32) * scale
        bar.update(count)


def _write_model(root: Path, dim: int, seed: int) -> None:
    folder = root / "models" / MODEL
    (folder / "1").mkdir(parents=True)
    model = dlrm_model(dlrm_weights(dim, seed), dim)
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
    tables = "".join(f"      - {table_name(table)}\n" for table in range(NUM_TABLES))
    (folder / "model.yaml").write_text(MODEL_YAML + tables, encoding="utf-8")


def dlrm_weights(dim: int, seed: int) -> Weights:
    """Weights [inputs, outputs] and biases of the layers `bottom_0` to `top_2`."""
    rng = np.random.default_rng([seed, 0])
    num_vectors = NUM_TABLES + 1
    interacted = dim + num_vectors * (num_vectors - 1) // 2
    sizes = {"bottom": (NUM_DENSE, BOTTOM_HIDDEN, dim), "top": (interacted, *TOP_HIDDEN, 1)}
    weights: Weights = {}
    for part, widths in sizes.items():
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
            matrix = rng.standard_normal((fan_in, fan_out), dtype=np.float32)
            weights[f"{part}_{layer}_weight"] = matrix * np.float32((2 / (fan_in + fan_out)) ** 0.5)
            weights[f"{part}_{layer}_bias"] = rng.standard_normal(fan_out, dtype=np.float32) * (
                np.float32(fan_out**-0.5)
            )
    return weights


def dlrm_model(weights: Weights, dim: int) -> onnx.ModelProto:
    """The ONNX model: `dense` [-1, 13] and `embeddings` [-1, 26, dim] to `score` [-1, 1]."""
    num_vectors = NUM_TABLES + 1
    lower_row, lower_column = np.tril_indices(num_vectors, k=-1)
    constants: dict[str, NDArray[Any]] = {
        **weights,
        "axis_1": np.array([1], np.int64),
        "flat": np.array([-1, num_vectors * num_vectors], np.int64),
        "pairs": (lower_row * num_vectors + lower_column).astype(np.int64),
    }
    node = helper.make_node
    nodes = [
        *_mlp("bottom", "dense", "bottom", num_layers=2, last="Relu"),
        node("Unsqueeze", ["bottom", "axis_1"], ["bottom_vector"]),
        node("Concat", ["bottom_vector", "embeddings"], ["vectors"], axis=1),
        node("Transpose", ["vectors"], ["vectors_t"], perm=[0, 2, 1]),
        node("MatMul", ["vectors", "vectors_t"], ["products"]),
        node("Reshape", ["products", "flat"], ["products_flat"]),
        node("Gather", ["products_flat", "pairs"], ["interaction"], axis=1),
        node("Concat", ["bottom", "interaction"], ["features"], axis=1),
        *_mlp("top", "features", "score", num_layers=3, last="Sigmoid"),
    ]
    value, floats = helper.make_tensor_value_info, TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        MODEL,
        [
            value("dense", floats, [None, NUM_DENSE]),
            value("embeddings", floats, [None, NUM_TABLES, dim]),
        ],
        [value("score", floats, [None, 1])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="hotshelf"
    )
    onnx.checker.check_model(model)
    return model


def _mlp(
    part: str, source: str, target: str, *, num_layers: int, last: str
) -> list[onnx.NodeProto]:
    nodes = []
    for layer in range(num_layers):
        name = f"{part}_{layer}"
        is_last = layer == num_layers - 1
        output = target if is_last else f"{name}_out"
        nodes += [
            helper.make_node("Gemm", [source, f"{name}_weight", f"{name}_bias"], [f"{name}_sum"]),
            helper.make_node(last if is_last else "Relu", [f"{name}_sum"], [output]),
        ]
        source = output
    return nodes
