"""The torch backend: factories, weights, datatypes, results, errors, and streams of a GPU."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import re
import struct
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import save_file

import models.torch_backend
import models.torch_places
from cache import Device, FeatureCache, Lookup, open_device
from cache.cuda import CudaDevice
from cache.device import Buffers, Event
from cache.table import read_tables, write_table
from loadtests.demo import NUM_TABLES, dlrm_weights, write_demo
from models.errors import BackendError, ModelLoadError
from models.repository import ModelRepository
from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec
from models.torch_backend import TorchBackend
from models.torch_places import TorchCuda
from server.cli import main
from server.settings import Settings, SettingsError, read_settings
from tests.cuda_double.cupy_double import cupy_of
from tests.cuda_double.machine import Machine, MachineConfig
from tests.cuda_double.memory import Range
from tests.dlrm_reference import gather, onnxruntime_scores
from tests.serving import running_server
from tests.test_dlrm_end_to_end import post

Array = NDArray[Any]

MIB = 2**20
DOCUMENT = Path(__file__).parent.parent / "docs" / "torch-models.md"
X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1, 4))

SCALE = """
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x * self.scale

    build = Scale
"""


def module_of(forward: str) -> str:
    """The source of a factory of a module without weights; `forward` is its body."""
    body = textwrap.indent(textwrap.dedent(forward).strip(), " " * 8)
    return f"class build(torch.nn.Module):\n    def forward(self, **inputs):\n{body}\n"


def rows(num_rows: int, first: float = 0.0) -> NDArray[np.float32]:
    return np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4) + np.float32(first)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of the model `m`."""
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    return folder


def opened(
    folder: Path,
    source: str,
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    inputs: Sequence[TensorSpec] = (X,),
    outputs: Sequence[TensorSpec] = (Y,),
    factory: str = "factory:build",
    **options: Any,
) -> TorchBackend:
    """The model of a factory, which is written beside its weights."""
    (folder / "factory.py").write_text("import torch\n" + textwrap.dedent(source))
    save_file(dict(weights or {}), folder / "model.safetensors")
    return TorchBackend(
        folder / "model.safetensors",
        factory=factory,
        inputs=inputs,
        outputs=outputs,
        label="models/m/1/model.safetensors",
        trust_model_code=True,
        **options,
    )


def load_error(folder: Path, source: str, *arguments: Any, **options: Any) -> str:
    """Why a model is not opened: one line without the place of the repository or our names."""
    before = set(sys.modules)
    with pytest.raises(ModelLoadError) as caught:
        opened(folder, source, *arguments, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder.parents[2]) not in text
    assert "hotshelf_model" not in text
    assert not {name for name in set(sys.modules) - before if name.startswith("hotshelf_model")}
    return text.removeprefix("models/m/1/model.safetensors: ")


def run_error(backend: TorchBackend, inputs: Mapping[str, Array] | None = None) -> str:
    with pytest.raises(BackendError) as caught:
        backend.run(inputs or {"x": rows(2)}, [spec.name for spec in backend.outputs])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_takes_the_shape_it_gets(folder: Path) -> None:
    backend = opened(folder, SCALE, {"scale": torch.tensor([1.0, 2, 3, 4])})
    for num_rows in (64, 5, 1, 0):
        outputs = backend.run({"x": rows(num_rows)}, ["y"])
        np.testing.assert_array_equal(outputs["y"], rows(num_rows) * [1, 2, 3, 4])
        assert outputs["y"].dtype == np.float32
    assert (backend.platform, backend.takes_device_arrays) == ("torch_safetensors", False)
    assert (backend.inputs, backend.outputs) == ((X,), (Y,))
    assert repr(backend) == "<TorchBackend 1 inputs, 1 outputs>"


def test_the_module_evaluates_without_gradients(folder: Path) -> None:
    source = """
        class build(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(4))
                self.dropout = torch.nn.Dropout(0.99)

            def forward(self, x):
                assert torch.is_inference_mode_enabled() and not self.scale.requires_grad
                return self.dropout(x * self.scale)
    """
    backend = opened(folder, source, {"scale": torch.ones(4)})
    np.testing.assert_array_equal(backend.run({"x": rows(9)}, ["y"])["y"], rows(9))


