"""However a request ends, its adapter can be unloaded at once and its memory comes back.

A real engine with a tiny model behind the HTTP surface, a real controller and journal. After every
way out everything that is counted is counted again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from deployments.backend import LoadAdapter
from engine.async_engine import AsyncEngine
from tests.consistency.adapter_makers import ForcingAdapters, content_of
from tests.deployments.counted_world import (
    BASE,
    COMPLETIONS,
    LONG,
    NAME,
    PROMPT,
    World,
    counted_engine,
    open_world,
    until,
)
from tests.deployments.http_client import Json, assert_error


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    with counted_engine(tmp_path_factory.mktemp("model")) as engine:
        yield engine


@pytest.fixture
async def world(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(engine, tmp_path) as world:
        yield world


# -- ways out


async def finish(world: World) -> None:
    document = await world.complete()
    assert document["choices"][0]["finish_reason"] == "length"


async def finish_a_stream(world: World) -> None:
    events = await world.client.events(
        COMPLETIONS, {"model": NAME, "prompt": PROMPT, "max_tokens": 4}
    )
    assert events


async def finish_by_a_stop_string(world: World) -> None:
    first = (await world.complete())["choices"][0]["text"].split()[0]
    document = await world.complete(stop=first)
    assert document["choices"][0]["finish_reason"] == "stop"


async def finish_several_choices(world: World) -> None:
    document = await world.complete(n=3, temperature=1.0, prompt=[PROMPT, PROMPT])
    assert len(document["choices"]) == 6


async def fail_for_length(world: World) -> None:
    document = await world.complete(prompt="t5 " * 200)
    assert document["error"]["code"] == 400


async def fail_for_a_value(world: World) -> None:
    document = await world.complete(logit_bias={"9999999": 1})
    assert document["error"]["code"] == 400


async def fail_for_one_of_several_prompts(world: World) -> None:
    document = await world.complete(prompt=[PROMPT, "t5 " * 200, PROMPT], max_tokens=LONG)
    assert document["error"]["code"] == 400


async def leave(world: World, **body: object) -> None:
    connection = world.connect(**body)
    await world.until_running()
    connection.leave()
    await connection.task


async def leave_a_stream(world: World) -> None:
    await leave(world, stream=True)


async def leave_several_choices(world: World) -> None:
    await leave(world, stream=True, n=3, temperature=1.0, max_tokens=30)


async def leave_while_waiting(world: World) -> None:
    others = [world.connect(model=BASE, max_tokens=30) for _ in range(4)]
    await until(lambda: world.engine.stats().num_running == 4)
    connection = world.connect()
    await until(lambda: world.engine.stats().num_waiting > 0)
    connection.leave()
    await connection.task
    await asyncio.gather(*(other.task for other in others))


async def break_a_connection(world: World) -> None:
    await world.connect(stream=True, broken=True).task


async def cancel_the_handler(world: World) -> None:
    connection = world.connect(stream=True)
    await world.until_running()
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task


async def be_aborted(world: World, **body: object) -> None:
    connection = world.connect(**body)
    await world.until_running()
    for request_id in tuple(world.server._running):
        await world.engine.abort(request_id)
    await connection.task


async def be_aborted_while_streaming(world: World) -> None:
    await be_aborted(world, stream=True)


async def be_preempted_and_finish(world: World) -> None:
    before = world.engine.stats().total_preemptions
    texts = await asyncio.gather(
        *(world.complete(prompt=f"{PROMPT} t{index}", max_tokens=LONG) for index in range(3))
    )
    assert {text["choices"][0]["finish_reason"] for text in texts} == {"length"}
    assert world.engine.stats().total_preemptions > before


async def be_preempted_and_leave(world: World) -> None:
    before = world.engine.stats().total_preemptions
    connections = [
        world.connect(prompt=f"{PROMPT} t{index}", stream=bool(index)) for index in range(3)
    ]
    await until(lambda: world.engine.stats().total_preemptions > before)
    for connection in connections:
        connection.leave()
    await asyncio.gather(*(connection.task for connection in connections))


WAYS_OUT: list[Callable[[World], Awaitable[None]]] = [
    finish,
    finish_a_stream,
    finish_by_a_stop_string,
    finish_several_choices,
    fail_for_length,
    fail_for_a_value,
    fail_for_one_of_several_prompts,
    leave,
    leave_a_stream,
    leave_several_choices,
    leave_while_waiting,
    break_a_connection,
    cancel_the_handler,
    be_aborted,
    be_aborted_while_streaming,
    be_preempted_and_finish,
    be_preempted_and_leave,
]


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize("way_out", WAYS_OUT, ids=lambda way_out: way_out.__name__)
async def test_after_every_way_out_an_unload_gives_everything_back(
    world: World, way_out: Callable[[World], Awaitable[None]], force: bool
) -> None:
    await way_out(world)
    await world.unload(force=force)
    await world.until_nothing_is_left()


RUNNING: list[Json] = [
    {},
    {"stream": True},
    {"n": 3, "temperature": 1.0, "max_tokens": 30},
    {"n": 2, "temperature": 1.0, "max_tokens": 40, "stream": True, "prompt": [PROMPT, "t8"]},
]


@pytest.mark.parametrize("body", RUNNING, ids=["whole", "stream", "n", "n streams"])
async def test_an_unload_does_not_wait_for_running_requests_which_finish(
    world: World, body: Json
) -> None:
    connection = world.connect(**body)
    await world.until_running()
    await world.unload()
    assert not connection.task.done()
    assert (await world.complete())["error"]["code"] == 404
    await connection.task
    text = b"".join(message.get("body", b"") for message in connection.sent)
    assert b'"length"' in text
    assert b'"abort"' not in text
    await world.until_nothing_is_left()


@pytest.mark.parametrize("body", RUNNING, ids=["whole", "stream", "n", "n streams"])
async def test_force_ends_running_requests(world: World, body: Json) -> None:
    connection = world.connect(**body)
    await world.until_running()
    await world.unload(force=True)
    await connection.task
    text = b"".join(message.get("body", b"") for message in connection.sent)
    assert b'"abort"' in text
    await world.until_nothing_is_left()


async def test_force_ends_requests_that_wait_or_were_preempted(world: World) -> None:
    before = world.engine.stats().total_preemptions
    connections = [world.connect(prompt=f"{PROMPT} t{index}") for index in range(6)]
    await until(lambda: world.engine.stats().total_preemptions > before)
    await world.unload(force=True)
    await asyncio.gather(*(connection.task for connection in connections))
    await world.until_nothing_is_left()


async def test_memory_full_of_pinned_adapters_is_said_and_nothing_is_evicted(
    world: World, tmp_path: Path
) -> None:
    adapters = ForcingAdapters(tmp_path / "adapters")

    async def load(index: int, *, pin: bool) -> httpx.Response:
        path = await asyncio.to_thread(adapters.write, index)
        body = {"name": f"a{index}", "source": str(path), "pin": pin}
        return await world.client.post("/v1/adapters", json=body)

    await world.unload()
    for index in range(1, 5):
        assert (await load(index, pin=True)).status_code == 200
    for pin in (False, True):
        refused = await load(5 + pin, pin=pin)
        assert_error(refused, 507, None)
        assert "r1" in refused.text
    for index in range(1, 5):
        text = (await world.complete(model=f"a{index}"))["choices"][0]["text"]
        assert adapters.contents(text) == (content_of(index),)
    for index in range(1, 5):
        assert (await world.client.delete(f"/v1/adapters/a{index}")).status_code == 200
    await world.until_nothing_is_left()


async def test_what_is_replaced_while_it_runs_goes_with_its_last_request(
    world: World, tmp_path: Path
) -> None:
    connection = world.connect(stream=True)
    await world.until_running()
    path = await asyncio.to_thread(ForcingAdapters(tmp_path / "adapters").write, 1)
    load = LoadAdapter(name=NAME, source=str(path), load_inplace=True)
    await world.controller.load(load, "replace")
    adapters = ForcingAdapters(tmp_path)
    new = await world.complete()
    assert adapters.contents(new["choices"][0]["text"]) == (content_of(1),)
    await connection.task
    await until(lambda: not world.link.adapters.is_loaded(world.version.digest))
    await world.unload()
    await until(lambda: world.engine.loras() == [])
