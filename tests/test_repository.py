"""The model repository: layouts, names, versions, faults on disk, and charges."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from cache import Device, Table, open_device
from models.errors import ModelConfigError, ModelLoadError, ModelNotFoundError
from models.repository import LoadedModel, ModelRepository
from models.tensor_spec import TensorSpec
from tests import model_zoo

MIB = 2**20


@pytest.fixture
def device() -> Device:
    return open_device("cpu", max_bytes=64 * MIB, max_host_bytes=MIB)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    return root


@pytest.fixture
def repository(root: Path, device: Device) -> ModelRepository:
    return ModelRepository(root, tables={}, device=device)


def charges(device: Device) -> dict[str, int]:
    """The models' charges; the device's own reserve is left out."""
    ledger = device.budget.charges().items()
    return {owner: size for owner, size in ledger if owner.startswith("model:")}


def answer(model: LoadedModel) -> float:
    """What an `add1` model gives for 0."""
    outputs = model.backend.run({"x": np.zeros((1, 4), np.float32)}, ["y"])
    return float(outputs["y"][0, 0])


def load_error(repository: ModelRepository, name: str) -> str:
    """The reason why a model is not opened: one line, without the place of the repository."""
    with pytest.raises(ModelLoadError) as caught:
        repository.open(name)
    text = str(caught.value)
    assert "\n" not in text
    assert "/repository/" not in text
    return text


def test_a_model_without_configuration(root: Path, repository: ModelRepository) -> None:
    model_zoo.add1(root)
    (model,) = repository.open("add1")
    assert (model.name, model.version, model.max_batch_size) == ("add1", "1", 64)
    assert model.request_inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    assert model.outputs == (TensorSpec("y", "FP32", (-1, 4)),)
    assert model.features == ()
    assert answer(model) == 1.0
    model.close()


def test_names_are_looked_up_anew(root: Path, repository: ModelRepository) -> None:
    assert repository.names() == []
    model_zoo.add1(root, name="b")
    model_zoo.add1(root, name="a")
    (root / "models" / ".git").mkdir()
    (root / "models" / "README.md").write_text("not a model")
    assert repository.names() == ["a", "b"]


def test_latest_and_specific_versions(root: Path, repository: ModelRepository) -> None:
    for version in ("1", "2", "10"):
        model_zoo.add1(root, version=version, increment=float(version))
    for other in ("0", "01", "x", "-1", "1e0", " 1"):
        (root / "models" / "add1" / other).mkdir()
    assert repository.versions("add1") == ["1", "2", "10"]

    def served(**policy: object) -> list[str]:
        model_zoo.add1(root, versions=policy)
        models = repository.open("add1")
        for model in models:
            model.close()
        return [model.version for model in models]

    assert [answer(model) for model in repository.open("add1")] == [10.0]
    assert served(latest=2) == ["2", "10"]
    assert served(latest=99) == ["1", "2", "10"]
    assert served(specific=[2, 1, 2]) == ["1", "2"]
    with pytest.raises(ModelConfigError) as caught:
        served(specific=[2, 3])
    expected = "models/add1/model.yaml: versions: no folder for 3; there are 1, 2, 10"
    assert str(caught.value) == expected


def test_triton_layout_is_served_as_it_is(
    root: Path, repository: ModelRepository, caplog: pytest.LogCaptureFixture
) -> None:
    written = model_zoo.add1(root)
    written.parents[1].rename(root / "add1")
    (root / "models").rmdir()
    (root / "add1" / "config.pbtxt").write_text('platform: "onnxruntime_onnx"')
    (root / "tables" / "users").mkdir(parents=True)
    (root / "docs").mkdir()
    assert repository.names() == ["add1"]
    with caplog.at_level(logging.WARNING):
        (model,) = repository.open("add1")
    assert answer(model) == 1.0
    assert "add1: config.pbtxt is ignored" in caplog.text
    with pytest.raises(ModelNotFoundError):
        repository.open("tables")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("ranker.onnx", "ranker"),
        ("my.model.v2.onnx", "my.model.v2"),
        ("ranker/model.onnx", "ranker"),
        ("ranker/3/model.onnx", "ranker"),
        ("ranker/3/other.onnx", "other"),
    ],
)
def test_a_single_file_is_served(tmp_path: Path, device: Device, path: str, name: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(model_zoo.add1_model().SerializeToString())
    repository = ModelRepository.single_file(file, tables={}, device=device)
    assert repository.names() == [name]
    assert repository.versions(name) == ["1"]
    (model,) = repository.open(name)
    assert (model.name, model.version, answer(model)) == (name, "1", 1.0)
    with pytest.raises(ModelNotFoundError, match="unknown model 'x'"):
        repository.open("x")


def test_a_single_file_that_is_missing(tmp_path: Path, device: Device) -> None:
    repository = ModelRepository.single_file(tmp_path / "no.onnx", tables={}, device=device)
    assert load_error(repository, "no") == "no.onnx: No such file or directory"


ILLEGAL_NAMES = [
    "../secret", "..", ".", "", "/etc", "a/../secret", "..\\secret", "add1/1", "add1/", "./add1",
    "a\0b", "a" * 300, "é" * 200, "%2e%2e%2fsecret", ".hidden", "\udcff", "link",
]  # fmt: skip


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", ILLEGAL_NAMES)
def test_names_do_not_leave_the_repository(
    root: Path, repository: ModelRepository, name: str, exists: bool
) -> None:
    model_zoo.add1(root)
    outside = root.parent / "secret"
    if exists:
        model_zoo.add1(outside, name="secret")
    (root / "models" / "link").symlink_to(outside / "models" / "secret")
    calls: list[Callable[[str], object]] = [repository.open, repository.versions]
    for call in calls:
        with pytest.raises(ModelNotFoundError) as caught:
            call(name)
        assert str(caught.value) == f"unknown model {name[:100] + '...' * (len(name) > 100)!r}"
    assert repository.names() == ["add1"]


@pytest.mark.parametrize("name", ["con fig", "modèle", "a" * 255, "-1", "100%"])
def test_unusual_names_are_fine(root: Path, repository: ModelRepository, name: str) -> None:
    model_zoo.add1(root, name=name)
    assert repository.names() == [name]
    assert answer(repository.open(name)[0]) == 1.0


def test_links_inside_the_repository_are_followed(root: Path, repository: ModelRepository) -> None:
    model_zoo.add1(root)
    (root / "models" / "alias").symlink_to("add1")
    assert repository.names() == ["add1", "alias"]
    assert answer(repository.open("alias")[0]) == 1.0


@pytest.mark.parametrize("exists", [True, False])
def test_links_out_of_the_repository_are_refused(
    root: Path, repository: ModelRepository, exists: bool
) -> None:
    path = model_zoo.add1(root)
    outside = root.parent / "outside"
    (root / "models" / "add1" / "2").symlink_to(outside)
    if exists:
        outside.mkdir()
        path.rename(outside / "model.onnx")
    else:
        path.unlink()
    path.symlink_to(outside / "model.onnx")
    assert repository.versions("add1") == ["1"]
    expected = "models/add1/1/model.onnx: is a link that leaves the repository"
    assert load_error(repository, "add1") == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, I am not a model\n", "is not an ONNX model, or is cut short"),
        (model_zoo.add1_model().SerializeToString()[:60], "is not an ONNX model, or is cut short"),
        (b"PK\3\4" + bytes(100), "is not an ONNX model, or is cut short"),
        (
            onnx.ModelProto(ir_version=8).SerializeToString(),
            "is not an ONNX model: it has no graph",
        ),
    ],
)
def test_a_broken_file_and_its_repair(
    root: Path, repository: ModelRepository, device: Device, content: bytes, reason: str
) -> None:
    path = model_zoo.add1(root)
    path.write_bytes(content)
    for _ in range(2):
        assert load_error(repository, "add1") == f"models/add1/1/model.onnx: {reason}"
    assert charges(device) == {}
    model_zoo.add1(root)
    assert answer(repository.open("add1")[0]) == 1.0


def test_a_missing_model_file_and_a_folder_in_its_place(
    root: Path, repository: ModelRepository
) -> None:
    path = model_zoo.add1(root)
    path.unlink()
    expected = "models/add1/1/model.onnx: No such file or directory"
    assert load_error(repository, "add1") == expected
    path.mkdir()
    expected = "models/add1/1/model.onnx: is a folder, expected an ONNX file"
    assert load_error(repository, "add1") == expected


def test_a_model_without_versions(root: Path, repository: ModelRepository) -> None:
    (root / "models" / "empty").mkdir(parents=True)
    assert repository.names() == ["empty"]
    assert load_error(repository, "empty") == (
        "model empty: has no version folder, such as empty/1"
    )


def test_lost_and_found_is_a_model_only_with_versions(
    root: Path, repository: ModelRepository
) -> None:
    (root / "models" / "lost+found").mkdir(parents=True)
    assert repository.names() == []
    with pytest.raises(ModelNotFoundError):
        repository.open("lost+found")
    model_zoo.add1(root, name="lost+found")
    assert repository.names() == ["lost+found"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_told(root: Path, repository: ModelRepository) -> None:
    locked = model_zoo.add1(root).parent.parent
    for mode, error in ((0o000, "add1: Permission denied"), (0o400, "add1: Permission denied")):
        locked.chmod(mode)
        assert repository.names() == ["add1"]
        with pytest.raises(ModelLoadError) as caught:
            repository.versions("add1")
        assert str(caught.value) == error
        assert load_error(repository, "add1") == error
        locked.chmod(0o700)


def external_model(location: str, num_values: int = 1024) -> bytes:
    """`y` = `x` + weights, which lie in the file `location`."""
    model = model_zoo.build(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])],
        [model_zoo.value("x", "FP32", ["batch", num_values])],
        [model_zoo.value("y", "FP32", ["batch", num_values])],
        w=np.arange(num_values, dtype=np.float32),
    )
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(np.arange(num_values, dtype=np.float32), "w"))
    onnx.external_data_helper.set_external_data(tensor, location, offset=0, length=4 * num_values)
    tensor.ClearField("raw_data")
    return bytes(model.SerializeToString())


def test_external_data_is_read_and_charged(
    root: Path, repository: ModelRepository, device: Device
) -> None:
    path = model_zoo.add1(root)
    path.write_bytes(external_model("weights/w.bin"))
    (path.parent / "weights").mkdir()
    (path.parent / "weights" / "w.bin").write_bytes(np.arange(1024, dtype=np.float32).tobytes())
    (model,) = repository.open("add1")
    y = model.backend.run({"x": np.ones((1, 1024), np.float32)}, ["y"])["y"]
    np.testing.assert_array_equal(y[0], np.arange(1024) + 1)
    assert charges(device) == {"model:add1:1": path.stat().st_size + 4096}


def test_a_missing_external_file_is_named(root: Path, repository: ModelRepository) -> None:
    model_zoo.add1(root).write_bytes(external_model("gone.bin"))
    expected = "models/add1/1/model.onnx: the external data file 'gone.bin' is missing"
    assert load_error(repository, "add1") == expected


def test_external_data_inside_a_loop_is_found(root: Path, repository: ModelRepository) -> None:
    model = model_zoo.slow_model()
    body = next(node for node in model.graph.node if node.op_type == "Loop").attribute[0].g
    tensor = numpy_helper.from_array(np.zeros(4, np.int64), "w")
    onnx.external_data_helper.set_external_data(tensor, "gone.bin")
    tensor.ClearField("raw_data")
    body.node.append(onnx.helper.make_node("Constant", [], ["c"], value=tensor))
    model_zoo.write(root, "slow", model)
    assert "external data file 'gone.bin' is missing" in load_error(repository, "slow")


def test_a_short_external_file_is_told(root: Path, repository: ModelRepository) -> None:
    path = model_zoo.add1(root)
    path.write_bytes(external_model("w.bin"))
    (path.parent / "w.bin").write_bytes(bytes(10))
    assert load_error(repository, "add1").startswith("models/add1/1/model.onnx: ")


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    "location", ["../w.bin", "../../../../w.bin", "/etc/hostname", "", "link.bin", ".", "a\0b"]
)
def test_external_data_does_not_leave_the_folder(
    root: Path, repository: ModelRepository, location: str, exists: bool
) -> None:
    path = model_zoo.add1(root)
    path.write_bytes(external_model(location))
    (path.parent / "link.bin").symlink_to(root.parent / "w.bin")
    if exists:
        (path.parents[1] / "w.bin").write_bytes(bytes(4096))
        (root.parent / "w.bin").write_bytes(bytes(4096))
    assert load_error(repository, "add1") == (
        f"models/add1/1/model.onnx: external data {location!r} "
        "is not a file in the folder of the model"
    )


def test_a_wrong_configuration_names_its_file(root: Path, repository: ModelRepository) -> None:
    model_zoo.add1(root, max_batchsize=8)
    assert load_error(repository, "add1") == (
        "models/add1/model.yaml: unknown field 'max_batchsize', did you mean 'max_batch_size'?"
    )
    model_zoo.add1(root, inputs=[{"name": "x", "datatype": "INT64", "shape": [-1, 4]}])
    assert load_error(repository, "add1") == (
        "models/add1/model.yaml: inputs: 'x': datatype is FP32 in the file, got INT64 "
        "(models/add1/1/model.onnx)"
    )


def table(name: str, dim: int = 4) -> Table:
    return Table(name, 10, dim, 0.0, False, Path("rows.bin"))


def with_tables(root: Path, device: Device, tables: Mapping[str, Table]) -> ModelRepository:
    return ModelRepository(root, tables=tables, device=device)


def test_feature_inputs_are_fed_by_keys(root: Path, device: Device) -> None:
    model_zoo.sum_features(root, ["a", "b"])
    repository = with_tables(root, device, {"a": table("a"), "b": table("b")})
    (model,) = repository.open("sum_features")
    assert model.request_inputs == (TensorSpec("keys", "INT64", (-1, 2)),)
    (feature,) = model.features
    assert feature.spec == TensorSpec("embeddings", "FP32", (-1, 2, 4))
    assert (feature.tables, feature.dim) == (("a", "b"), 4)


def test_an_unknown_table_is_named_with_the_known_ones(root: Path, device: Device) -> None:
    model_zoo.sum_features(root, "c")
    repository = with_tables(root, device, {"b": table("b"), "a": table("a")})
    assert load_error(repository, "sum_features") == (
        "models/sum_features/model.yaml: features: input 'embeddings': unknown table 'c'; "
        "known tables: a, b (models/sum_features/1/model.onnx)"
    )
    assert charges(device) == {}


def test_weights_are_charged_until_the_model_is_closed(
    root: Path, repository: ModelRepository, device: Device
) -> None:
    size = model_zoo.add1(root).stat().st_size
    (old,) = repository.open("add1")
    (new,) = repository.open("add1")
    assert charges(device) == {"model:add1:1": 2 * size}
    old.close()
    old.close()
    assert charges(device) == {"model:add1:1": size}
    assert answer(new) == 1.0
    new.close()
    assert charges(device) == {}


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(root: Path) -> None:
    size = model_zoo.add1(root).stat().st_size
    device = open_device("cpu", max_bytes=size - 1, max_host_bytes=MIB, reserve_fraction=0.0)
    repository = ModelRepository(root, tables={}, device=device)
    text = load_error(repository, "add1")
    assert text.startswith("models/add1/1/model.onnx: ")
    assert f"{size} bytes" in text
    assert f"{size - 1}" in text


def test_opening_is_all_or_nothing(root: Path, repository: ModelRepository, device: Device) -> None:
    model_zoo.add1(root, versions={"latest": 2})
    model_zoo.add1(root, version="2", versions={"latest": 2}).write_bytes(b"junk")
    assert "models/add1/2/model.onnx: " in load_error(repository, "add1")
    assert charges(device) == {}


def test_the_configuration_in_tritons_shape(root: Path, repository: ModelRepository) -> None:
    model_zoo.identity(root, "BYTES", request_timeout_ms=20)
    (model,) = repository.open("id_bytes")
    assert model.triton_config() == {
        "name": "id_bytes",
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_STRING", "dims": []}],
        "output": [{"name": "y", "data_type": "TYPE_STRING", "dims": []}],
        "default_model_filename": "model.onnx",
        "model_transaction_policy": {"decoupled": False},
        "dynamic_batching": {
            "max_queue_delay_microseconds": 100_000,
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": 20_000,
                "max_queue_size": 1024,
            },
        },
    }
    model_zoo.unbatched(root, versions={"specific": [1]})
    (model,) = repository.open("unbatched")
    config = model.triton_config()
    assert config["max_batch_size"] == 0
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [2, 3]}]
    assert config["version_policy"] == {"specific": {"versions": [1]}}
    assert "dynamic_batching" not in config


def write_torch_model(root: Path) -> Path:
    """`y` = `x` * w, FP32 [-1,4], with w = 3 in the file of the weights."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = root / "models" / "scale" / "1"
    folder.mkdir(parents=True)
    (folder / "scale.py").write_text(
        "import torch\n"
        "class Scale(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.zeros(()))\n"
        "    def forward(self, x):\n"
        "        return x * self.w\n"
    )
    (folder.parent / "model.yaml").write_text(
        "backend: torch\n"
        "factory: scale:Scale\n"
        "inputs: [{name: x, datatype: FP32, shape: [-1, 4]}]\n"
        "outputs: [{name: y, datatype: FP32, shape: [-1, 4]}]\n"
    )
    safetensors.save_file({"w": np.array(3, np.float32)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_torch_model_is_opened_where_its_code_is_trusted(root: Path, device: Device) -> None:
    pytest.importorskip("torch")
    path = write_torch_model(root)
    trusting = ModelRepository(root, tables={}, device=device, trust_model_code=True)
    (model,) = trusting.open("scale")
    outputs = model.backend.run({"x": np.ones((2, 4), np.float32)}, ["y"])
    np.testing.assert_array_equal(outputs["y"], np.full((2, 4), 3, np.float32))
    assert charges(device) == {"model:scale:1": path.stat().st_size}
    config = model.triton_config()
    assert (config["backend"], config["default_model_filename"]) == ("torch", "model.safetensors")
    model.close()
    careful = ModelRepository(root, tables={}, device=device)
    assert "start it with --trust-model-code" in load_error(careful, "scale")
    assert charges(device) == {}


def test_a_torch_model_without_weights(root: Path, repository: ModelRepository) -> None:
    write_torch_model(root).unlink()
    expected = "models/scale/1/model.safetensors: No such file or directory"
    assert load_error(repository, "scale") == expected


@pytest.mark.parametrize("package", ["onnxruntime", "torch"])
def test_a_backend_whose_package_is_missing(
    root: Path, device: Device, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_torch_model(root)
    model_zoo.add1(root)
    monkeypatch.setitem(sys.modules, package, None)
    for module in [
        name for name in sys.modules if name.startswith(("models.torch_", "models.onnx_"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    repository = ModelRepository(root, tables={}, device=device, trust_model_code=True)
    name = "add1" if package == "onnxruntime" else "scale"
    assert f"the {package} backend needs the package {package}; " in load_error(repository, name)
    assert charges(device) == {}


def test_providers_of_a_gpu_on_a_cpu(root: Path, repository: ModelRepository) -> None:
    model_zoo.add1(root, providers=["cuda"])
    assert load_error(repository, "add1") == (
        "models/add1/model.yaml: providers: 'cuda' needs a GPU, but the device is the cpu; start "
        "with --device cuda:0, or leave 'providers' out (models/add1/1/model.onnx)"
    )
    model_zoo.add1(root, providers=["cpu"])
    assert answer(repository.open("add1")[0]) == 1.0