@pytest.mark.parametrize("datatype", sorted(set(DATATYPE_TO_DTYPE) - {"BYTES"}))
@pytest.mark.parametrize("is_read_only", [True, False])
def test_every_datatype_comes_back_bit_for_bit(
    folder: Path, datatype: str, is_read_only: bool
) -> None:
    backend = opened(
        folder,
        module_of("return inputs['x']"),
        inputs=[TensorSpec("x", datatype, (-1, 4))],
        outputs=[TensorSpec("y", datatype, (-1, 4))],
    )
    dtype = DATATYPE_TO_DTYPE[datatype]
    content = np.random.default_rng(7).bytes(12 * dtype.itemsize)
    if datatype == "BOOL":
        content = bytes(byte % 2 for byte in content)
    x = np.frombuffer(content, dtype).reshape(3, 4)
    x = x if is_read_only else x.copy()
    y = backend.run({"x": x}, ["y"])["y"]
    assert (y.dtype, y.shape, y.tobytes()) == (dtype, (3, 4), content)
    assert not np.shares_memory(x, y)
    assert backend.run({"x": x[:0]}, ["y"])["y"].shape == (0, 4)


def test_bfloat16_is_computed(folder: Path) -> None:
    backend = opened(
        folder,
        module_of("return inputs['x'] + 1"),
        inputs=[TensorSpec("x", "BF16", (-1, 4))],
        outputs=[TensorSpec("y", "BF16", (-1, 4))],
    )
    x = rows(2).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(backend.run({"x": x}, ["y"])["y"], x + 1, strict=True)


def test_a_body_is_never_written_to(folder: Path) -> None:
    backend = opened(folder, module_of("return inputs['x'].add_(1)"))
    body = b"{" + rows(3).tobytes()
    x = np.frombuffer(body, np.float32, offset=1).reshape(3, 4)
    assert not x.flags.aligned
    np.testing.assert_array_equal(backend.run({"x": x}, ["y"])["y"], rows(3, 1.0))
    assert body == b"{" + rows(3).tobytes()


def test_writable_inputs_are_used_in_place(folder: Path) -> None:
    backend = opened(folder, module_of("return inputs['x'].add_(1)"))
    x = rows(3)
    y = backend.run({"x": x}, ["y"])["y"]
    np.testing.assert_array_equal(x, rows(3, 1.0))
    assert not np.shares_memory(x, y)


def test_a_weight_that_is_an_output_is_copied(folder: Path) -> None:
    source = SCALE.replace("x * self.scale", "self.scale.expand(len(x), 4)")
    backend = opened(folder, source, {"scale": torch.ones(4)})
    first = backend.run({"x": rows(2)}, ["y"])["y"]
    assert first.flags.c_contiguous
    first[:] = -1
    np.testing.assert_array_equal(backend.run({"x": rows(2)}, ["y"])["y"], np.ones((2, 4)))
    backend.close()
    backend.close()
    np.testing.assert_array_equal(first, -np.ones((2, 4)))


@pytest.mark.parametrize(
    "result",
    [
        "{'b': x + 2, 'a': x + 1, 'hidden': None}",
        "(x + 1, x + 2)",
        "[x + 1, x + 2]",
        "(x + 1, (x + 2).t().contiguous().t())",
    ],
)
def test_results_by_name_or_in_order(folder: Path, result: str) -> None:
    specs = [TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "FP32", (-1, -1))]
    backend = opened(folder, module_of(f"x = inputs['x']\nreturn {result}"), outputs=specs)
    outputs = backend.run({"x": rows(2)}, ["b", "a"])
    np.testing.assert_array_equal(outputs["a"], rows(2, 1.0))
    np.testing.assert_array_equal(outputs["b"], rows(2, 2.0))
    assert outputs["b"].flags.c_contiguous
    assert list(backend.run({"x": rows(2)}, ["b"])) == ["b"]
    assert backend.run({"x": rows(2)}, []) == {}


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("(x, x)", "the module returned 2 tensors, expected 1: y"),
        ("{'z': x, 'w': x}", "the module returned z, w, without y"),
        ("{}", "the module returned none, without y"),
        ("None", "the module returned NoneType, expected a tensor, a tuple or a dict"),
        ("{'y': 3}", "output 'y' is int, expected a tensor"),
        ("x.double()", "output 'y' is FP64 [2, 4], expected FP32 [-1, 4]"),
        ("x[:, :2]", "output 'y' is FP32 [2, 2], expected FP32 [-1, 4]"),
        ("x.sum()", "output 'y' is FP32 [], expected FP32 [-1, 4]"),
        ("x * 1j", "output 'y' is torch.complex64 [2, 4], expected FP32 [-1, 4]"),
        ("x.to_sparse()", "output 'y' is torch.sparse_coo, expected a dense tensor"),
        ("x.to('meta')", "output 'y' is on meta, expected cpu"),
    ],
)
def test_a_result_that_does_not_fit(folder: Path, result: str, reason: str) -> None:
    backend = opened(folder, module_of(f"x = inputs['x']\nreturn {result}"))
    assert run_error(backend) == reason


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise ValueError('first\\nsecond')", "ValueError: first"),
        ("raise KeyError", "KeyError"),
        ("inputs['z']", "KeyError: 'z'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('panic')", "BaseException: panic"),  # as one of Rust
        ("inputs['x'] @ torch.zeros(3)", "RuntimeError: size mismatch"),
    ],
)
def test_an_exception_of_the_module_is_one_line(
    folder: Path, statement: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(folder, module_of(statement))
    text = run_error(backend)
    assert text.startswith(reason)
    assert "Traceback" not in text
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "models/m/1/model.safetensors: a run failed"
    assert "factory.py" in caplog.text  # the stack is for the log


def test_runs_of_several_threads_do_not_meet(folder: Path) -> None:
    backend = opened(folder, module_of("return inputs['x'] + 1"))

    def run(seed: int) -> bool:
        x = np.full((seed % 7 + 1, 4), seed, np.float32)
        return bool((backend.run({"x": x}, ["y"])["y"] == x + 1).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))


