"""Ten thousand hostile requests: no 5xx, no hang, every refusal in the envelope, memory flat."""

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from schemathesis.core import NOT_SET

from deployments.http_app import create_http_app
from deployments.openai.openapi import BODIES, describe_app
from engine.async_engine import AsyncEngine
from tests.deployments.asgi_call import Answer, call
from tests.deployments.counted_world import NAME, counted_engine, open_world
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.hostile_bodies import GOOD, Hostile, hostile_requests

SEED = 20261201
NUM_FAKE, NUM_REAL = 8500, 1200
EXAMPLES_PER_OPERATION = 22
# Endless by design: a stream of events for the admin page.
ENDLESS = "/admin/events"


def check(answer: Answer, asked: object) -> None:
    shown = f"{str(asked)[:600]}: {answer.status} {answer.body[:300]!r}"
    assert answer.status < 500, shown
    if answer.status >= 400:
        error = json.loads(answer.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, shown
        assert error["code"] == answer.status, shown
        assert len(error["message"]) < 2100, shown


async def send(app: FastAPI, asked: Hostile) -> Answer:
    return await call(app, asked.method, asked.path, asked.body, headers=asked.headers)


def forget(backend: FakeBackend) -> None:
    """A fake remembers everything, which is not what is measured."""
    for kept in (backend.requests, backend.closed, backend.loads, backend.unloads):
        kept.clear()
    backend.rollbacks.clear()
    for named in (backend.adapters, backend.aliases):
        named.clear()


async def test_hostile_bodies_harm_nobody_and_leave_nothing_behind() -> None:
    backend = FakeBackend()
    app = create_http_app(backend)
    paths = [path for _, path in BODIES]
    counts: list[int] = []
    statuses: set[int] = set()
    for number, asked in enumerate(hostile_requests(SEED, NUM_FAKE, paths)):
        answer = await send(app, asked)
        check(answer, asked)
        statuses.add(answer.status)
        if number % 100 == 0:
            forget(backend)
        if number % (NUM_FAKE // 4) == NUM_FAKE // 4 - 1:
            forget(backend)
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert {200, 400, 404} <= statuses
    assert counts[-1] < counts[0] * 1.02 + 500, counts
    assert len(asyncio.all_tasks()) == 1
    assert app.state.access.limiter.num_running == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    with counted_engine(tmp_path_factory.mktemp("model")) as engine:
        yield engine


async def test_hostile_bodies_reach_an_engine_and_leave_nothing_in_it(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    async with open_world(engine, tmp_path) as world:
        waiting = hostile_requests(SEED + 1, NUM_REAL, list(GOOD), adapter=NAME)
        statuses: set[int] = set()

        async def work() -> None:
            for asked in waiting:
                answer = await send(world.app, asked)
                check(answer, asked)
                statuses.add(answer.status)

        await asyncio.gather(*(work() for _ in range(12)))
        assert {200, 400, 404} <= statuses
        assert (await world.complete())["choices"][0]["finish_reason"] == "length"
        await world.unload()
        await world.until_nothing_is_left()


def test_requests_made_from_the_openapi_document_get_no_5xx() -> None:
    app = create_http_app(FakeBackend())
    document = json.loads(json.dumps(describe_app(app, "1")))
    schema = schemathesis.openapi.from_dict(document)
    num_sent = 0
    with asyncio.Runner() as runner:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path == ENDLESS:
                continue

            @hypothesis.seed(SEED)
            @hypothesis_settings(
                max_examples=EXAMPLES_PER_OPERATION,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def attack(case: schemathesis.Case) -> None:
                nonlocal num_sent
                num_sent += 1
                url = urlsplit(case.as_transport_kwargs(base_url="http://test")["url"])
                path = f"{url.path}?{url.query}" if url.query else url.path
                body = b"" if case.body is NOT_SET else json.dumps(case.body).encode()
                check(runner.run(call(app, case.method, path, body)), (path, body))

            attack()
    assert num_sent + NUM_FAKE + NUM_REAL >= 10_000, num_sent


def test_every_body_is_described() -> None:
    app = create_http_app(FakeBackend())
    document = describe_app(app, "1")
    changing = {
        (method, path)
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("post", "put")
    }
    without_json = {
        ("post", "/v1/adapters/{name}/pin"),
        ("post", "/v1/adapters/{name}/unpin"),
        ("put", "/v1/adapters/{name}"),
    }
    assert changing - without_json == BODIES.keys()
