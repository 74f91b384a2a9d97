"""`model.yaml`: its fields, its faults, and how it joins with a model file and tables."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from cache import Table
from cache.config import ConfigError, load_yaml
from cache.table import TableConfig
from models.errors import ModelConfigError
from models.spec import FeatureInput, ModelConfig, ModelSignature, resolve
from models.tensor_spec import DATATYPE_TO_DTYPE, TensorSpec

DOCUMENT = Path(__file__).parents[1] / "docs" / "model-repository.md"

X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1, 4))


def table(name: str, dim: int = 16) -> Table:
    return Table(name, 10, dim, 0.0, False, Path("rows.bin"))


TABLES = {"users": table("users"), "items": table("items"), "wide": table("wide", dim=1)}


def config(**fields: object) -> ModelConfig:
    return ModelConfig.model_validate(fields)


def features(*entries: Mapping[str, object], **fields: object) -> ModelConfig:
    return config(features=list(entries), **fields)


def fed(spec: TensorSpec, **entry: object) -> FeatureInput:
    """The one feature input of a model with the input `spec`."""
    signature = resolve(features({"input": spec.name, **entry}), [spec], [Y], TABLES)
    (feature,) = signature.features
    assert signature.request_inputs == (feature.keys,)
    return feature


def load(tmp_path: Path, text: str) -> ModelConfig:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    return load_yaml(path, ModelConfig, name="models/m/model.yaml")


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        yield from nested_fields(field.annotation)


def nested_fields(annotation: object) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from fields_of(annotation)
    for argument in typing.get_args(annotation):
        yield from nested_fields(argument)


def test_every_field_is_documented() -> None:
    names = set(fields_of(ModelConfig))
    assert {"max_batch_size", "latest", "datatype", "tables"} <= names
    document = DOCUMENT.read_text()
    assert [name for name in sorted(names) if f"| `{name}` |" not in document] == []


def test_every_documented_example_is_valid(tmp_path: Path) -> None:
    models, tables = DOCUMENT.read_text().split("## Feature tables")
    assert [load(tmp_path, block) for block in yaml_blocks(models)]
    for block in yaml_blocks(tables):
        path = tmp_path / "table.yaml"
        path.write_text(block)
        load_yaml(path, TableConfig)


def yaml_blocks(text: str) -> list[str]:
    return [block.split("```")[0] for block in text.split("```yaml\n")[1:]]


def test_every_datatype_of_the_protocol_can_be_given() -> None:
    for datatype in DATATYPE_TO_DTYPE:
        tensor = {"name": "x", "datatype": datatype, "shape": [-1]}
        given = config(inputs=[tensor]).inputs
        assert given is not None
        assert given[0].datatype == datatype


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing yet\n") == ModelConfig()
    assert ModelConfig().max_queue_size == 1024


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "max_batchsize: 8",
            "unknown field 'max_batchsize', did you mean 'max_batch_size'?",
        ),
        (
            "features: [{input: x, tabel: users}]",
            "unknown field 'features.0.tabel', did you mean 'table'?",
        ),
        ("max_batch_size: -1", "max_batch_size: "),
        ("max_batch_size: '8'", "max_batch_size: "),
        ("max_batch_size: true", "max_batch_size: "),
        ("max_queue_delay_ms: .inf", "max_queue_delay_ms: "),
        ("max_queue_delay_ms: 1.0e+13", "max_queue_delay_ms: "),
        ("request_timeout_ms: 86400001", "request_timeout_ms: "),
        ("max_queue_size: 0", "max_queue_size: "),
        ("backend: pytorch", "backend: "),
        ("backend: torch", "backend torch needs 'factory', such as 'my_models:build_ranker'"),
        (
            "{backend: torch, factory: 'm:f'}",
            "backend torch needs 'inputs' and 'outputs': its file names none",
        ),
        ("factory: 'm:f'", "'factory' is a field of the backend torch"),
        (
            "{backend: torch, factory: m}",
            "expected module:callable, such as my_models:build_ranker",
        ),
        ("{backend: torch, factory: 'm.f'}", "factory: "),
        ("{backend: torch, factory: '../m:f'}", "factory: "),
        ("{backend: torch, factory: 'm.py:'}", "factory: "),
        ('{backend: torch, factory: "m:f\\n"}', "factory: "),
        ("providers: cuda", "providers: "),
        ("providers: []", "providers: "),
        ("providers: [1]", "providers.0: expected a name, or one name with its options"),
        ("providers: [{cuda: {}, tensorrt: {}}]", "providers.0: expected a name, or"),
        ("providers: [{tensorrt: {trt_op_types_to_exclude: [Add]}}]", "providers.0: expected a"),
        ("cpu_fallback: 1", "cpu_fallback: "),
        ("versions: {}", "versions: expected one of 'latest' and 'specific'"),
        ("versions: {latest: 1, specific: [1]}", "expected one of 'latest' and 'specific'"),
        ("versions: {latest: 0}", "versions.latest: "),
        ("versions: {specific: []}", "versions.specific: "),
        ("features: [{input: x}]", "features.0: expected one of 'table' and 'tables'"),
        ("features: [{input: x, table: a, tables: [b]}]", "expected one of 'table' and 'tables'"),
        ("features: [{table: a}]", "field 'features.0.input' is missing"),
        ("inputs: [{name: x, datatype: fp32, shape: [4]}]", "inputs.0.datatype: "),
        ("inputs: [{name: x, datatype: FP32, shape: [-2]}]", "inputs.0.shape.0: "),
    ],
)
def test_a_fault_is_one_line_that_names_file_and_field(
    tmp_path: Path, text: str, fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    line = str(caught.value)
    assert "models/m/model.yaml: " in line
    assert fault in line
    assert "\n" not in line


def test_providers_are_names_or_names_with_options(tmp_path: Path) -> None:
    text = "providers: [{tensorrt: {trt_fp16_enable: true, trt_max_workspace_size: 1024}}, cuda]"
    options = {"trt_fp16_enable": True, "trt_max_workspace_size": 1024}
    assert load(tmp_path, text).providers == [{"tensorrt": options}, "cuda"]
    assert load(tmp_path, "providers: [{cuda: {}}]").providers == [{"cuda": {}}]


def torch_config(**fields: object) -> ModelConfig:
    tensors = {"inputs": [given("x", "FP32", -1, 4)], "outputs": [given("y", "FP32", -1, 4)]}
    return config(backend="torch", factory="my.models:build_ranker", **tensors, **fields)


def test_a_torch_model_names_its_tensors() -> None:
    torch = torch_config()
    assert torch.factory == "my.models:build_ranker"
    assert [tensor.spec for tensor in torch.inputs or ()] == [X]
    assert [tensor.spec for tensor in torch.outputs or ()] == [Y]


@pytest.mark.parametrize("field", ["providers", "cpu_fallback", "intra_op_threads"])
def test_fields_of_onnx_runtime_are_not_for_torch(field: str) -> None:
    values = {"providers": ["cpu"], "cpu_fallback": False, "intra_op_threads": 1}
    with pytest.raises(ValueError, match=f"'{field}' is a field of the backend onnxruntime"):
        torch_config(**{field: values[field]})


def test_whole_numbers_of_milliseconds_are_fine(tmp_path: Path) -> None:
    assert load(tmp_path, "max_queue_delay_ms: 5").max_queue_delay_ms == 5.0


def test_free_first_dimensions_are_batched_by_default() -> None:
    expected = ModelSignature(64, (X,), (Y,), ())
    assert resolve(ModelConfig(), [X], [Y], {}) == expected


@pytest.mark.parametrize("shape", [(2, 4), (), (1, -1)])
def test_a_fixed_first_dimension_anywhere_means_no_batching(shape: tuple[int, ...]) -> None:
    fixed = TensorSpec("z", "FP32", shape)
    assert resolve(ModelConfig(), [X, fixed], [Y], {}).max_batch_size == 0
    assert resolve(ModelConfig(), [X], [Y, fixed], {}).max_batch_size == 0
    assert resolve(config(max_batch_size=0), [X], [Y, fixed], {}).max_batch_size == 0
    with pytest.raises(ModelConfigError, match=r"max_batch_size: 8 needs a free first .* 'z'"):
        resolve(config(max_batch_size=8), [X], [Y, fixed], {})


@pytest.mark.parametrize("max_batch_size", [0, 1, 8])
def test_a_given_max_batch_size_is_taken(max_batch_size: int) -> None:
    signature = resolve(config(max_batch_size=max_batch_size), [X], [Y], {})
    assert signature.max_batch_size == max_batch_size


def test_a_model_without_inputs_is_not_batched() -> None:
    assert resolve(ModelConfig(), [], [Y], {}).max_batch_size == 0
    with pytest.raises(ModelConfigError, match="without inputs"):
        resolve(config(max_batch_size=8), [], [Y], {})


def given(name: str, datatype: str, *shape: int) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def test_given_inputs_may_fix_what_is_free_in_the_file() -> None:
    free = TensorSpec("x", "FP32", (-1, -1))
    signature = resolve(config(inputs=[given("x", "FP32", -1, 3)]), [free], [Y], {})
    assert signature.request_inputs == (TensorSpec("x", "FP32", (-1, 3)),)


def test_given_inputs_keep_the_order_of_the_file() -> None:
    entries = [given("z", "FP32", -1), given("x", "FP32", -1, 4)]
    z = TensorSpec("z", "FP32", (-1,))
    assert resolve(config(inputs=entries), [X, z], [Y], {}).request_inputs == (X, z)


@pytest.mark.parametrize(
    ("field", "entry", "fault"),
    [
        ("inputs", given("a", "FP32", -1, 4), r"inputs: expected \['x'\] as in the file"),
        ("inputs", given("x", "INT64", -1, 4), "inputs: 'x': datatype is FP32 in the file"),
        ("inputs", given("x", "FP32", -1, 5), r"inputs: 'x': shape is \[-1, 4\] in the file"),
        ("inputs", given("x", "FP32", -1, -1), r"inputs: 'x': shape is \[-1, 4\] in the file"),
        ("inputs", given("x", "FP32", -1), r"inputs: 'x': shape is \[-1, 4\] .* got \[-1\]"),
        ("outputs", given("x", "FP32", -1, 4), r"outputs: expected \['y'\] as in the file"),
        ("outputs", given("y", "FP16", -1, 4), "outputs: 'y': datatype is FP32 in the file"),
    ],
)
def test_given_tensors_that_do_not_fit_the_file(
    field: str, entry: dict[str, object], fault: str
) -> None:
    with pytest.raises(ModelConfigError, match=fault):
        resolve(config(**{field: [entry]}), [X], [Y], {})


def test_one_table_feeds_an_input_of_any_rank() -> None:
    feature = fed(TensorSpec("e", "FP32", (-1, 5, 7, 16)), table="users", keys="k")
    assert feature.keys == TensorSpec("k", "INT64", (-1, 5, 7))
    assert (feature.tables, feature.dim) == (("users",), 16)
    assert fed(TensorSpec("e", "FP32", (-1, 16)), table="users").keys.shape == (-1,)


def test_keys_have_the_name_of_the_input_unless_given() -> None:
    assert fed(TensorSpec("e", "FP32", (-1, 16)), table="users").keys.name == "e"


def test_free_dimensions_of_a_fed_input_take_the_tables_sizes() -> None:
    feature = fed(TensorSpec("e", "FP32", (-1, -1, -1)), tables=["users", "items"])
    assert feature.spec.shape == (-1, 2, 16)
    assert feature.keys == TensorSpec("e", "INT64", (-1, 2))
    assert feature.tables == ("users", "items")


def test_keys_stand_where_the_fed_input_stood() -> None:
    e = TensorSpec("e", "FP32", (-1, 16))
    signature = resolve(features({"input": "e", "table": "users"}), [e, X], [Y], TABLES)
    assert signature.request_inputs == (TensorSpec("e", "INT64", (-1,)), X)


def test_two_inputs_may_share_their_keys() -> None:
    deep, wide = TensorSpec("deep", "FP32", (-1, 3, 16)), TensorSpec("wide", "FP32", (-1, 3, 1))
    entries = [
        {"input": "deep", "keys": "ids", "table": "users"},
        {"input": "wide", "keys": "ids", "table": "wide"},
    ]
    signature = resolve(features(*entries), [deep, wide], [Y], TABLES)
    assert signature.request_inputs == (TensorSpec("ids", "INT64", (-1, 3)),)
    assert [feature.dim for feature in signature.features] == [16, 1]


def test_a_model_without_batch_dimension_is_fed_too() -> None:
    e = TensorSpec("e", "FP32", (2, 16))
    entry: dict[str, object] = {"input": "e", "tables": ["users", "items"]}
    (feature,) = resolve(features(entry), [e], [Y], TABLES).features
    assert feature.keys.shape == (2,)


E = TensorSpec("e", "FP32", (-1, 2, 16))


@pytest.mark.parametrize(
    ("spec", "entry", "fault"),
    [
        (E, {"table": "nope"}, "unknown table 'nope'; known tables: items, users, wide"),
        (E, {"tables": ["users", "nope"]}, "unknown table 'nope'"),
        (E, {"tables": ["users", "wide"]}, "same dim, but 'users' has 16 and 'wide' has 1"),
        (E, {"table": "wide"}, r"expected FP32 \[..., 1\], got FP32 \[-1, 2, 16\]"),
        (E, {"tables": ["users"]}, r"expected FP32 \[..., 1, 16\], got FP32 \[-1, 2, 16\]"),
        (TensorSpec("e", "FP16", (-1, 16)), {"table": "users"}, "got FP16"),
        (TensorSpec("e", "FP32", (-1,)), {"table": "users"}, r"got FP32 \[-1\]"),
        (TensorSpec("e", "FP32", (-1, 16)), {"tables": ["users"]}, r"got FP32 \[-1, 16\]"),
    ],
)
def test_features_that_do_not_fit(spec: TensorSpec, entry: dict[str, object], fault: str) -> None:
    with pytest.raises(ModelConfigError, match=fault) as caught:
        fed(spec, **entry)
    assert "features: input 'e'" in str(caught.value)


def test_features_that_contradict_each_other() -> None:
    entry: dict[str, object] = {"input": "e", "table": "users"}
    with pytest.raises(ModelConfigError, match=r"no input 'e', only \['x'\]"):
        resolve(features(entry), [X], [Y], TABLES)
    with pytest.raises(ModelConfigError, match="'e' is listed twice"):
        resolve(features(entry, entry), [E], [Y], TABLES)
    with pytest.raises(ModelConfigError, match="keys 'x' would be two different tensors"):
        resolve(features(entry | {"keys": "x"}), [E, X], [Y], TABLES)
    ids = TensorSpec("ids", "INT64", (-1, 2))
    with pytest.raises(ModelConfigError, match="keys 'ids' would be two different tensors"):
        resolve(features(entry | {"keys": "ids"}), [E, ids], [Y], TABLES)