def test_a_run_waits_for_its_inputs(folder: Path) -> None:
    backend = opened(folder, module_of("return inputs['x'] + 1"))
    copy = LateCopy(rows(2))
    outputs = backend.run({"x": copy.array}, ["y"], after=[copy])
    np.testing.assert_array_equal(outputs["y"], rows(2, 1.0))


# ---- Trust and formats


def test_without_trust_nothing_is_imported(folder: Path) -> None:
    (folder / "factory.py").write_text("raise SystemExit")
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        TorchBackend(folder / "model.safetensors", factory="factory:build", inputs=[X], outputs=[Y])
    assert str(caught.value) == (
        "model.safetensors: factory 'factory:build' is Python code that would run in the server; "
        "start it with --trust-model-code if you trust that code"
    )


@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("name", ["model.pt", "model.pt2", "weights.pth", "model.safetensors"])
@pytest.mark.parametrize("kind", ["torch.save", "old torch.save", "TorchScript", "pt2"])
def test_formats_that_can_run_code_are_refused(
    folder: Path, name: str, kind: str, trust: bool
) -> None:
    module = torch.nn.Linear(2, 2)
    path = folder / name
    if kind == "pt2":
        program = torch.export.export(module, (torch.zeros(1, 2),))
        with path.open("wb") as file:
            torch.export.save(program, file)
    elif kind == "TorchScript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(torch.jit.script(module), str(path))
    else:
        torch.save(module.state_dict(), path, _use_new_zipfile_serialization=kind == "torch.save")
    with pytest.raises(ModelLoadError) as caught:
        TorchBackend(
            folder / "model.safetensors",
            factory="factory:build",
            inputs=[X],
            outputs=[Y],
            trust_model_code=trust,
        )
    assert str(caught.value).startswith(f"model.safetensors: {name} is of torch.save, TorchScript ")
    assert "so it is never loaded" in str(caught.value)


def test_a_header_may_begin_as_a_pickle_does(folder: Path) -> None:
    opened(folder, SCALE, {"scale": torch.ones(4)}).close()
    path = folder / "model.safetensors"
    for length in range(0, 128, 8):  # the file begins with the length of its header
        save_file({"scale": torch.ones(4)}, path, {"note": "x" * length})
        if path.read_bytes().startswith(b"\x80"):
            break
    assert path.read_bytes().startswith(b"\x80")
    backend = TorchBackend(
        path, factory="factory:build", inputs=[X], outputs=[Y], trust_model_code=True
    )
    np.testing.assert_array_equal(backend.run({"x": rows(2)}, ["y"])["y"], rows(2))


# ---- Factories


@pytest.mark.parametrize(
    ("source", "factory", "reason"),
    [
        (SCALE, "nowhere:build", "ModuleNotFoundError: No module named 'nowhere'"),
        (SCALE, "factory:made", "AttributeError: module 'factory' has no attribute 'made'"),
        (SCALE, "factory:torch", "TypeError: 'module' object is not callable"),
        (SCALE, "factory:dict", "AttributeError: module 'factory' has no attribute 'dict'"),
        ("build = dict", "factory:build", "returned dict, expected a torch.nn.Module"),
        ("1 / 0", "factory:build", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "factory:build", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "factory:build", "KeyboardInterrupt"),
        ("raise BaseException('panic')", "factory:build", "BaseException: panic"),
        ("def build(size): pass", "factory:build", "TypeError: build() missing 1 required"),
        ("x x", "factory:build", "SyntaxError: invalid syntax (factory.py, line 2)"),
        (
            "from .layers import none",
            "factory:build",
            "ImportError: cannot import name 'none' from 'layers' (layers.py)",
        ),
        (
            "from layers import Tower",
            "factory:build",
            "ModuleNotFoundError: No module named 'layers'; files beside the model are imported "
            "with a dot: from . import ...",
        ),
    ],
)
def test_a_factory_that_fails_is_named(
    folder: Path, source: str, factory: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "layers.py").write_text("")
    text = load_error(folder, source, factory=factory)
    assert text.startswith(f"factory {factory!r}: {reason}")
    if reason.startswith("Zero"):
        assert 'factory.py", line 2' in caplog.text


