"""The table lookup endpoint: keys of one table in, rows out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from cache import Device, FeatureCache, Lookup, LookupResult, Table
from cache.device import Buffers
from cache.errors import UnknownTableError
from models.tensor_spec import TensorSpec
from server.errors import InvalidRequestError, QueueFullError
from server.oip_data import array_from_json
from server.oip_decode import decode_request, parse_object
from server.oip_encode import EncodedResponse, encode_response
from server.requests import InferenceRequest, InferenceResponse

MAX_WAITING = 64
MAX_KEPT_BYTES = 1 << 20  # of rows, by each thread, for its next lookup
KEYS = TensorSpec("keys", "INT64", (-1,))


class TableLookup:
    """Looks up rows of one table for a client.

    It has threads of its own, so that tables on a slow disk hold up nothing but lookups. At most
    MAX_WAITING lookups wait for one; a lookup that is cancelled while it waits is not run. The
    device writes rows to host memory of its own, and an answer gets a copy.
    """

    def __init__(
        self, features: FeatureCache, device: Device, max_answer_bytes: int, num_threads: int
    ) -> None:
        self.features = features
        self._device = device
        self._max_answer_bytes = max_answer_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lookup")
        self._free_threads = asyncio.Semaphore(num_threads)
        self._waiting: set[asyncio.Task[Any]] = set()
        self._unfinished: set[Future[EncodedResponse]] = set()
        self._free_buffers: list[Buffers] = []  # a stack, of which each running lookup takes one

    async def answer(self, name: str, body: bytes, header_length: int | None) -> EncodedResponse:
        """The answer to a lookup in the protocol's form or the short form.

        Raises UnknownTableError, InvalidRequestError, AbsentKeyError, SourceError and
        QueueFullError.
        """
        await self._wait_for_thread()
        loop = asyncio.get_running_loop()
        future = self._threads.submit(self._answer, name, body, header_length)
        self._unfinished.add(future)
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(self._finish, done))
        return await asyncio.wrap_future(future)

    async def _wait_for_thread(self) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFullError(f"the queue of table lookups is full ({MAX_WAITING} wait)")
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            await self._free_threads.acquire()
        finally:
            self._waiting.discard(task)

    def _finish(self, future: Future[EncodedResponse]) -> None:
        # A thread is free when its lookup is done, whether or not somebody still waits for it.
        self._unfinished.discard(future)
        self._free_threads.release()

    def stop(self) -> bool:
        """Takes no more lookups, and drops those that have not begun.

        Returns False when one still runs: its thread keeps the process alive until it is done.
        """
        for task in self._waiting:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._unfinished:
            return False
        while self._free_buffers:
            self._free_buffers.pop().close()
        return True

    def _answer(self, name: str, body: bytes, header_length: int | None) -> EncodedResponse:
        table = self.table(name)
        if header_length is None:
            message = parse_object(body, "the request")
            if "inputs" not in message and "keys" in message:
                return self._answer_short(table, message["keys"])
        rows_spec = TensorSpec("rows", table.datatype, (-1, table.dim))
        request = decode_request(body, header_length, (KEYS,), (rows_spec,), max_batch_size=0)
        return self._answer_protocol(table, request, rows_spec)

    def table(self, name: str) -> Table:
        """The table with that name; raises UnknownTableError."""
        if name not in self.features.tables:
            raise UnknownTableError(f"unknown table '{name}'")
        return self.features.tables[name]

    def _answer_short(self, table: Table, keys: object) -> EncodedResponse:
        num_keys = len(keys) if isinstance(keys, list) else 0
        rows, result = self._look_up(table, array_from_json(keys, KEYS, (num_keys,)))
        if not np.isfinite(rows).all():
            raise InvalidRequestError(
                "the rows hold NaN or infinity, which JSON cannot say; ask for binary data in the "
                "protocol's form"
            )
        body = orjson.dumps({"rows": rows, **_counts(result)}, option=orjson.OPT_SERIALIZE_NUMPY)
        return EncodedResponse((body,), None)

    def _answer_protocol(
        self, table: Table, request: InferenceRequest, rows_spec: TensorSpec
    ) -> EncodedResponse:
        rows, result = self._look_up(table, request.inputs["keys"])
        response = InferenceResponse({"rows": rows}, _counts(result))
        return encode_response(table.name, "1", request, response, (rows_spec,))

    def _look_up(
        self, table: Table, keys: NDArray[np.generic]
    ) -> tuple[NDArray[np.float32], LookupResult]:
        num_bytes = keys.size * table.row_bytes
        if num_bytes > self._max_answer_bytes:
            raise InvalidRequestError(
                f"input 'keys': expected at most {self._max_answer_bytes // table.row_bytes} keys "
                f"(their rows may take {self._max_answer_bytes} bytes, max_body_bytes), "
                f"got {keys.size}"
            )
        with self._buffers(num_bytes) as buffers:
            rows = buffers.rows("rows", keys.size, table.dim)
            with self.features.frame() as frame:
                (result,) = frame.lookup([Lookup((table.name,), keys.astype(np.int64), rows)])
            return np.array(rows), result  # the frame is left, so the rows are there

    @contextmanager
    def _buffers(self, num_bytes: int) -> Iterator[Buffers]:
        """Host memory that the device can write, for one lookup; a large one is given back."""
        try:
            buffers = self._free_buffers.pop()
        except IndexError:
            buffers = self._device.new_buffers(is_on_host=True)
        try:
            yield buffers
        finally:
            if num_bytes > MAX_KEPT_BYTES:
                buffers.close()
            else:
                self._free_buffers.append(buffers)


def _counts(result: LookupResult) -> dict[str, int]:
    return {
        "device": result.num_device,
        "host": result.num_host,
        "source": result.num_source,
        "absent": result.num_absent,
    }
