"""The fields of `model.yaml`, and how they join with what the model file says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from models.errors import ModelConfigError
from models.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from cache import Table

DEFAULT_MAX_BATCH_SIZE = 64

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
Name = Annotated[str, Field(min_length=1)]
# A name, or {name: options} such as {tensorrt: {trt_fp16_enable: true}}.
ProviderEntry = str | dict[str, dict[str, str | int | float | bool]]
# module:callable
_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _checked_factory(text: str) -> str:
    if not _FACTORY.fullmatch(text):
        raise ValueError("expected module:callable, such as my_models:build_ranker")
    return text


Factory = Annotated[str, AfterValidator(_checked_factory)]
Milliseconds = Annotated[float, Field(ge=0, le=86_400_000, allow_inf_nan=False)]  # up to a day


def _provider_entry(given: object) -> ProviderEntry:
    """Checks by hand, since of a union the faults of all parts would be told."""
    if isinstance(given, str) and given:
        return given
    if isinstance(given, dict) and len(given) == 1:
        ((name, options),) = given.items()
        if isinstance(name, str) and name and isinstance(options, dict):
            is_fit = (
                isinstance(key, str) and isinstance(value, (str, int, float))
                for key, value in options.items()
            )
            if all(is_fit):
                return {name: options}
    raise ValueError(
        "expected a name, or one name with its options such as {tensorrt: {trt_fp16_enable: true}}"
    )


ProviderField = Annotated[ProviderEntry, PlainValidator(_provider_entry)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorConfig(_Fields):
    """One entry of `inputs` or `outputs`; the shape has the batch dimension, -1 is free."""

    name: Name
    datatype: Datatype
    shape: list[Annotated[int, Field(ge=-1)]]

    @property
    def spec(self) -> TensorSpec:
        """The entry as a tensor spec."""
        return TensorSpec(self.name, self.datatype, tuple(self.shape))


class VersionPolicy(_Fields):
    """Which version folders are served: the `latest` N, or the `specific` ones that are listed."""

    latest: Annotated[int, Field(ge=1)] | None = None
    specific: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.latest is None) == (self.specific is None):
            raise ValueError("expected one of 'latest' and 'specific'")
        return self


class FeatureConfig(_Fields):
    """A model input that is fed from one table, or column by column from several."""

    input: Name
    keys: Name | None = None
    table: Name | None = None
    tables: Annotated[list[Name], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.table is None) == (self.tables is None):
            raise ValueError("expected one of 'table' and 'tables'")
        return self

    @property
    def keys_name(self) -> str:
        """The name of the request tensor that holds the keys."""
        return self.keys if self.keys is not None else self.input

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables, in column order."""
        return tuple(self.tables or ()) if self.table is None else (self.table,)