def test_models_do_not_meet_each_others_modules(folder: Path) -> None:
    path, meta_path, before = list(sys.path), list(sys.meta_path), set(sys.modules)
    backends = []
    for number in (1, 2):
        other = folder.parents[1] / f"m{number}" / "1"
        other.mkdir(parents=True)
        (other / "layers.py").write_text(f"def add(x): return x + {number}")
        source = "from .layers import add\n" + module_of(
            "from . import layers\nreturn layers.add(add(inputs['x']))"
        )
        backends.append(opened(other, source))
    for number, backend in enumerate(backends, start=1):
        y = backend.run({"x": rows(2)}, ["y"])["y"]
        np.testing.assert_array_equal(y, rows(2, 2.0 * number))
    assert not {"factory", "layers"} & set(sys.modules)
    assert (sys.path, sys.meta_path) == (path, meta_path)
    for backend in backends:
        backend.close()
    assert not [name for name in set(sys.modules) - before if name.startswith("hotshelf_model")]


def test_the_module_may_lie_in_a_package_of_the_model_folder(folder: Path) -> None:
    package = folder.parent / "scorers"
    package.mkdir()
    (package / "__init__.py").write_text("from .layers import ADD")
    (package / "layers.py").write_text("ADD = 5")
    (package / "small.py").write_text(
        "import torch\nfrom . import ADD\n" + module_of("return inputs['x'] + ADD")
    )
    backend = opened(folder, "", factory="scorers.small:build")
    np.testing.assert_array_equal(backend.run({"x": rows(2)}, ["y"])["y"], rows(2, 5.0))


def test_a_file_beside_the_model_comes_before_an_installed_one(folder: Path) -> None:
    (folder / "models.py").write_text("import torch\n" + module_of("return inputs['x'] + 1"))
    backend = opened(folder, "", factory="models:build")
    np.testing.assert_array_equal(backend.run({"x": rows(1)}, ["y"])["y"], rows(1, 1.0))
    assert sys.modules["models"].__name__ == "models"
    assert sys.modules["models.torch_backend"] is models.torch_backend


def test_an_installed_factory(folder: Path) -> None:
    spec = TensorSpec("input", "FP32", (-1, 4))
    backend = opened(folder, "", factory="torch.nn:Identity", inputs=[spec])
    np.testing.assert_array_equal(backend.run({"input": rows(2)}, ["y"])["y"], rows(2))


def test_a_reload_reads_the_code_anew(folder: Path) -> None:
    old = opened(folder, module_of("return inputs['x'] + 1"))
    new = opened(folder, module_of("return inputs['x'] + 20"))
    assert old.run({"x": rows(1)}, ["y"])["y"][0, 0] == 1
    assert new.run({"x": rows(1)}, ["y"])["y"][0, 0] == 20


def test_forward_must_take_the_inputs(folder: Path) -> None:
    spec = TensorSpec("z", "FP32", (-1, 4))
    text = load_error(folder, SCALE, {"scale": torch.ones(4)}, inputs=[X, spec])
    assert text == (
        "factory 'factory:build': the inputs are x, z, but forward takes x: "
        "got an unexpected keyword argument 'z'"
    )


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ([TensorSpec("x", "BYTES", (-1,))], [Y], "input 'x' is BYTES, which torch cannot hold"),
        ([X], [TensorSpec("y", "BYTES", (-1,))], "output 'y' is BYTES, which torch cannot hold"),
        ([X, X], [Y], "input 'x' is listed twice"),
    ],
)
def test_specs_that_cannot_be_served(
    folder: Path, inputs: list[TensorSpec], outputs: list[TensorSpec], reason: str
) -> None:
    assert load_error(folder, SCALE, inputs=inputs, outputs=outputs) == reason


