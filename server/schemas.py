"""The JSON bodies of the HTTP API, for its description and for the small answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Scalar = bool | int | float | str


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: str = Field(description="What was wrong: the thing, what was expected and what came.")


class TensorMetadata(BaseModel):
    """One input or output; -1 is a free dimension."""

    name: str
    datatype: str
    shape: list[int]


class ServerMetadata(BaseModel):
    """What the server is, and which protocol extensions it has."""

    name: str
    version: str
    extensions: list[str]


class ModelMetadata(BaseModel):
    """What a client must know to call a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Live(BaseModel):
    """The process answers."""

    live: Literal[True] = True


class Ready(BaseModel):
    """The server, or the model, takes inference requests."""

    ready: Literal[True] = True


class ModelReady(Ready):
    """The model takes inference requests."""

    name: str


class ModelStats(BaseModel):
    """Counters of model versions in Triton's shape."""

    model_stats: list[dict[str, Any]]


class RepositoryIndexRequest(BaseModel):
    """Which models to list."""

    ready: bool = Field(False, description="List only models that are ready.")


class RepositoryEntry(BaseModel):
    """One version of one model."""

    name: str
    version: str | None = Field(None, description="Left out for a model without versions.")
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = Field(description="Why it is not ready, or why its last reload failed.")


class RepositoryParameters(BaseModel):
    """Parameters of a load or an unload; a `config` or files in a load are refused."""

    parameters: dict[str, Scalar] = {}


class TableDescription(BaseModel):
    """A feature table and where its rows are."""

    name: str
    num_rows: int
    dim: int
    datatype: str
    absent: Literal["default", "error"] = Field(
        description="What a key that the table does not have gives: the default row, or an error."
    )
    row_bytes: int = Field(description="Bytes of a row in the file.")
    slot_bytes: int = Field(description="Bytes of a row in a memory tier.")
    host_tier: str = Field(
        description="inclusive: all rows are in host memory; spill: rows that leave the device; "
        "none: there is no host tier."
    )
    device_rows: int = Field(description="Rows that are in the device tier now.")
    host_rows: int = Field(description="Rows that are in the host tier now.")


class TableList(BaseModel):
    """All feature tables."""

    tables: list[TableDescription]


class LookupRequest(BaseModel):
    """The short form of a lookup."""

    keys: list[int] = Field(description="INT64 keys; repeated ones are fine.")


class LookupResponse(BaseModel):
    """Rows in the order of the keys, and how many positions came from where."""

    rows: list[list[float]]
    device: int
    host: int
    source: int
    absent: int


class InferInput(BaseModel):
    """An input tensor: `data` in JSON, or `parameters.binary_data_size` bytes after the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Scalar] = {}
    data: list[Any] | None = Field(
        None, description="Values in row-major order, flat or nested as `shape`."
    )


class InferRequestedOutput(BaseModel):
    """An output that is wanted; `parameters.binary_data` asks for it after the JSON."""

    name: str
    parameters: dict[str, Scalar] = {}


class InferRequest(BaseModel):
    """An inference request."""

    id: str | None = None
    parameters: dict[str, Scalar] = Field(
        {},
        description="`timeout`: microseconds that the request may wait in the queue, 0 for the "
        "model's own limit. `binary_data_output`: all outputs after the JSON unless an output says "
        "otherwise.",
    )
    inputs: list[InferInput]
    outputs: list[InferRequestedOutput] | None = Field(
        None, description="All outputs where left out."
    )


class InferOutput(BaseModel):
    """An output tensor: `data`, or `parameters.binary_data_size` bytes after the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Scalar] = {}
    data: list[Any] | None = None


class InferResponse(BaseModel):
    """The answer to an inference request."""

    model_name: str
    model_version: str
    id: str | None = Field(None, description="As in the request; left out where it had none.")
    parameters: dict[str, Scalar] = Field(
        {}, description="`absent_keys`: how many keys of the request its tables do not have."
    )
    outputs: list[InferOutput]
