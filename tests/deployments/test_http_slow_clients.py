"""Hundreds of clients that read slowly and dozens that vanish: nothing of theirs stays behind."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.async_engine import AsyncEngine
from tests.deployments.counted_world import BASE, NAME, World, counted_engine, open_world, until

NUM_SLOW, NUM_VANISHING, NUM_OTHERS = 300, 50, 20
NUM_TOKENS = 12
PAUSE_S = 0.05


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    with counted_engine(tmp_path_factory.mktemp("model")) as engine:
        yield engine


async def vanish(world: World, rng: random.Random) -> None:
    """Leave at any moment from before the request waits to the middle of its stream."""
    stream = rng.random() < 0.7
    connection = world.connect(stream=stream, pause_s=rng.choice((0.0, PAUSE_S)))
    await asyncio.sleep(rng.uniform(0, 2))
    connection.leave()
    await connection.task


async def test_slow_and_vanishing_clients_leave_nothing_behind(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    rng = random.Random(7)
    async with open_world(engine, tmp_path) as world:
        num_tasks = len(asyncio.all_tasks())
        slow = [
            world.connect(
                model=rng.choice((NAME, BASE)), stream=True, pause_s=PAUSE_S, max_tokens=NUM_TOKENS
            )
            for _ in range(NUM_SLOW)
        ]
        vanishing = [asyncio.create_task(vanish(world, rng)) for _ in range(NUM_VANISHING)]
        for _ in range(NUM_OTHERS):
            document = await world.complete(max_tokens=2)
            assert document["choices"][0]["finish_reason"] == "length"
        async with asyncio.timeout(120):
            await asyncio.gather(*vanishing, *(connection.task for connection in slow))
        for connection in slow:
            assert connection.body.endswith(b"data: [DONE]\n\n")
            assert b'"length"' in connection.body and b'"abort"' not in connection.body
        assert world.app.state.access.limiter.num_running == 0
        # The replica's own tasks come and go.
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        await world.unload()
        await world.until_nothing_is_left()