# ---- Weights


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({}, "missing: scale"),
        ({"scale": torch.ones(4), "other": torch.ones(1)}, "unexpected: other"),
        ({"scale": torch.ones(5)}, "of another shape: scale [5], expected [4]"),
        (
            {"scale": torch.ones(4, dtype=torch.float16)},
            "of another dtype: scale float16, expected float32",
        ),
        (
            {f"w{i}": torch.ones(1) for i in range(7)},
            "missing: scale; unexpected: w0, w1, w2, w3, w4 and 2 more",
        ),
    ],
)
def test_weights_must_fit(folder: Path, weights: dict[str, torch.Tensor], reason: str) -> None:
    assert load_error(folder, SCALE, weights) == f"the weights do not fit the module: {reason}"


def test_a_module_without_memory_is_refused(folder: Path) -> None:
    source = SCALE + "\n    def meta():\n        return Scale().to('meta')\n"
    text = load_error(folder, source, {"scale": torch.ones(4)}, factory="factory:meta")
    assert text == "the weights do not fit the module: without memory (device meta): scale"


def test_tied_weights_are_once_in_the_file(folder: Path) -> None:
    source = """
        class build(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(4, 4)
                self.second = torch.nn.Linear(4, 4)
                self.second.weight = self.first.weight

            def forward(self, x):
                return self.second(self.first(x))
    """
    weight = torch.eye(4) * 2
    biases = {"first.bias": torch.zeros(4), "second.bias": torch.ones(4)}
    backend = opened(folder, source, {"first.weight": weight, **biases})
    np.testing.assert_array_equal(backend.run({"x": rows(2)}, ["y"])["y"], rows(2) * 4 + 1)
    text = load_error(folder, source, {"first.weight": weight, "second.bias": torch.ones(4)})
    assert text == "the weights do not fit the module: missing: first.bias"


def test_weights_may_be_half(folder: Path) -> None:
    source = SCALE.replace("build = Scale", "def build(): return Scale().to(torch.bfloat16)")
    backend = opened(
        folder,
        source,
        {"scale": torch.full((4,), 0.5, dtype=torch.bfloat16)},
        inputs=[TensorSpec("x", "BF16", (-1, 4))],
        outputs=[TensorSpec("y", "BF16", (-1, 4))],
    )
    x = rows(2).astype(ml_dtypes.bfloat16)
    y = backend.run({"x": x}, ["y"])["y"]
    np.testing.assert_array_equal(y.astype(np.float32), rows(2) / 2)


@pytest.mark.parametrize("size", [0, 4, 20, 100])
def test_a_file_that_is_cut_short(folder: Path, size: int) -> None:
    opened(folder, SCALE, {"scale": torch.ones(4)}).close()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1][:size])
    with pytest.raises(ModelLoadError) as caught:
        TorchBackend(path, factory="factory:build", inputs=[X], outputs=[Y], trust_model_code=True)
    assert "is not a safetensors file, or is cut short (" in str(caught.value)
    assert str(folder) not in str(caught.value)


def test_the_file_may_be_overwritten_while_it_is_served(folder: Path) -> None:
    backend = opened(folder, SCALE, {"scale": torch.ones(4)})
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(0)
    np.testing.assert_array_equal(backend.run({"x": rows(2)}, ["y"])["y"], rows(2))


def test_a_shape_that_no_tensor_can_have(folder: Path) -> None:
    opened(folder, SCALE, {"scale": torch.ones(4)}).close()
    header = json.dumps({"scale": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}})
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(ModelLoadError, match=r"^model.safetensors: cannot be read as safetensors "):
        TorchBackend(path, factory="factory:build", inputs=[X], outputs=[Y], trust_model_code=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (Path.mkdir, "is not a regular file, expected a safetensors file"),
        # Opening it would wait for a writer for ever.
        (os.mkfifo, "is not a regular file, expected a safetensors file"),
    ],
    ids=["nothing", "folder", "pipe"],
)
def test_what_is_no_file(folder: Path, make: Callable[[Path], None], reason: str) -> None:
    path = folder / "model.safetensors"
    make(path)
    with pytest.raises(ModelLoadError, match=f"^model.safetensors: {reason}$"):
        TorchBackend(path, factory="factory:build", inputs=[X], outputs=[Y], trust_model_code=True)


# ---- A GPU's streams and memory, without one


class LateCopy:
    """An array whose content comes only when its event is waited for."""

    def __init__(self, content: Array) -> None:
        self.array = np.full_like(content, -1)
        self._content = content

    def wait(self) -> None:
        self.array[...] = self._content


