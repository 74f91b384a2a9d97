"""The ONNX Runtime backend: binding, datatypes, copies and errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper

from models.errors import BackendError, InvalidInputError, ModelConfigError, ModelLoadError
from models.onnx_backend import OnnxBackend
from models.spec import ProviderEntry
from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec
from tests import model_zoo

Array = NDArray[Any]


def rows(num_rows: int, first: float = 0.0) -> NDArray[np.float32]:
    return np.arange(num_rows * 4, dtype=np.float32).reshape(num_rows, 4) + np.float32(first)


def opened(tmp_path: Path, model: onnx.ModelProto) -> OnnxBackend:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return OnnxBackend(path)


def node(operator: str, inputs: Sequence[str], output: str) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, [output])


def test_a_run_binds_the_shape_it_gets(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.add1(tmp_path))
    for num_rows in (64, 5, 1, 64, 0):
        outputs = backend.run({"x": rows(num_rows)}, ["y"])
        np.testing.assert_array_equal(outputs["y"], rows(num_rows, 1.0), strict=True)


def test_specs_come_from_the_file(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.sum_features(tmp_path, "t"))
    assert backend.platform == "onnxruntime_onnx"
    assert backend.inputs == (TensorSpec("embeddings", "FP32", (-1, -1, 4)),)
    assert backend.outputs == (
        TensorSpec("rows", "FP32", (-1, -1, 4)),
        TensorSpec("sum", "FP32", (-1, 4)),
    )
    assert repr(backend) == "<OnnxBackend 1 inputs, 2 outputs>"


@pytest.mark.parametrize("datatype", sorted(set(DATATYPE_TO_DTYPE) - {"BYTES"}))
def test_every_datatype_comes_back_bit_for_bit(tmp_path: Path, datatype: str) -> None:
    backend = OnnxBackend(model_zoo.identity(tmp_path, datatype))
    assert backend.inputs == (TensorSpec("x", datatype, (-1, 4)),)
    dtype = DATATYPE_TO_DTYPE[datatype]
    content = np.random.default_rng(7).bytes(12 * dtype.itemsize)
    if datatype == "BOOL":
        content = bytes(byte % 2 for byte in content)
    x = np.frombuffer(content, dtype).reshape(3, 4)
    y = backend.run({"x": x}, ["y"])["y"]
    assert (y.dtype, y.shape, y.tobytes()) == (dtype, (3, 4), content)
    assert backend.run({"x": x[:0]}, ["y"])["y"].shape == (0, 4)


@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
def test_unknown_inner_dimensions_are_left_to_onnx_runtime(tmp_path: Path, datatype: str) -> None:
    shape = ["batch", "width"]
    model = model_zoo.build(
        [node("Identity", ["x"], "y")],
        [model_zoo.value("x", datatype, shape)],
        [model_zoo.value("y", datatype, shape)],
    )
    backend = opened(tmp_path, model)
    for num_rows, width in ((2, 3), (1, 5), (0, 3), (2, 0)):
        x = np.arange(num_rows * width).reshape(num_rows, width).astype(DATATYPE_TO_DTYPE[datatype])
        y = backend.run({"x": x}, ["y"])["y"]
        np.testing.assert_array_equal(y, x, strict=True)
        assert not np.shares_memory(x, y)


def test_only_what_is_asked_for_is_computed(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.two_inputs(tmp_path))
    inputs = {"a": rows(2), "b": rows(2, 5.0)}
    assert list(backend.run(inputs, ["b_out"])) == ["b_out"]
    assert set(backend.run(inputs, ["b_out", "a_out"])) == {"a_out", "b_out"}
    assert backend.run(inputs, []) == {}


def test_an_output_that_is_an_input_is_copied(tmp_path: Path) -> None:
    model = model_zoo.build(
        [node("Identity", ["x"], "y")],
        [model_zoo.value("x", "FP32", ["batch", 4])],
        [model_zoo.value("x", "FP32", ["batch", 4]), model_zoo.value("y", "FP32", ["batch", 4])],
    )
    backend = opened(tmp_path, model)
    x = rows(2)
    for names in (["x"], ["x", "y"]):
        outputs = backend.run({"x": x}, names)
        assert list(outputs) == names
        for y in outputs.values():
            np.testing.assert_array_equal(y, x)
            assert not np.shares_memory(x, y)


def test_an_output_that_is_a_weight_is_copied(tmp_path: Path) -> None:
    model = model_zoo.build(
        [node("Identity", ["x"], "y")],
        [model_zoo.value("x", "FP32", ["batch", 4])],
        [model_zoo.value("y", "FP32", ["batch", 4]), model_zoo.value("w", "FP32", [2])],
        w=np.array([3, 4], np.float32),
    )
    backend = opened(tmp_path, model)
    first = backend.run({"x": rows(1)}, ["w"])["w"]
    first[:] = -1
    np.testing.assert_array_equal(backend.run({"x": rows(1)}, ["w"])["w"], [3, 4])


def test_a_model_may_return_other_rows_than_it_got(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.wrong_rows(tmp_path))
    np.testing.assert_array_equal(backend.run({"x": rows(3)}, ["y"])["y"], rows(2))


def test_scalars_and_fixed_shapes(tmp_path: Path) -> None:
    model = model_zoo.build(
        [node("Neg", ["x"], "y")],
        [model_zoo.value("x", "INT32", [])],
        [model_zoo.value("y", "INT32", [])],
    )
    backend = opened(tmp_path, model)
    assert backend.run({"x": np.array(7, np.int32)}, ["y"])["y"] == -7
    fixed = OnnxBackend(model_zoo.unbatched(tmp_path))
    assert fixed.outputs == (TensorSpec("y", "FP32", (2, 3)),)
    assert fixed.run({"x": np.zeros((2, 3), np.float32)}, ["y"])["y"].tolist() == [[1.0] * 3] * 2


def test_inputs_may_be_views_of_a_body(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.add1(tmp_path))
    body = b"{" + rows(3).tobytes()
    x = np.frombuffer(body, np.float32, offset=1).reshape(3, 4)
    assert not x.flags.aligned
    assert not x.flags.writeable
    np.testing.assert_array_equal(backend.run({"x": x}, ["y"])["y"], rows(3, 1.0))


def as_bytes(*elements: bytes) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def test_bytes_are_exact(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.identity(tmp_path, "BYTES"))
    x = as_bytes(b"", b"a\0b\0", "modèle ✓".encode(), b"x" * 100_000)
    y = backend.run({"x": x}, ["y"])["y"]
    assert y.tolist() == x.tolist()
    assert backend.run({"x": x[:0]}, ["y"])["y"].shape == (0,)
    with pytest.raises(InvalidInputError, match="input 'x': element 1 is not UTF-8"):
        backend.run({"x": as_bytes(b"a", b"\xff")}, ["y"])


def test_a_failed_run_says_why_and_the_next_one_works(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.gather(tmp_path))
    with pytest.raises(BackendError, match="idx=99 must be within") as caught:
        backend.run({"idx": np.array([3, 99])}, ["y"])
    assert "ONNXRuntimeError" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert backend.run({"idx": np.array([3])}, ["y"])["y"].tolist() == [[12, 13, 14, 15]]


def test_a_failed_run_is_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = OnnxBackend(model_zoo.gather(tmp_path))
    with pytest.raises(BackendError):
        backend.run({"idx": np.array([99])}, ["y"])
    assert capfd.readouterr() == ("", "")


def test_runs_of_several_threads_do_not_meet(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.add1(tmp_path))

    def run(seed: int) -> bool:
        x = np.full((seed % 7 + 1, 4), seed, np.float32)
        return bool((backend.run({"x": x}, ["y"])["y"] == x + 1).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(400)))


def test_results_outlive_the_backend(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.two_dims(tmp_path))
    y = backend.run({"x": rows(2)}, ["y"])["y"]
    backend.close()
    backend.close()
    np.testing.assert_array_equal(y, rows(2))


def test_the_slow_model_returns_what_it_got(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.slow(tmp_path))
    n = np.array([[model_zoo.slow_iterations(0.05)], [3]])
    np.testing.assert_array_equal(backend.run({"n": n}, ["n_out"])["n_out"], n)
    assert backend.run({"n": n[:0]}, ["n_out"])["n_out"].shape == (0, 1)


def test_types_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("y", onnx.TensorProto.FLOAT, ["batch"])
    model = model_zoo.build(
        [node("SequenceConstruct", ["x"], "y")],
        [model_zoo.value("x", "FP32", ["batch"])],
        [sequence],
    )
    with pytest.raises(ModelLoadError, match=r"model.onnx: output 'y' has type seq\(tensor"):
        opened(tmp_path, model)


def test_bytes_and_bfloat16_in_one_model_are_refused(tmp_path: Path) -> None:
    model = model_zoo.build(
        [node("Identity", [letter], f"{letter}_out") for letter in "ab"],
        [model_zoo.value("a", "BYTES", ["batch"]), model_zoo.value("b", "BF16", ["batch"])],
        [model_zoo.value("a_out", "BYTES", ["batch"]), model_zoo.value("b_out", "BF16", ["batch"])],
    )
    with pytest.raises(ModelLoadError, match="BYTES and BF16"):
        opened(tmp_path, model)


def test_what_onnx_runtime_refuses_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = model_zoo.add1_model()
    model.graph.node[0].op_type = "Nonsense"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelLoadError) as caught:
        OnnxBackend(path, label="models/m/1/model.onnx")
    text = str(caught.value)
    assert text.startswith("models/m/1/model.onnx: ")
    assert "Nonsense" in text
    assert "\n" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("providers", "fault"),
    [
        (
            ["cuda"],
            "'cuda' needs a GPU, but the device is the cpu; start with --device cuda:0, or ",
        ),
        ([{"tensorrt": {}}], "'tensorrt' needs a GPU, but the device is the cpu"),
        (["CUDAExecutionProvider"], "'CUDAExecutionProvider' needs a GPU"),
        (["gpu"], "unknown provider 'gpu'; installed are "),
        (["cpu", "CPUExecutionProvider"], "'cpu' is listed twice"),
    ],
)
def test_providers_that_a_cpu_does_not_have(
    tmp_path: Path, providers: list[ProviderEntry], fault: str
) -> None:
    with pytest.raises(ModelConfigError) as caught:
        OnnxBackend(model_zoo.add1(tmp_path), providers=providers)
    assert str(caught.value).startswith(f"providers: {fault}")


@pytest.mark.parametrize("name", ["cpu", "CPUExecutionProvider"])
@pytest.mark.parametrize("cpu_fallback", [False, True])
def test_the_cpu_may_be_named(tmp_path: Path, name: str, cpu_fallback: bool) -> None:
    path = model_zoo.add1(tmp_path)
    backend = OnnxBackend(path, providers=[name], cpu_fallback=cpu_fallback)
    assert not backend.takes_device_arrays
    np.testing.assert_array_equal(backend.run({"x": rows(2)}, ["y"])["y"], rows(2, 1.0))


REMOTE = "AzureExecutionProvider"  # of the package for the CPU; it runs no operator of ONNX


@pytest.mark.skipif(
    REMOTE not in onnxruntime.get_available_providers(), reason=f"{REMOTE} is not installed"
)
def test_nodes_that_a_provider_cannot_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = model_zoo.slow(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        OnnxBackend(path, label="m/1/model.onnx", providers=[REMOTE])
    text = str(caught.value)
    assert text.startswith(
        f"m/1/model.onnx: {REMOTE} cannot run all of the model, or would be slower than the CPU: "
        "ONNX Runtime leaves "
    )
    assert "Loop ''" in text
    assert "set cpu_fallback: true in model.yaml" in text
    with caplog.at_level(logging.WARNING):
        backend = OnnxBackend(path, label="m/1/model.onnx", providers=[REMOTE], cpu_fallback=True)
    (message,) = caplog.messages
    assert message.startswith("m/1/model.onnx: ONNX Runtime runs ")
    assert message.endswith(" on the CPU")
    n = np.array([[3]])
    np.testing.assert_array_equal(backend.run({"n": n}, ["n_out"])["n_out"], n)


def test_inputs_are_waited_for(tmp_path: Path) -> None:
    backend = OnnxBackend(model_zoo.add1(tmp_path))
    x = rows(2, -5.0)

    class Arrival:
        """An event of rows that are written when it is waited for."""

        def wait(self) -> None:
            x[:] = rows(2)

    np.testing.assert_array_equal(backend.run({"x": x}, ["y"], [Arrival()])["y"], rows(2, 1.0))
