"""The endpoints on FastAPI: health, metadata, repository, statistics, tables and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from pydantic import BaseModel

from cache import Device
from server import schemas
from server.errors import DeviceFailedError, InvalidRequestError, UnavailableError
from server.http_body import BodyReader, read_headers
from server.infer_route import DisconnectWatcher, decode_name
from server.lookup import TableLookup
from server.metrics import CONTENT_TYPE, Metrics
from server.model_manager import ModelManager, ServedModel
from server.oip_decode import optional_object, parse_object
from server.oip_encode import EncodedResponse

EXTENSIONS = [
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
]

JSON = "application/json"
BINARY = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Services:
    """What the endpoints work on."""

    device: Device
    manager: ModelManager
    lookup: TableLookup
    metrics: Metrics
    bodies: BodyReader
    version: str


def model_name(name: str) -> str:
    """The name in the path, percent-decoded once."""
    return decode_name(name)


def model_version(version: str) -> str:
    """The version in the path, percent-decoded once."""
    return decode_name(version)


async def read_json(request: Request) -> dict[str, Any]:
    """The JSON object in the body, empty where there is no body."""
    headers = read_headers(request.headers.raw)
    bodies: BodyReader = request.app.state.bodies
    body = await bodies.read(headers, request.receive)
    return parse_object(body, "the request") if body.strip() else {}


Name = Annotated[str, Depends(model_name)]
Version = Annotated[str, Depends(model_version)]
Body = Annotated[dict[str, Any], Depends(read_json)]


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The description of answers that are errors."""
    return {status: {"model": schemas.ErrorBody} for status in statuses}


def json_body(model: type[BaseModel], *, is_required: bool) -> dict[str, Any]:
    """The description of a JSON body that the route reads itself."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": is_required, "content": {JSON: {"schema": schema}}}}


def create_router(services: Services) -> APIRouter:
    """All routes."""
    router = APIRouter()
    router.include_router(_health_routes(services))
    router.include_router(_model_routes(services))
    router.include_router(_repository_routes(services))
    router.include_router(_table_routes(services))
    return router


def _health_routes(services: Services) -> APIRouter:
    router = APIRouter(tags=["server"])

    @router.get("/v2", response_model=schemas.ServerMetadata)
    async def server_metadata() -> dict[str, Any]:
        """Name, version and extensions of the server."""
        return {"name": "hotshelf", "version": services.version, "extensions": EXTENSIONS}

    @router.get("/v2/health/live", responses=failures(503))
    async def server_live() -> schemas.Live:
        """The process answers, and its device has not failed."""
        _check_device(services)
        return schemas.Live()

    @router.get("/v2/health/ready", responses=failures(503))
    async def server_ready() -> schemas.Ready:
        """The models of the start are loaded, and the server is not shutting down."""
        _check_device(services)
        if not services.manager.is_ready():
            raise UnavailableError("the server is not ready: it is starting or shutting down")
        return schemas.Ready()

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        text = services.metrics.render(services.manager.served())
        return Response(text, media_type=CONTENT_TYPE)

    return router


def _check_device(services: Services) -> None:
    if services.device.fault is not None:
        raise DeviceFailedError(services.device.fault)


def _model_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v2/models", tags=["models"])
    manager = services.manager

    @router.get("/stats", response_model=schemas.ModelStats)
    def all_statistics() -> dict[str, Any]:
        """Counters of every served model version."""
        return _statistics(manager.served())

    @router.get("/{name}", response_model=schemas.ModelMetadata, responses=failures(400, 404, 503))
    def model_metadata(name: Name) -> dict[str, Any]:
        """Inputs and outputs of the model's highest version."""
        return _metadata(manager, manager.get(name))

    @router.get(
        "/{name}/versions/{version}",
        response_model=schemas.ModelMetadata,
        responses=failures(400, 404, 503),
    )
    def version_metadata(name: Name, version: Version) -> dict[str, Any]:
        """Inputs and outputs of one version."""
        return _metadata(manager, manager.get(name, version))

    @router.get("/{name}/ready", responses=failures(400, 404, 503))
    def model_ready(name: Name) -> schemas.ModelReady:
        """The model is loaded."""
        return schemas.ModelReady(name=manager.get(name).model.name)

    @router.get("/{name}/versions/{version}/ready", responses=failures(400, 404, 503))
    def version_ready(name: Name, version: Version) -> schemas.ModelReady:
        """The version is loaded."""
        return schemas.ModelReady(name=manager.get(name, version).model.name)

    @router.get("/{name}/config", responses=failures(400, 404, 503))
    def model_config(name: Name) -> dict[str, Any]:
        """The model's configuration in Triton's shape."""
        return manager.get(name).model.triton_config()

    @router.get("/{name}/versions/{version}/config", responses=failures(400, 404, 503))
    def version_config(name: Name, version: Version) -> dict[str, Any]:
        """The version's configuration in Triton's shape."""
        return manager.get(name, version).model.triton_config()

    @router.get(
        "/{name}/stats", response_model=schemas.ModelStats, responses=failures(400, 404, 503)
    )
    def model_statistics(name: Name) -> dict[str, Any]:
        """Counters of every served version of the model."""
        manager.get(name)
        return _statistics([one for one in manager.served() if one.model.name == name])

    @router.get(
        "/{name}/versions/{version}/stats",
        response_model=schemas.ModelStats,
        responses=failures(400, 404, 503),
    )
    def version_statistics(name: Name, version: Version) -> dict[str, Any]:
        """Counters of one version."""
        return _statistics([manager.get(name, version)])

    return router


