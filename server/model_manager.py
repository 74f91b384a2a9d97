"""The models that are served now: load, swap, lease, unload, and the index of all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar
from weakref import WeakValueDictionary

from cache import Device
from cache.profiling import nvtx_range
from models.errors import ModelError, ModelLoadError, ModelNotFoundError, ModelNotReadyError
from models.repository import LoadedModel
from server.batch_queue import BatchQueue
from server.batcher import Batcher
from server.engine import Engine, FrameSource
from server.errors import (
    ClientDisconnectedError,
    InferenceError,
    InternalError,
    LoadingError,
    RequestTimeoutError,
    ShuttingDownError,
    UnavailableError,
)
from server.requests import InferenceRequest, InferenceResponse
from server.statistics import FailureReason, ModelStatistics

logger = logging.getLogger(__name__)

Encoded = TypeVar("Encoded")
Clock = Callable[[], float]


class Repository(Protocol):
    """What the manager needs of a model repository; all three may block on the disk."""

    def names(self) -> list[str]:
        """The models that are on disk now."""

    def versions(self, name: str) -> list[str]:
        """The versions of one model that are on disk now; raises ModelNotFoundError."""

    def open(self, name: str) -> list[LoadedModel]:
        """Builds every version to serve, or raises and leaves nothing behind."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version of one model; `version` is empty for a model that has none on disk.

    `reason` says why it is not ready, or why the last reload of a ready one failed.
    """

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str


def failure_reason(error: BaseException) -> FailureReason:
    """The reason under which a request that ended with `error` is counted."""
    if isinstance(error, ClientDisconnectedError):
        return "CANCELED"
    if isinstance(error, RequestTimeoutError):
        return "TIMEOUT"
    # The server cancels what it cannot finish; a model may be unloaded while a body is read.
    if isinstance(error, UnavailableError | ModelNotReadyError | asyncio.CancelledError):
        return "REJECTED"
    return "BACKEND" if isinstance(error, InferenceError | InternalError) else "OTHER"


class ServedModel:
    """One loaded version with its batcher and counters; used from the event loop only.

    A request holds a lease (`acquire`, `release`, or `ModelManager.lease`) from before it is
    decoded until it is encoded. `close` waits for all leases, so no accepted request loses its
    model.
    """

    def __init__(
        self,
        model: LoadedModel,
        features: FrameSource,
        device: Device,
        statistics: ModelStatistics,
        clock: Clock = time.perf_counter,
    ) -> None:
        config = model.config
        self.model = model
        self.statistics = statistics
        self._engine = Engine(model, features, device, clock)
        self.batcher = Batcher(
            f"{model.name}:{model.version}",
            self._engine,
            BatchQueue(
                model.max_batch_size, config.max_queue_size, config.max_queue_delay_ms / 1000
            ),
            statistics,
            request_timeout_s=config.request_timeout_ms / 1000,
            clock=clock,
        )
        self._clock = clock
        self._num_leases = 0
        self._unleased = asyncio.Event()
        self._unleased.set()

    def start(self) -> None:
        """Starts the workers."""
        self.batcher.start()

    def acquire(self) -> None:
        """Keeps the model open until `release`."""
        self._num_leases += 1
        self._unleased.clear()

    def release(self) -> None:
        """Ends one lease."""
        self._num_leases -= 1
        assert self._num_leases >= 0
        if not self._num_leases:
            self._unleased.set()

    async def infer(
        self,
        request: InferenceRequest,
        encode: Callable[[InferenceResponse], Encoded],
        waiting: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    ) -> Encoded:
        """Runs one request, encodes its response, and counts it.

        `encode` runs on the event loop and is timed; a request counts as a success only when it has
        returned. Whatever is raised, here or by `encode`, is counted as one failure, so the caller
        counts only requests that it could not decode.
        Cancelling the awaiting task takes a queued request out of the queue. `waiting` is entered
        while the request waits for its answer, and may say why it was cancelled.
        Raises QueueFullError, RequestTimeoutError, ShuttingDownError, InvalidRequestError,
        InferenceError, and what `encode` raises.
        """
        started_s = self._clock()
        try:
            with waiting:
                answer = await self.batcher.submit(request)
            computed_s = self._clock()
            with nvtx_range("encode"):
                encoded = encode(answer.response)
        except BaseException as error:
            self.statistics.record_failure(failure_reason(error), self._clock() - started_s)
            raise
        encoded_s = self._clock()
        self.statistics.record_success(
            answer.timings,
            request_s=encoded_s - started_s,
            encode_s=encoded_s - computed_s,
            now_ms=time.time_ns() // 1_000_000,
        )
        return encoded

    async def close(self, grace_s: float | None = None) -> bool:
        """Waits for leases and the queue, ends the workers, and closes the model.

        After `grace_s` (None: no limit) what is left is answered ShuttingDownError, and the model
        stays open when its backend still runs. Returns whether everything ended.
        """
        try:
            async with asyncio.timeout(grace_s):
                await self._unleased.wait()
                await self.batcher.stop()
        except TimeoutError:
            if not await self.batcher.stop(grace_s=0):
                return False
        await asyncio.to_thread(self._close)
        return True

    def _close(self) -> None:
        try:
            self._engine.close()
        finally:
            self.model.close()


class ModelManager:
    """Loads and unloads models by name, and finds the one that serves a request.

    All but `get`, `index`, `served` and `is_ready`, which any thread may call, belong to the event
    loop. Loads and unloads of one name run one after the other, in the order of the calls, and go
    on when the caller is cancelled. Counters of a version go on over a reload.
    """

    def __init__(
        self,
        repository: Repository,
        features: FrameSource,
        device: Device,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._repository = repository
        self._features = features
        self._device = device
        self._clock = clock
        # The inner dicts are replaced as a whole and never changed.
        self._name_to_versions: dict[str, dict[str, ServedModel]] = {}
        self._name_to_reason: dict[str, str] = {}
        self._loading: set[str] = set()
        self._name_to_lock: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._statistics: dict[tuple[str, str], ModelStatistics] = {}
        self._changes: set[asyncio.Task[None]] = set()
        self._closing: dict[ServedModel, asyncio.Task[None]] = {}
        self._is_started = False
        self._is_stopping = False

    async def start(self, load_all: bool = True) -> None:
        """Loads every model of the repository; one that fails is logged and shown in the index."""
        names = await asyncio.to_thread(self._repository.names) if load_all else []
        for name in names:
            try:
                await self.load(name)
            except ShuttingDownError:
                return
            except ModelError as error:
                logger.error("model %r is not served: %s", name, error)
        self._is_started = True

    async def stop(self, grace_s: float) -> bool:
        """Refuses new requests at once and lets accepted ones finish for `grace_s`.

        What is left is answered ShuttingDownError. Returns False when a backend still runs, or a
        model is still loading: its thread keeps the process alive until it is done.
        """
        self._is_stopping = True
        for versions in self._name_to_versions.values():
            self._retire(versions)
        self._name_to_versions = {}
        closing = dict(self._closing)
        if not (tasks := [*closing.values(), *self._changes]):
            return True
        _, late = await asyncio.wait(tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        late_models = [served for served, task in closing.items() if task in late]
        is_closed = all([await served.close(grace_s=0) for served in late_models])
        return is_closed and late.issubset(closing.values())

    def is_ready(self) -> bool:
        """True from the end of `start` until `stop` is called."""
        return self._is_started and not self._is_stopping

    async def load(self, name: str) -> None:
        """Loads or reloads a model; requests are served by the old one until the new one is there.

        A failed reload leaves the old one as it is. Raises ModelNotFoundError, ModelLoadError,
        ShuttingDownError.
        """
        await self._serialised(name, self._load)

    async def unload(self, name: str) -> None:
        """Stops serving a model; it closes in the background after its accepted requests.

        Nothing happens when it is not loaded. Raises ModelNotFoundError for an unknown name.
        """
        await self._serialised(name, self._unload)

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """The served model, by default its highest version, for its metadata and counters.

        Raises ModelNotFoundError, ModelNotReadyError, LoadingError, ShuttingDownError; reads the
        disk, to tell them apart, for a model that is not served.
        """
        served = self._served_version(name, version)
        if served is None:
            raise self._not_served(name, version)
        return served

    async def find(self, name: str, version: str | None = None) -> ServedModel:
        """What `get` does, without blocking the event loop."""
        served = self._served_version(name, version)
        if served is None:
            raise await asyncio.to_thread(self._not_served, name, version)
        return served

    @asynccontextmanager
    async def lease(self, name: str, version: str | None = None) -> AsyncIterator[ServedModel]:
        """The served model, kept open while a request is decoded, awaited and encoded.

        Raises what `get` raises.
        """
        served = await self.find(name, version)  # does not wait when there is one
        served.acquire()
        try:
            yield served
        finally:
            served.release()

    def served(self) -> list[ServedModel]:
        """Every version that is served now, by name and version."""
        return [
            versions[version]
            for _, versions in sorted(self._name_to_versions.copy().items())
            for version in sorted(versions, key=_version_order)
        ]

    def index(self) -> list[IndexEntry]:
        """Every version on disk or served; reads the disk."""
        name_to_served = self._name_to_versions.copy()
        entries: list[IndexEntry] = []
        for name in sorted(name_to_served.keys() | self._repository.names()):
            served = name_to_served.get(name, {})
            versions = served.keys() | (self._versions_on_disk(name) or [])
            ordered = sorted(versions, key=_version_order) or [""]
            entries.extend(self._index_entry(name, version, served) for version in ordered)
        return entries

    def _index_entry(self, name: str, version: str, served: dict[str, ServedModel]) -> IndexEntry:
        reason = self._name_to_reason.get(name, "")
        if version in served:
            return IndexEntry(name, version, "READY", reason)
        if self._is_loading(name):
            return IndexEntry(name, version, "LOADING", reason)
        unserved = "not served by the version policy" if served else "not loaded"
        return IndexEntry(name, version, "UNAVAILABLE", reason or unserved)

    def _served_version(self, name: str, version: str | None) -> ServedModel | None:
        versions = self._name_to_versions.get(name)
        if not versions:
            return None
        return versions.get(max(versions, key=_version_order) if version is None else version)

    def _is_loading(self, name: str) -> bool:
        """Whether a model, if there is one, is loading, or waits for its turn at the start."""
        was_tried = name in self._name_to_versions or name in self._name_to_reason
        return name in self._loading or not (self._is_started or was_tried)

    def _not_served(self, name: str, version: str | None) -> ModelError | UnavailableError:
        if self._is_stopping:
            return ShuttingDownError("the server is shutting down")
        is_loaded = name in self._name_to_versions
        is_loading = self._is_loading(name)
        reason = self._name_to_reason.get(name)
        if not is_loaded and not is_loading and reason is not None:
            return ModelNotReadyError(f"model {name!r} is not ready: {reason}")
        on_disk = self._versions_on_disk(name)
        if not is_loaded and on_disk is None:
            return ModelNotFoundError(f"unknown model {name!r}")
        if version is not None and version not in (on_disk or []):
            return ModelNotFoundError(f"model {name!r} has no version {version!r}")
        if is_loading:
            return LoadingError(f"model {name!r} is still loading")
        if version is None:
            return ModelNotReadyError(f"model {name!r} is not loaded")
        return ModelNotReadyError(f"version {version!r} of model {name!r} is not loaded")

    def _versions_on_disk(self, name: str) -> list[str] | None:
        """None for an unknown model; none where the disk does not tell."""
        try:
            return self._repository.versions(name)
        except ModelNotFoundError:
            return None
        except ModelError:
            return []

    async def _serialised(self, name: str, change: Callable[[str], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._locked(name, change))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _locked(self, name: str, change: Callable[[str], Awaitable[None]]) -> None:
        lock = self._name_to_lock.setdefault(name, asyncio.Lock())
        async with lock:
            await change(name)

    async def _load(self, name: str) -> None:
        self._loading.add(name)
        try:
            models = await asyncio.to_thread(self._open, name)
        except ModelError as error:
            if name in self._name_to_versions or not isinstance(error, ModelNotFoundError):
                self._name_to_reason[name] = str(error)
            raise
        finally:
            self._loading.discard(name)
        if self._is_stopping:
            for model in models:
                model.close()
            raise ShuttingDownError("the server is shutting down")
        self._name_to_reason.pop(name, None)
        self._swap(name, models)

    def _open(self, name: str) -> list[LoadedModel]:
        try:
            return self._repository.open(name)
        except ModelError:
            raise
        except Exception as error:
            logger.exception("loading model %r failed", name)
            raise ModelLoadError(
                f"model {name!r} could not be loaded; the server's log has the details"
            ) from error

    def _swap(self, name: str, models: list[LoadedModel]) -> None:
        versions = {model.version: self._serve(model) for model in models}
        old = self._name_to_versions.get(name, {})
        self._name_to_versions[name] = versions
        self._retire(old)
        logger.info("model %r serves version %s", name, ", ".join(versions))

    def _serve(self, model: LoadedModel) -> ServedModel:
        key = (model.name, model.version)
        statistics = self._statistics.setdefault(key, ModelStatistics())
        served = ServedModel(model, self._features, self._device, statistics, self._clock)
        served.start()
        return served

    async def _unload(self, name: str) -> None:
        versions = self._name_to_versions.pop(name, None)
        if versions is not None:
            self._name_to_reason[name] = "unloaded"
            self._retire(versions)
            logger.info("model %r is unloaded", name)
        else:
            await asyncio.to_thread(self._repository.versions, name)

    def _retire(self, versions: dict[str, ServedModel]) -> None:
        for served in versions.values():
            task = asyncio.create_task(self._close(served))
            self._closing[served] = task

    async def _close(self, served: ServedModel) -> None:
        try:
            await served.close()
        except Exception:  # nobody waits for it; the log has the traceback
            logger.exception("closing model %r failed", served.model.name)
        finally:
            del self._closing[served]


def _version_order(version: str) -> tuple[int, str]:
    return len(version), version
