"""A client that leaves takes its requests with it, at every moment of their life."""

import asyncio

import pytest

from deployments.http_app import create_http_app
from tests.deployments.asgi_connection import Connection, until
from tests.deployments.fake_backend import FakeBackend


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
