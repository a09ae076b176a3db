"""A client that leaves takes its requests with it, at every moment of their life."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI

from deployments.http_app import create_http_app
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Json

COMPLETIONS = "/v1/completions"


class Connection:
    """One ASGI request whose client can leave at a chosen moment."""

    def __init__(self, app: FastAPI, body: Json, *, broken: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self._left = asyncio.Event()
        self._broken = broken
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._broken and message["type"] == "http.response.body":
            raise OSError("connection reset")
        self.sent.append(message)

    def leave(self) -> None:
        self._left.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 -- the conditions are plain facts of a fake
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before_start", [False, True])
@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (3, 2)])
async def test_leaving_closes_every_request(
    stream: bool, before_start: bool, prompts: int, n: int
) -> None:
    backend = FakeBackend(gate=asyncio.Event(), gate_before_start=before_start)
    body = {"prompt": ["x"] * prompts, "n": n, "stream": stream}
    connection = Connection(create_http_app(backend), body)
    await until(lambda: len(backend.requests) == prompts)
    if stream and not before_start:
        await until(lambda: len(connection.sent) >= 2)
    assert not backend.closed
    connection.leave()
    async with asyncio.timeout(10):
        await connection.task
    assert sorted(backend.closed) == sorted(each.request_id for each in backend.requests)
    assert not [each for each in connection.sent if each.get("body") == b"data: [DONE]\n\n"]


async def test_cancelling_the_handler_closes_the_request() -> None:
    backend = FakeBackend(gate=asyncio.Event())
    connection = Connection(create_http_app(backend), {"prompt": "x", "stream": True})
    await until(lambda: len(connection.sent) >= 2)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert len(backend.closed) == 1


async def test_a_connection_that_breaks_while_sending_closes_the_request() -> None:
    backend = FakeBackend(gate=asyncio.Event())
    connection = Connection(create_http_app(backend), {"prompt": "x", "stream": True}, broken=True)
    async with asyncio.timeout(10):
        await connection.task
    assert len(backend.closed) == 1


async def test_tasks_do_not_outlive_their_request() -> None:
    backend = FakeBackend()
    before = asyncio.all_tasks()
    for stream in (False, True):
        connection = Connection(create_http_app(backend), {"prompt": ["x", "y"], "stream": stream})
        await connection.task
    assert asyncio.all_tasks() == before
