"""The description of the HTTP API: what FastAPI knows, and what it cannot see."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server import schemas

_REF = "#/components/schemas/"
_JSON = "application/json"
_BINARY = "application/octet-stream"

_BODY_MODELS = (
    schemas.ErrorBody,
    schemas.InferRequest,
    schemas.InferResponse,
    schemas.LookupRequest,
    schemas.LookupResponse,
    schemas.RepositoryIndexRequest,
    schemas.RepositoryParameters,
)

_HEADER_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1},
    "description": "Length of the JSON part in bytes; needed when binary data follows it.",
}
_CONTENT_ENCODING = {
    "name": "Content-Encoding",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "enum": ["gzip", "deflate", "identity"]},
}
_INFER_FAILURES = {
    400: "The request is wrong, or the model is not loaded.",
    404: "There is no such model or version.",
    413: "The body is larger than max_body_bytes.",
    415: "The Content-Encoding is not known.",
    500: "The model failed.",
    503: "The queue is full, the request waited too long, the model is still loading, or the "
    "server is shutting down.",
}


def describe(api: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the whole server; made once."""
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in _BODY_MODELS], ref_template=_REF + "{model}"
        )
        components = document.setdefault("components", {}).setdefault("schemas", {})
        components.update(definitions["$defs"])
        for operations in document["paths"].values():
            for operation in operations.values():
                _correct(operation)
        for name in ("HTTPValidationError", "ValidationError"):
            components.pop(name, None)
        path = "/v2/models/{name}"
        document["paths"][f"{path}/infer"] = {"post": _infer("infer", ["name"])}
        document["paths"][f"{path}/versions/{{version}}/infer"] = {
            "post": _infer("version_infer", ["name", "version"])
        }
        api.openapi_schema = document
    return api.openapi_schema


def _correct(operation: dict[str, Any]) -> None:
    # A wrong request is 400 here, never FastAPI's 422.
    operation["responses"].pop("422", None)
    if operation.pop("x-hotshelf-body", None) == "lookup":
        operation["parameters"] += [_HEADER_LENGTH, _CONTENT_ENCODING]
        operation["requestBody"] = _body(
            {"oneOf": [_ref("LookupRequest"), _ref("InferRequest")]}, "One input `keys`, INT64 [n]."
        )
        operation["responses"]["200"] = _success(
            {"oneOf": [_ref("LookupResponse"), _ref("InferResponse")]},
            "In the form of the request: the short one, or one output `rows`, FP32 [n, dim], with "
            "the counts as response parameters.",
        )


def _infer(operation_id: str, names: list[str]) -> dict[str, Any]:
    path_parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    return {
        "tags": ["models"],
        "summary": "Infer",
        "description": "Runs the model. The request may share a batch with others.",
        "operationId": operation_id,
        "parameters": [*path_parameters, _HEADER_LENGTH, _CONTENT_ENCODING],
        "requestBody": _body(_ref("InferRequest"), "The tensors."),
        "responses": {
            "200": _success(_ref("InferResponse"), "The outputs."),
            **{
                str(status): {
                    "description": text,
                    "content": {_JSON: {"schema": _ref("ErrorBody")}},
                }
                for status, text in _INFER_FAILURES.items()
            },
        },
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF + name}


def _body(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {
        "required": True,
        "description": f"{description} Either JSON alone, or JSON and then the binary data of the "
        "inputs that have a `binary_data_size`, in their order.",
        "content": {_JSON: {"schema": schema}, _BINARY: {"schema": _BINARY_SCHEMA}},
    }


def _success(schema: dict[str, Any], description: str) -> dict[str, Any]:
    header = {key: _HEADER_LENGTH[key] for key in ("schema", "description")}
    return {
        "description": description,
        "headers": {"Inference-Header-Content-Length": header},
        "content": {_JSON: {"schema": schema}, _BINARY: {"schema": _BINARY_SCHEMA}},
    }


_BINARY_SCHEMA = {"type": "string", "format": "binary"}