class TorchOnDouble:
    """In the place of `TorchCuda`: torch works at once, in host memory, in the stream's order."""

    torch_device = torch.device("cpu")

    def __init__(self, machine: Machine, stream_pointer: int) -> None:
        self.calls: list[object] = []
        self.num_done = 0
        self._machine = machine
        self._stream_pointer = stream_pointer

    def limit_memory(self, max_bytes: int) -> None:
        self.calls.append(max_bytes)

    @contextmanager
    def on_compute_stream(self) -> Iterator[None]:
        self.calls.append("begin")
        self._machine.run_until_now(self._stream_pointer)
        try:
            yield
        finally:
            self._machine.enqueue(self._stream_pointer, self._finish)
            self.calls.append("end")

    def load(self, module: torch.nn.Module) -> torch.nn.Module:
        self.calls.append("load")
        return module

    def release(self) -> None:
        self.calls.append("release")

    def _finish(self) -> None:
        self.num_done += 1


class Gpu(CudaDevice):
    """A GPU of the double, whose memory is joined by that of torch while it is read."""

    def __init__(self) -> None:
        self.machine = Machine(MachineConfig())
        cupy = cupy_of(self.machine)
        super().__init__(0, max_bytes=MIB, max_host_bytes=MIB, cupy=cupy)
        self.budget.charge("slab", 200)
        self.budget.charge("model:m:1", 100)
        self.torch: TorchOnDouble | None = None
        self.buffers: list[Buffers] = []

    def cuda(self, index: int, stream_pointer: int) -> TorchOnDouble:
        assert index == self.index
        self.torch = TorchOnDouble(self.machine, stream_pointer)
        return self.torch

    def opened(self, folder: Path, source: str, **options: Any) -> TorchBackend:
        return opened(folder, source, device=self, cuda=self.cuda, **options)

    def put(self, array: Array) -> tuple[Any, list[Event]]:
        """The array on the device, and when it is there."""
        self.buffers.append(self.new_buffers())
        return self.buffers[-1].put("x", [array]), [self.buffers[-1].copied()]

    def read_back(
        self, sources: Sequence[tuple[int, tuple[int, ...], np.dtype[Any]]]
    ) -> list[Array]:
        # These take the memory of the sources again, if that was freed.
        others = [[torch.full(shape, 1e9) for _ in range(9)] for _, shape, _ in sources]
        allocated = self.machine.memory.allocated
        sizes = {address: int(np.prod(shape)) * dtype.itemsize for address, shape, dtype in sources}
        for address, size in sizes.items():
            if size:
                allocated.add(Range(address, size, self.index))
        arrays = super().read_back(sources)
        for address in sizes:
            allocated.remove(address)
        del others
        return arrays


def test_a_run_on_a_gpu_is_enqueued_after_its_inputs(folder: Path) -> None:
    gpu = Gpu()
    free_bytes = gpu.budget.max_bytes - 200
    backend = gpu.opened(folder, module_of("return inputs['x'].t().contiguous().t() + 1"))
    assert backend.takes_device_arrays
    for num_rows in (3, 0, 1):
        x, copied = gpu.put(rows(num_rows))
        outputs = backend.run({"x": x}, ["y"], after=copied)
        np.testing.assert_array_equal(outputs["y"], rows(num_rows, 1.0), strict=True)
    assert backend.run({"x": x}, []) == {}
    backend.close()
    backend.close()
    assert gpu.torch is not None
    assert gpu.torch.calls == [free_bytes, "load", *["begin", "end"] * 4, "release"]
    gpu.machine.check()


def test_inputs_of_a_gpu_are_used_in_place(folder: Path) -> None:
    gpu = Gpu()
    backend = gpu.opened(folder, module_of("return inputs['x'].add_(1)"))
    x, copied = gpu.put(rows(3))
    y = backend.run({"x": x}, ["y"], after=copied)["y"]
    np.testing.assert_array_equal(y, rows(3, 1.0))
    again = backend.run({"x": x}, ["y"])["y"]
    np.testing.assert_array_equal(again, rows(3, 2.0))
    np.testing.assert_array_equal(y, rows(3, 1.0))


@pytest.mark.parametrize("datatype", sorted(set(DATATYPE_TO_DTYPE) - {"BYTES"}))
def test_datatypes_on_a_gpu(folder: Path, datatype: str) -> None:
    gpu = Gpu()
    backend = gpu.opened(
        folder,
        module_of("return inputs['x']"),
        inputs=[TensorSpec("x", datatype, (-1,))],
        outputs=[TensorSpec("y", datatype, (-1,))],
    )
    content = np.array([0, 1, 1], DATATYPE_TO_DTYPE[datatype])
    x, copied = gpu.put(content)
    y = backend.run({"x": x}, ["y"], copied)["y"]
    np.testing.assert_array_equal(y, content, strict=True)