def _metadata(manager: ModelManager, served: ServedModel) -> dict[str, Any]:
    model = served.model
    versions = [one.model.version for one in manager.served() if one.model.name == model.name]
    return {
        "name": model.name,
        "versions": versions,
        "platform": model.backend.platform,
        "inputs": [_tensor(spec) for spec in model.request_inputs],
        "outputs": [_tensor(spec) for spec in model.outputs],
    }


def _tensor(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _statistics(served: list[ServedModel]) -> dict[str, Any]:
    return {
        "model_stats": [
            one.statistics.to_triton(one.model.name, one.model.version) for one in served
        ]
    }


def _repository_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v2/repository", tags=["repository"])
    manager = services.manager

    @router.post(
        "/index",
        response_model=list[schemas.RepositoryEntry],
        response_model_exclude_none=True,
        responses=failures(400, 503),
        openapi_extra=json_body(schemas.RepositoryIndexRequest, is_required=False),
    )
    def repository_index(body: Body) -> list[dict[str, Any]]:
        """Every version of every model on disk, and its state."""
        only_ready = body.get("ready") or False
        if not isinstance(only_ready, bool):
            raise InvalidRequestError("'ready': expected true or false")
        return [
            {
                "name": entry.name,
                "version": entry.version or None,
                "state": entry.state,
                "reason": entry.reason,
            }
            for entry in manager.index()
            if not only_ready or entry.state == "READY"
        ]

    @router.post(
        "/models/{name}/load",
        response_class=Response,
        responses=failures(400, 404, 503),
        openapi_extra=json_body(schemas.RepositoryParameters, is_required=False),
    )
    async def load_model(name: Name, body: Body) -> Response:
        """Loads or reloads a model; its old version serves until the new one is there."""
        parameters = optional_object(body, "parameters", "the request")
        if given := [key for key in parameters if key == "config" or key.startswith("file:")]:
            raise InvalidRequestError(
                f"parameter '{given[0]}' is not supported: a model is loaded from the repository"
            )
        await manager.load(name)
        return Response()

    @router.post(
        "/models/{name}/unload",
        response_class=Response,
        responses=failures(400, 404, 503),
        openapi_extra=json_body(schemas.RepositoryParameters, is_required=False),
    )
    async def unload_model(name: Name, body: Body) -> Response:
        """Stops serving a model; accepted requests are still answered."""
        optional_object(body, "parameters", "the request")
        await manager.unload(name)
        return Response()

    return router


def _table_routes(services: Services) -> APIRouter:
    router = APIRouter(prefix="/v2/tables", tags=["tables"])
    lookup = services.lookup

    @router.get("")
    def list_tables() -> schemas.TableList:
        """All feature tables."""
        return schemas.TableList(tables=_describe_tables(lookup))

    @router.get("/{name}", responses=failures(404))
    def describe_table(name: Name) -> schemas.TableDescription:
        """One feature table."""
        lookup.table(name)
        return next(table for table in _describe_tables(lookup) if table.name == name)

    @router.post(
        "/{name}/lookup",
        response_class=Response,
        responses=failures(400, 404, 413, 415, 500, 503),
        openapi_extra={"x-hotshelf-body": "lookup"},
    )
    async def look_up(name: Name, request: Request) -> Response:
        """Rows by key, with the tier that each came from counted."""
        headers = read_headers(request.headers.raw)
        body = await services.bodies.read(headers, request.receive)
        with DisconnectWatcher(request.receive):
            encoded = await lookup.answer(name, body, headers.header_length)
        return _encoded_response(encoded)

    return router


def _encoded_response(encoded: EncodedResponse) -> Response:
    body = b"".join(encoded.parts)
    if encoded.header_length is None:
        return Response(body, media_type=JSON)
    headers = {"Inference-Header-Content-Length": str(encoded.header_length)}
    return Response(body, headers=headers, media_type=BINARY)


def _describe_tables(lookup: TableLookup) -> list[schemas.TableDescription]:
    stats = lookup.features.stats()
    table_to_mode = {name: slab.mode for slab in stats.slabs for name in slab.tables}
    descriptions = []
    for counts in stats.tables:
        table = lookup.features.tables[counts.name]
        descriptions.append(
            schemas.TableDescription(
                name=table.name,
                num_rows=table.num_rows,
                dim=table.dim,
                datatype=table.datatype,
                absent="error" if table.is_strict else "default",
                row_bytes=table.row_bytes,
                slot_bytes=table.slot_bytes,
                host_tier=table_to_mode[table.name],
                device_rows=counts.device_rows,
                host_rows=counts.host_rows,
            )
        )
    return descriptions
