"""Earlier versions of a name: kept, asked for by generation, rolled back to."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import AdapterVersion
from deployments.backend import PinAdapter, RollBackAdapter
from deployments.errors import (
    AdapterNotFoundError,
    AdapterRejectedError,
    GenerationNotFoundError,
    NoEarlierVersionError,
)
from engine.errors import UnsupportedAdapterError
from tests.deployments.cluster import Cluster, running_cluster
from tests.deployments.fake_clock import settle


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        yield cluster


async def load(cluster: Cluster, content: str, **options: bool) -> AdapterVersion:
    path = cluster.write_adapter(f"source-{content}", content)
    version: AdapterVersion = await cluster.clock.finish(
        cluster.load("sql", path, op_id=f"load-{content}", load_inplace=True, **options)
    )
    return version


async def roll_back(cluster: Cluster, generation: int | None = None) -> AdapterVersion:
    rollback = RollBackAdapter(name="sql", generation=generation, requested_by="ann")
    op_id = f"rollback-{generation}-{cluster.clock.now()}"
    return await cluster.clock.finish(cluster.controller.roll_back(rollback, op_id))


async def served(cluster: Cluster, adapter: str) -> set[str]:
    replicas = cluster.replicas.values()
    return {await cluster.clock.finish(replica.digest_for(adapter)) for replica in replicas}


async def test_earlier_generations_are_served_while_they_are_kept(cluster: Cluster) -> None:
    versions = [await load(cluster, content) for content in "abcd"]
    first, second, third, fourth = versions
    assert await served(cluster, "sql") == {fourth.digest}
    for kept in (second, third, fourth):
        assert await served(cluster, f"sql@{kept.generation}") == {kept.digest}
    for replica in cluster.replicas.values():
        with pytest.raises(GenerationNotFoundError):
            await replica.digest_for(f"sql@{first.generation}")
    assert (await cluster.controller.get_adapter("sql")).kept == (third, second)


async def test_an_earlier_generation_occupies_memory_only_once_asked_for(cluster: Cluster) -> None:
    first = await load(cluster, "a")
    second = await load(cluster, "b")
    await settle()
    engine = cluster.replicas["r1"].engine
    assert set(engine.loaded) == {second.digest}
    await cluster.clock.finish(cluster.replicas["r1"].digest_for(f"sql@{first.generation}"))
    await settle()
    assert set(engine.loaded) == {first.digest, second.digest}
    num_loads = engine.num_loads
    await cluster.clock.finish(cluster.replicas["r1"].digest_for(f"sql@{first.generation}"))
    assert engine.num_loads == num_loads
    third, fourth = await load(cluster, "c"), await load(cluster, "d")
    await settle()
    assert set(engine.loaded) == {fourth.digest}
    assert third.digest not in engine.loaded


async def test_rollback_puts_the_last_other_bytes_in_service_as_a_new_generation(
    cluster: Cluster,
) -> None:
    first, second = await load(cluster, "a"), await load(cluster, "b")
    back = await roll_back(cluster)
    assert (back.digest, back.created_by) == (first.digest, "ann")
    assert back.generation > second.generation
    assert await served(cluster, "sql") == {first.digest}
    again = await roll_back(cluster)
    assert again.digest == second.digest
    assert again.generation > back.generation


async def test_rollback_to_a_given_generation(cluster: Cluster) -> None:
    first, _, third = [await load(cluster, content) for content in "abc"]
    back = await roll_back(cluster, first.generation)
    assert back.digest == first.digest
    assert await roll_back(cluster, back.generation) == back
    with pytest.raises(GenerationNotFoundError):
        await roll_back(cluster, 99)
    assert await served(cluster, f"sql@{third.generation}") == {third.digest}


async def test_rollback_does_not_need_the_source_any_more(cluster: Cluster) -> None:
    first = await load(cluster, "a")
    await load(cluster, "b")
    cluster.write_adapter("source-a", "overwritten")
    assert (await roll_back(cluster)).digest == first.digest


async def test_rollback_that_a_replica_refuses_changes_nothing(cluster: Cluster) -> None:
    await load(cluster, "a")
    second = await load(cluster, "b")
    await settle()
    cluster.replicas["r2"].engine.refusals["sql"] = UnsupportedAdapterError("no")
    with pytest.raises(AdapterRejectedError):
        await roll_back(cluster)
    assert await served(cluster, "sql") == {second.digest}


async def test_without_an_earlier_version_there_is_no_rollback(cluster: Cluster) -> None:
    with pytest.raises(AdapterNotFoundError):
        await roll_back(cluster)
    await load(cluster, "a")
    with pytest.raises(NoEarlierVersionError):
        await roll_back(cluster)


async def test_unload_forgets_earlier_versions_for_good(cluster: Cluster) -> None:
    first = await load(cluster, "a")
    await load(cluster, "b")
    await cluster.clock.finish(cluster.replicas["r1"].digest_for(f"sql@{first.generation}"))
    await cluster.clock.finish(cluster.unload("sql"))
    await settle()
    assert cluster.replicas["r1"].engine.loaded == {}
    await cluster.clock.finish(
        cluster.load("sql", cluster.write_adapter("c", "c"), op_id="load-again")
    )
    for replica in cluster.replicas.values():
        with pytest.raises(GenerationNotFoundError):
            await replica.digest_for(f"sql@{first.generation}")


async def test_versions_survive_controller_and_replicas(cluster: Cluster) -> None:
    first, second = await load(cluster, "a"), await load(cluster, "b")
    cluster.kill_controller()
    cluster.start_controller()
    joined = await cluster.add_replica("r3")
    assert await cluster.clock.finish(joined.digest_for(f"sql@{first.generation}")) == first.digest
    assert (await cluster.controller.get_adapter("sql")).kept == (first,)
    back = await roll_back(cluster)
    assert back.generation > second.generation


async def test_pinning_changes_neither_generation_nor_kept_versions(cluster: Cluster) -> None:
    first, second = await load(cluster, "a"), await load(cluster, "b")
    for pinned in (True, False):
        pin = PinAdapter(name="sql", pinned=pinned)
        version = await cluster.clock.finish(cluster.controller.pin(pin, f"pin-{pinned}"))
        assert (version.generation, version.pinned) == (second.generation, pinned)
        for replica in cluster.replicas.values():
            await cluster.clock.until(
                lambda engine=replica.engine, pinned=pinned: (
                    engine.pinned == ({second.digest} if pinned else set())
                )
            )
    assert (await cluster.controller.get_adapter("sql")).kept == (first,)
    assert await served(cluster, f"sql@{first.generation}") == {first.digest}
