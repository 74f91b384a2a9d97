"""The life of the service: open everything, serve, drain, close."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version

import uvicorn
import uvloop

from cache import Device, FeatureCache, open_device, warm_up
from cache.cuda import CudaDevice
from cache.errors import CacheError
from cache.profiling import load_nvtx, use_nvtx
from models.errors import ModelError
from models.repository import ModelRepository
from server.app import App
from server.banner import banner, serving_fields
from server.http_body import BodyReader
from server.http_server import HttpProtocol, HttpServer
from server.logs import configure_logging
from server.lookup import TableLookup
from server.metrics import Metrics
from server.model_manager import IndexEntry, ModelManager
from server.nvml import Nvml
from server.routes import Services
from server.settings import Settings, SettingsError, table_memory

logger = logging.getLogger(__name__)

# What is left to write when all requests are computed.
_LAST_WORDS_S = 0.5


class StartError(Exception):
    """The service cannot start; the text is one line that says why."""


def serve(settings: Settings) -> None:
    """Serves until it is told to end; raises StartError. Call it from the main thread."""
    configure_logging(settings.log_format, settings.log_level)
    try:
        if settings.nvtx:
            use_nvtx(load_nvtx())
        listener = _bind(settings.host, settings.port)
        device = open_device(
            settings.device,
            max_bytes=settings.device_memory,
            max_host_bytes=settings.host_memory,
            reserve_fraction=settings.reserve,
        )
        max_table_bytes = table_memory(settings, device)
        features = _open_tables(settings, device, max_table_bytes)
        warm_up()
        repository = _open_repository(settings, device, features)
        repository.names()  # a repository that cannot be read ends the start here
    except (CacheError, ModelError, SettingsError) as error:
        raise StartError(str(error)) from error
    manager = ModelManager(repository, features, device)
    service = Service(settings, device, features, manager, max_table_bytes)
    uvloop.run(service.run(listener))
    features.close()
    device.close()


def _bind(host: str, port: int) -> socket.socket:
    """A socket on the address, taken before the tables are read, so that a clash shows at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    except ValueError as error:  # a host that cannot be a name, such as a..b
        raise StartError(f"cannot listen on {host}:{port}: {error}") from error
    return listener


def _open_tables(settings: Settings, device: Device, max_table_bytes: int) -> FeatureCache:
    if settings.repository is None:
        return FeatureCache((), settings.pipeline_depth)
    return FeatureCache.open(
        settings.repository / "tables",
        device,
        table_memory_bytes=max_table_bytes,
        host_memory_bytes=settings.host_memory,
        is_direct_io=settings.io == "direct",
        num_frames=settings.pipeline_depth,
        max_positions=settings.max_lookup_keys,
        show_progress=sys.stderr.isatty(),
    )


def _open_repository(settings: Settings, device: Device, features: FeatureCache) -> ModelRepository:
    if settings.model_file is not None:
        return ModelRepository.single_file(
            settings.model_file, tables=features.tables, device=device
        )
    assert settings.repository is not None
    return ModelRepository(
        settings.repository,
        tables=features.tables,
        device=device,
        trust_model_code=settings.trust_model_code,
    )


class Service:
    """Everything that is open, and the server in front of it.

    The port answers from the start: it is live while models load, and ready when they are.
    """

    def __init__(
        self,
        settings: Settings,
        device: Device,
        features: FeatureCache,
        manager: ModelManager,
        max_table_bytes: int,
    ) -> None:
        self._settings = settings
        self._device = device
        self._features = features
        self._manager = manager
        self._max_table_bytes = max_table_bytes
        self._bodies = BodyReader(settings.max_body_bytes)
        self._lookup = TableLookup(
            features, device, settings.max_body_bytes, settings.pipeline_depth
        )
        self._server = HttpServer(_uvicorn_config(self._app()), self._drain)
        self._fault: str | None = None
        self._has_work_left = False

    async def run(self, listener: socket.socket) -> None:
        """Serves on the socket until a signal; raises StartError when there is nothing to serve."""
        self._loading = asyncio.create_task(self._load(listener))
        await self._server.serve(sockets=[listener])
        if self._fault is not None:
            raise StartError(self._fault)
        if not self._lookup.stop() or not self._server.is_idle() or self._has_work_left:
            # A thread that still runs a model, loads one or reads would keep the process alive.
            logger.warning("work is left that did not end within the grace")
            logging.shutdown()
            os._exit(0)
        logger.info("stopped")

    def _app(self) -> App:
        budgets = {"device": self._device.budget, "host": self._device.host_budget}
        device = self._device
        gpu = Nvml(device.info.pci_bus_id) if isinstance(device, CudaDevice) else None
        return App(
            Services(
                device=self._device,
                manager=self._manager,
                lookup=self._lookup,
                metrics=Metrics(self._features, budgets, gpu),
                bodies=self._bodies,
                version=_version(),
            )
        )

    async def _load(self, listener: socket.socket) -> None:
        host, port = self._settings.host, listener.getsockname()[1]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            await self._manager.start(load_all=self._settings.load == "all")
            entries = await asyncio.to_thread(self._manager.index)
        except Exception:  # a fault of our own: without an end the server would never be ready
            logger.exception("loading the models failed")
            self._fault = "loading the models failed; the log has the details"
            self._server.stop()
            return
        is_single = self._settings.model_file is not None
        if is_single and self._settings.load == "all" and not self._manager.served():
            self._fault = entries[0].reason
            self._server.stop()
            return
        self._announce(entries, url)

    def _announce(self, entries: list[IndexEntry], url: str) -> None:
        # What is loaded by now stays. A full collection would go through all of it once more, in
        # tens of milliseconds, in the middle of some request.
        gc.collect()
        gc.freeze()
        settings, device, features = self._settings, self._device, self._features
        shown = (settings, device, features, entries, url, self._max_table_bytes)
        if settings.log_format == "json":
            logger.info("serving", extra=serving_fields(*shown))
        else:
            print(banner(*shown), flush=True)

    async def _drain(self) -> float:
        grace_s = self._settings.shutdown_grace_s
        started_s = time.monotonic()
        logger.info("shutting down; accepted requests have %g s to finish", grace_s)
        is_loaded = self._loading.done()
        self._loading.cancel()
        self._bodies.stop()
        is_finished = await self._manager.stop(grace_s)
        self._has_work_left = not (is_loaded and is_finished)
        return max(_LAST_WORDS_S, grace_s - (time.monotonic() - started_s))


def _uvicorn_config(app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
    )


def _version() -> str:
    try:
        return version("hotshelf")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
