"""The infer route with clients that dawdle, leave, or meet the server's end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import orjson
import pytest

from server.http_body import BodyReader, Message
from server.infer_route import InferRoute, InferTarget
from tests.test_model_manager import World, in_world, until

BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


class Client:
    """One connection to the route of a world; it sends its body in parts, and may leave."""

    def __init__(self, world: World, bodies: BodyReader, model: str = "m") -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        scope = {"method": "POST", "headers": []}
        route = InferRoute(world.manager, bodies)
        self.task = asyncio.create_task(
            route(InferTarget(model, None), scope, self.messages.get, self.send)
        )

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def send_body(self, body: bytes = BODY, *, is_all: bool = True) -> None:
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": not is_all})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def status(self) -> int:
        """That of the answer, 0 where none was sent."""
        await asyncio.wait([self.task])
        return int(self.sent[0]["status"]) if self.sent else 0

    def error(self) -> str:
        return str(orjson.loads(self.sent[1]["body"])["error"])


def with_clients(
    story: Callable[[World, BodyReader, Callable[[], int], Callable[[str], int]], Awaitable[None]],
) -> None:
    """Run a story with a served model `m`, and what counts its queue and its failures."""

    async def run(world: World) -> None:
        statistics = world.manager.get("m").statistics

        def num_queued() -> int:
            return statistics.snapshot().num_pending

        def num_failed(reason: str) -> int:
            failed = statistics.snapshot().reason_to_num_failed
            assert sum(failed.values()) == failed[reason]  # type: ignore[index]
            return failed[reason]  # type: ignore[index]

        await story(world, BodyReader(max_bytes=1000), num_queued, num_failed)

    in_world(run, m={"1": 1.0})


def test_a_slow_body_does_not_hold_the_model() -> None:
    async def story(
        world: World, bodies: BodyReader, _: object, num_failed: Callable[[str], int]
    ) -> None:
        backend = world.backend
        slow = Client(world, bodies)
        slow.send_body(BODY[:9], is_all=False)
        await asyncio.sleep(0)
        await world.manager.unload("m")
        await until(lambda: backend.is_closed)
        slow.send_body(BODY[9:])
        assert await slow.status() == 400
        assert "unloaded" in slow.error()
        assert num_failed("REJECTED") == 1

    with_clients(story)


def test_a_slow_body_gets_the_model_that_is_served_when_it_is_there() -> None:
    async def story(world: World, bodies: BodyReader, *_: object) -> None:
        slow = Client(world, bodies)
        await asyncio.sleep(0)
        world.repository.models["m"]["1"] = 5.0
        await world.manager.load("m")
        slow.send_body()
        assert await slow.status() == 200
        assert world.backend.num_runs == 1

    with_clients(story)


def test_a_body_that_is_not_complete_at_the_end_is_rejected() -> None:
    async def story(
        world: World, bodies: BodyReader, _: object, num_failed: Callable[[str], int]
    ) -> None:
        slow = Client(world, bodies)
        slow.send_body(BODY[:9], is_all=False)
        await asyncio.sleep(0)
        bodies.stop()
        assert await slow.status() == 503
        late = Client(world, bodies)
        late.send_body()
        assert await late.status() == 503
        assert "shutting down" in late.error()
        assert num_failed("REJECTED") == 2

    with_clients(story)


def test_a_client_that_leaves_is_canceled_and_one_that_the_server_cancels_is_rejected() -> None:
    async def story(
        world: World,
        bodies: BodyReader,
        num_queued: Callable[[], int],
        num_failed: Callable[[str], int],
    ) -> None:
        running = await world.occupy("m")
        leaving, staying = Client(world, bodies), Client(world, bodies)
        for client in (leaving, staying):
            client.send_body()
        await until(lambda: num_queued() == 2)
        leaving.leave()
        assert await leaving.status() == 0
        assert num_failed("CANCELED") == 1
        staying.task.cancel()
        assert await staying.status() == 503
        snapshot = world.manager.get("m").statistics.snapshot()
        assert snapshot.reason_to_num_failed["REJECTED"] == 1
        world.backend.gate.set()
        await running
        assert world.backend.num_runs == 1

    with_clients(story)


def test_a_fault_of_the_model_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World, bodies: BodyReader, *_: object) -> None:
        client = Client(world, bodies)
        client.send_body(BODY.replace(b"1,2,3,4", b"-1,2,3,4"))
        assert await client.status() == 500

    with_clients(story)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage() == "model 'm:1': negative value"
    assert record.exc_info is None