class ModelConfig(_Fields):
    """The fields of `model.yaml`; docs/model-repository.md describes each."""

    backend: Literal["onnxruntime", "torch"] = "onnxruntime"
    factory: Factory | None = None
    providers: Annotated[list[ProviderField], Field(min_length=1)] | None = None
    cpu_fallback: bool = False
    max_batch_size: Annotated[int, Field(ge=0)] | None = None
    max_queue_delay_ms: Milliseconds = 0.0
    max_queue_size: Annotated[int, Field(ge=1)] = 1024
    request_timeout_ms: Milliseconds = 0.0
    versions: VersionPolicy = VersionPolicy(latest=1)
    inputs: list[TensorConfig] | None = None
    outputs: list[TensorConfig] | None = None
    features: list[FeatureConfig] = []
    intra_op_threads: Annotated[int, Field(ge=0, le=1024)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backend == "torch":
            if self.factory is None:
                raise ValueError("backend torch needs 'factory', such as 'my_models:build_ranker'")
            if not self.inputs or not self.outputs:
                raise ValueError("backend torch needs 'inputs' and 'outputs': its file names none")
            given = {"providers", "cpu_fallback", "intra_op_threads"} & self.model_fields_set
            if given:
                raise ValueError(f"{min(given)!r} is a field of the backend onnxruntime")
        elif self.factory is not None:
            raise ValueError("'factory' is a field of the backend torch")
        return self


@dataclass(frozen=True, slots=True)
class FeatureInput:
    """A model input (`spec`, FP32 [..., dim]) that is fed from tables by the request's `keys`.

    `keys` is INT64 and has the shape of `spec` without the last dimension. Position p of the
    flat keys is looked up in `tables[p % len(tables)]`.
    """

    spec: TensorSpec
    keys: TensorSpec
    tables: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """What requests of a model look like, once file, `model.yaml` and tables are joined."""

    max_batch_size: int
    request_inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    features: tuple[FeatureInput, ...]


def resolve(
    config: ModelConfig,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    tables: Mapping[str, Table],
) -> ModelSignature:
    """Join the model file's `inputs` and `outputs` with `model.yaml` and the tables.

    Raises `ModelConfigError` where they do not fit together.
    """
    inputs = _checked("inputs", config.inputs, inputs)
    outputs = _checked("outputs", config.outputs, outputs)
    max_batch_size = _max_batch_size(config, inputs, outputs)
    features = _features(config, inputs, tables, is_batched=max_batch_size > 0)
    return ModelSignature(max_batch_size, _request_inputs(inputs, features), outputs, features)


def _checked(
    field: str, given: list[TensorConfig] | None, specs: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """The file's specs; where `model.yaml` lists them, checked and their free dims narrowed."""
    if given is None:
        return tuple(specs)
    given_names, file_names = [tensor.name for tensor in given], [spec.name for spec in specs]
    if sorted(given_names) != sorted(file_names):
        raise ModelConfigError(f"{field}: expected {file_names} as in the file, got {given_names}")
    name_to_given = {tensor.name: tensor for tensor in given}
    return tuple(_narrowed(field, name_to_given[spec.name], spec) for spec in specs)


def _narrowed(field: str, given: TensorConfig, spec: TensorSpec) -> TensorSpec:
    where = f"{field}: {spec.name!r}"
    if given.datatype != spec.datatype:
        raise ModelConfigError(
            f"{where}: datatype is {spec.datatype} in the file, got {given.datatype}"
        )
    is_same_rank = len(given.shape) == len(spec.shape)
    if not is_same_rank or any(
        dim not in (-1, given_dim) for dim, given_dim in zip(spec.shape, given.shape, strict=True)
    ):
        raise ModelConfigError(
            f"{where}: shape is {list(spec.shape)} in the file, got {given.shape}"
        )
    return replace(spec, shape=tuple(given.shape))


def _max_batch_size(
    config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> int:
    kinds = [*(("input", spec) for spec in inputs), *(("output", spec) for spec in outputs)]
    fixed = [(kind, spec) for kind, spec in kinds if spec.shape[:1] != (-1,)]
    if config.max_batch_size is None:
        return 0 if fixed or not inputs else DEFAULT_MAX_BATCH_SIZE
    if config.max_batch_size > 0 and not inputs:
        raise ModelConfigError("max_batch_size: must be 0 for a model without inputs")
    if config.max_batch_size > 0 and fixed:
        kind, spec = fixed[0]
        raise ModelConfigError(
            f"max_batch_size: {config.max_batch_size} needs a free first dimension everywhere, "
            f"but {kind} {spec.name!r} has shape {list(spec.shape)}; set it to 0"
        )
    return config.max_batch_size


def _features(
    config: ModelConfig,
    inputs: Sequence[TensorSpec],
    tables: Mapping[str, Table],
    *,
    is_batched: bool,
) -> tuple[FeatureInput, ...]:
    name_to_spec = {spec.name: spec for spec in inputs}
    features: dict[str, FeatureInput] = {}
    for feature in config.features:
        if feature.input not in name_to_spec:
            raise ModelConfigError(
                f"features: the model has no input {feature.input!r}, only {list(name_to_spec)}"
            )
        if feature.input in features:
            raise ModelConfigError(f"features: input {feature.input!r} is listed twice")
        spec = name_to_spec[feature.input]
        features[feature.input] = _feature_input(feature, spec, tables, is_batched=is_batched)
    return tuple(features.values())


def _feature_input(
    feature: FeatureConfig, spec: TensorSpec, tables: Mapping[str, Table], *, is_batched: bool
) -> FeatureInput:
    where = f"features: input {feature.input!r}"
    dim = _dim(where, feature.table_names, tables)
    inner = (dim,) if feature.tables is None else (len(feature.tables), dim)
    num_outer = len(spec.shape) - len(inner)
    has_outer = num_outer >= 1 or (feature.tables is not None and not is_batched)
    is_fit = has_outer and all(
        given in (-1, wanted) for given, wanted in zip(spec.shape[num_outer:], inner, strict=True)
    )
    if spec.datatype != "FP32" or not is_fit:
        expected = f"FP32 [..., {', '.join(map(str, inner))}]"
        raise ModelConfigError(
            f"{where}: expected {expected}, got {spec.datatype} {list(spec.shape)}"
        )
    shape = (*spec.shape[:num_outer], *inner)
    keys = TensorSpec(feature.keys_name, "INT64", shape[:-1])
    return FeatureInput(replace(spec, shape=shape), keys, feature.table_names, dim)


def _dim(where: str, names: Sequence[str], tables: Mapping[str, Table]) -> int:
    """The dim that all the named tables share."""
    for name in names:
        if name not in tables:
            known = ", ".join(sorted(tables)) or "none"
            raise ModelConfigError(f"{where}: unknown table {name!r}; known tables: {known}")
    dims = {name: tables[name].dim for name in names}
    other = next((name for name in names if dims[name] != dims[names[0]]), None)
    if other is not None:
        raise ModelConfigError(
            f"{where}: tables must have the same dim, but {names[0]!r} has {dims[names[0]]} "
            f"and {other!r} has {dims[other]}"
        )
    return dims[names[0]]


def _request_inputs(
    inputs: Sequence[TensorSpec], features: Sequence[FeatureInput]
) -> tuple[TensorSpec, ...]:
    """The model's inputs with keys in place of what is fed; shared keys occur once."""
    fed_to_keys = {feature.spec.name: feature.keys for feature in features}
    plain = {spec.name for spec in inputs} - fed_to_keys.keys()
    name_to_spec: dict[str, TensorSpec] = {}
    for spec in (fed_to_keys.get(spec.name, spec) for spec in inputs):
        is_clash = spec.name in plain and spec in fed_to_keys.values()
        if is_clash or name_to_spec.setdefault(spec.name, spec) != spec:
            raise ModelConfigError(
                f"features: keys {spec.name!r} would be two different tensors of the request"
            )
    return tuple(name_to_spec.values())