@pytest.mark.parametrize("result", ["inputs['z']", "inputs['x'].double()"])
def test_a_failed_run_on_a_gpu_leaves_nothing_enqueued(folder: Path, result: str) -> None:
    gpu = Gpu()
    backend = gpu.opened(folder, module_of(f"return {result}"))
    x, _ = gpu.put(rows(2))
    run_error(backend, {"x": x})
    assert gpu.torch is not None
    assert gpu.torch.num_done == 1


def test_a_torch_without_cuda_says_so(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    text = load_error(folder, SCALE, {"scale": torch.ones(4)}, device=Gpu())
    assert text.startswith("torch cannot use cuda:0 (")
    assert text.endswith("); install a torch with CUDA, or serve this model with --device cpu")


def test_the_calls_of_torch_cuda_fit_its_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that is used exists, and is called as the installed torch declares it."""
    tree = ast.parse(inspect.getsource(models.torch_places))
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    }
    functions = names - {"ExternalStream"}
    doubles = {name: mock.create_autospec(getattr(torch.cuda, name)) for name in functions}
    doubles["ExternalStream"] = mock.create_autospec(torch.cuda.ExternalStream.__new__)
    for name, double in doubles.items():
        monkeypatch.setattr(torch.cuda, name, double)
    stream: Any = torch.cuda.ExternalStream
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda *args, **options: stream(None, *args, **options)
    )
    doubles["get_device_properties"].return_value.total_memory = 1000
    cuda = TorchCuda(1, 77)
    cuda.limit_memory(250)
    cuda.limit_memory(4000)
    cuda.on_compute_stream()
    module = mock.create_autospec(torch.nn.Module, instance=True)
    assert cuda.load(module) is module.to.return_value
    cuda.release()
    device = torch.device("cuda", 1)
    doubles["ExternalStream"].assert_called_once_with(None, 77, device=device)
    limit = doubles["set_per_process_memory_fraction"]
    assert limit.mock_calls == [mock.call(0.25, device), mock.call(1.0, device)]
    module.to.assert_called_once_with(device)
    for name, double in doubles.items():
        assert double.called, f"torch.cuda.{name} was not tried"


# ---- The option


@pytest.mark.parametrize(
    ("arguments", "environment", "content", "is_trusted"),
    [
        ([], None, "", False),
        (["--trust-model-code"], None, "", True),
        (["--trust-model-code"], "no", "", True),
        ([], "yes", "", True),
        ([], "no", "trust_model_code: true", False),
        ([], None, "trust_model_code: true", True),
        ([], None, "trust_model_code: yes", True),
        ([], None, "trust_model_code: 'no'", False),
        ([], None, "trust_model_code: false", False),
    ],
)
def test_where_trust_is_given(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environment: str | None,
    content: str,
    is_trusted: bool,
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr("server.service.serve", served.append)
    if environment is not None:
        monkeypatch.setenv("HOTSHELF_TRUST_MODEL_CODE", environment)
    config = tmp_path / "config.yaml"
    config.write_text(content)
    # A flag takes no value, not even the model that follows it.
    assert main(["serve", "--config", str(config), *arguments, "m.onnx"]) == 0
    (settings,) = served
    assert (settings.trust_model_code, settings.model_file) == (is_trusted, Path("m.onnx"))


def test_trust_is_yes_or_no() -> None:
    with pytest.raises(SettingsError, match="trust_model_code: expected yes or no, got '1'"):
        read_settings({"repository": "r"}, {"HOTSHELF_TRUST_MODEL_CODE": "1"})


# ---- In a repository


@pytest.fixture
def device() -> Device:
    return open_device("cpu", max_bytes=64 * MIB, max_host_bytes=64 * MIB)


DLRM = """
import torch
from torch import nn


class Dlrm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.top = nn.Sequential(
            nn.Linear(16 + 351, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1), persistent=False)

    def forward(self, dense, embeddings):
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None, :], embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        return {"score": torch.sigmoid(self.top(torch.cat([bottom, pairs], dim=1)))}
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small demo, and its model once more as `dlrm_torch`."""
    root = tmp_path_factory.mktemp("dlrm") / "demo"
    write_demo(root, num_rows=5000, seed=3)
    folder = root / "models" / "dlrm_torch" / "1"
    folder.mkdir(parents=True)
    weights = {}
    for name, array in dlrm_weights(16, seed=3).items():
        part, layer, kind = name.split("_")
        weights[f"{part}.{2 * int(layer)}.{kind}"] = torch.from_numpy(array).t().contiguous()
    save_file(weights, folder / "model.safetensors")
    (folder / "net.py").write_text(DLRM)
    config = yaml.safe_load((root / "models" / "dlrm" / "model.yaml").read_text())
    config |= {
        "backend": "torch",
        "factory": "net:Dlrm",
        "inputs": [
            {"name": "dense", "datatype": "FP32", "shape": [-1, 13]},
            {"name": "embeddings", "datatype": "FP32", "shape": [-1, 26, 16]},
        ],
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1, 1]}],
    }
    (folder.parent / "model.yaml").write_text(yaml.safe_dump(config))
    return root


def features(root: Path, num_rows: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(5)
    sizes = [table.num_rows for table in read_tables(root / "tables")]
    keys = np.stack([rng.integers(0, size, num_rows) for size in sizes], axis=1)
    return rng.standard_normal((num_rows, 13), dtype=np.float32), keys


def test_the_demo_in_torch_equals_the_onnx_model(demo: Path, device: Device) -> None:
    opened_tables = FeatureCache.open(
        demo / "tables", device, table_memory_bytes=MIB, host_memory_bytes=32 * MIB
    )
    with closing(opened_tables) as cache:
        repository = ModelRepository(
            demo, tables=cache.tables, device=device, trust_model_code=True
        )
        (model,) = repository.open("dlrm_torch")
        assert [spec.name for spec in model.request_inputs] == ["dense", "keys"]
        dense, keys = features(demo, 40)
        embeddings = np.empty((40, NUM_TABLES, 16), np.float32)
        (feature,) = model.features
        with cache.frame() as frame:
            out = embeddings.reshape(-1, 16)
            frame.lookup([Lookup(feature.tables, keys.reshape(-1), out)])
            inputs = {"dense": dense, "embeddings": embeddings}
            score = model.backend.run(inputs, ["score"], frame.events())["score"]
        model.close()
    expected = onnxruntime_scores(demo, dense, gather(demo, keys))
    np.testing.assert_allclose(score, expected, atol=1e-5)
    assert device.budget.charges().get("model:dlrm_torch:1") is None


def test_the_demo_in_torch_over_http(demo: Path) -> None:
    dense, keys = features(demo, 7)
    with running_server(demo, "--trust-model-code", "--table-memory", "1MiB") as server:
        inputs: dict[str, Array] = {"dense": dense, "keys": keys}
        scores = [
            post(f"{server.url}/v2/models/{name}/infer", inputs, "score")[0]
            for name in ("dlrm", "dlrm_torch")
        ]
        metadata = server.get_json("/v2/models/dlrm_torch")
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)
    assert metadata["platform"] == "torch_safetensors"


def test_a_repository_that_is_not_trusted(demo: Path, device: Device) -> None:
    tables = {table.name: table for table in read_tables(demo / "tables")}
    repository = ModelRepository(demo, tables=tables, device=device)
    with pytest.raises(ModelLoadError, match="start it with --trust-model-code") as caught:
        repository.open("dlrm_torch")
    assert str(caught.value).startswith("models/dlrm_torch/1/model.safetensors: ")
    assert not [owner for owner in device.budget.charges() if owner.startswith("model:")]
    (model,) = repository.open("dlrm")
    model.close()


def test_the_example_of_the_documentation(tmp_path: Path, device: Device) -> None:
    blocks = re.findall(
        r"^```(\w+)\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    factory, save = [text for language, text in blocks if language == "python"]
    (config,) = [text for language, text in blocks if language == "yaml"]
    folder = tmp_path / "models" / "scorer" / "1"
    folder.mkdir(parents=True)
    (folder / "factory.py").write_text(factory)
    (folder.parent / "model.yaml").write_text(config)
    names: dict[str, Any] = {}
    exec(factory, names)  # in a training script the module would be there
    torch.manual_seed(0)
    module = names["build"]()
    exec(save.replace('"model', f'"{folder}/model'), {"module": module})
    users = np.random.default_rng(0).standard_normal((10, 16), dtype=np.float32)
    write_table(tmp_path / "tables" / "users", [users], dim=16)
    tables = {table.name: table for table in read_tables(tmp_path / "tables")}
    repository = ModelRepository(tmp_path, tables=tables, device=device, trust_model_code=True)
    (model,) = repository.open("scorer")
    assert [spec.name for spec in model.request_inputs] == ["user_id", "item"]
    item = np.ones((10, 8), np.float32)
    score = model.backend.run({"user": users, "item": item}, ["score"])["score"]
    with torch.no_grad():
        expected = module(torch.from_numpy(users), torch.from_numpy(item)).numpy()
    np.testing.assert_allclose(score, expected, atol=1e-6)
