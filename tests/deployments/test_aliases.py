"""Aliases: moved by the same agreement, split by weight, never mistaken for adapters."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias, AliasTarget
from deployments.backend import DeleteAlias, SetAlias
from deployments.errors import (
    AdapterInUseError,
    AdapterNotFoundError,
    AdapterRejectedError,
    GenerationNotFoundError,
    NameConflictError,
    ReplicaUnavailableError,
)
from engine.errors import UnsupportedAdapterError
from tests.deployments.cluster import BASE, Cluster, Killed, running_cluster
from tests.deployments.fake_clock import settle


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        yield cluster


async def load(cluster: Cluster, name: str, content: str) -> AdapterVersion:
    path = cluster.write_adapter(f"{name}-{content}", content)
    version: AdapterVersion = await cluster.clock.finish(
        cluster.load(name, path, op_id=f"{name}-{content}", load_inplace=True)
    )
    return version


async def point(
    cluster: Cluster, alias: str, *targets: str | tuple[str, float], op_id: str = ""
) -> AdapterAlias:
    pairs = [(target, 1.0) if isinstance(target, str) else target for target in targets]
    asked = SetAlias(name=alias, targets=tuple(AliasTarget(*pair) for pair in pairs))
    op_id = op_id or f"alias-{alias}-{cluster.clock.now()}"
    return await cluster.clock.finish(cluster.controller.set_alias(asked, op_id))


async def served(cluster: Cluster, adapter: str, key: str = "") -> set[str]:
    replicas = cluster.replicas.values()
    return {await cluster.clock.finish(replica.digest_for(adapter, key)) for replica in replicas}


async def test_an_alias_follows_a_name_or_stays_on_a_generation(cluster: Cluster) -> None:
    first = await load(cluster, "sql", "a")
    await point(cluster, "prod", "sql")
    await point(cluster, "fixed", f"sql@{first.generation}")
    second = await load(cluster, "sql", "b")
    assert await served(cluster, "prod") == {second.digest}
    assert await served(cluster, "fixed") == {first.digest}


async def test_every_request_after_a_move_follows_it(cluster: Cluster) -> None:
    first, second = await load(cluster, "a", "1"), await load(cluster, "b", "2")
    await point(cluster, "prod", "a")
    lost = cluster.replicas["r2"]
    lost.network.is_up.clear()
    move = asyncio.ensure_future(point(cluster, "prod", "b"))
    while not move.done():
        if lost.link.holds_lease:
            assert await lost.digest_for("prod") == first.digest
        await cluster.clock.advance(0.05)
        await asyncio.sleep(0)
    await move
    with pytest.raises(ReplicaUnavailableError):
        await lost.digest_for("prod")
    assert await cluster.replicas["r1"].digest_for("prod") == second.digest


async def test_a_split_is_the_same_for_the_same_key_everywhere(cluster: Cluster) -> None:
    await load(cluster, "old", "1")
    canary = await load(cluster, "new", "2")
    await point(cluster, "prod", ("new", 1), ("old", 3))
    counts: Counter[str] = Counter()
    for index in range(400):
        digests = {await r.digest_for("prod", f"user-{index}") for r in cluster.replicas.values()}
        (digest,) = digests
        counts[digest] += 1
    assert 60 <= counts[canary.digest] <= 140


def test_a_growing_canary_takes_keys_and_gives_none_back() -> None:
    def alias(weight: float) -> AdapterAlias:
        targets = (AliasTarget("new", weight), AliasTarget("old", 100 - weight))
        return AdapterAlias(name="prod", targets=targets, generation=1)

    keys = [str(index) for index in range(500)]
    shares = [{key for key in keys if alias(w).choose(key) == "new"} for w in (1, 10, 50, 99)]
    assert all(less < more for less, more in itertools.pairwise(shares))


async def test_names_of_aliases_and_adapters_are_never_the_same(cluster: Cluster) -> None:
    path = cluster.write_adapter("x", "x")
    await load(cluster, "sql", "a")
    await point(cluster, "prod", "sql")
    for name in (BASE, "sql", "aliases/x", "operations"):
        with pytest.raises(NameConflictError):
            await point(cluster, name, "sql")
    for name in ("prod", "aliases/x", "operations"):
        with pytest.raises(NameConflictError):
            await cluster.clock.finish(cluster.load(name, path))
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.replicas["r1"].digest_for("operations"))


async def test_targets_must_be_in_service_or_kept(cluster: Cluster) -> None:
    version = await load(cluster, "sql", "a")
    await point(cluster, "prod", "sql")
    for target, error in (
        ("nothing", AdapterNotFoundError),
        (f"sql@{version.generation + 50}", GenerationNotFoundError),
        ("prod", AdapterNotFoundError),
    ):
        with pytest.raises(error) as caught:
            await point(cluster, "other", target)
        assert caught.value.param == "target"
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.replicas["r1"].digest_for("prod@1"))


async def test_what_an_alias_stands_for_cannot_be_unloaded(cluster: Cluster) -> None:
    version = await load(cluster, "sql", "a")
    await point(cluster, "prod", f"sql@{version.generation}")
    with pytest.raises(AdapterInUseError, match="prod"):
        await cluster.clock.finish(cluster.unload("sql"))
    asked = DeleteAlias(name="prod")
    await cluster.clock.finish(cluster.controller.delete_alias(asked, "delete"))
    await cluster.clock.finish(cluster.unload("sql"))
    for replica in cluster.replicas.values():
        with pytest.raises(AdapterNotFoundError):
            await cluster.clock.finish(replica.digest_for("prod"))


async def test_an_aliased_generation_is_kept_and_loaded(cluster: Cluster) -> None:
    first = await load(cluster, "sql", "a")
    await load(cluster, "sql", "b")
    await point(cluster, "prod", f"sql@{first.generation}")
    for content in "cdefg":
        await load(cluster, "sql", content)
    await settle()
    for replica in cluster.replicas.values():
        assert first.digest in replica.engine.loaded
        num_loads = replica.engine.num_loads
        assert await replica.digest_for("prod") == first.digest
        assert replica.engine.num_loads == num_loads
    assert len((await cluster.controller.get_adapter("sql")).kept) == 3


async def test_a_target_that_a_replica_refuses_moves_nothing(cluster: Cluster) -> None:
    first, second = await load(cluster, "sql", "a"), await load(cluster, "sql", "b")
    await point(cluster, "prod", "sql")
    await settle()
    cluster.replicas["r2"].engine.refusals["sql"] = UnsupportedAdapterError("no")
    with pytest.raises(AdapterRejectedError):
        await point(cluster, "prod", f"sql@{first.generation}")
    assert await served(cluster, "prod") == {second.digest}
    await settle()
    assert set(cluster.replicas["r1"].engine.loaded) == {second.digest}


@pytest.mark.parametrize("moment", ["die_before", "die_after"])
async def test_controller_may_die_at_the_commit_of_an_alias(cluster: Cluster, moment: str) -> None:
    first, second = await load(cluster, "a", "1"), await load(cluster, "b", "2")
    await point(cluster, "prod", "a")
    setattr(cluster.store, moment, "commit_alias")
    with pytest.raises(Killed):
        await point(cluster, "prod", "b", op_id="move")
    cluster.start_controller()
    await cluster.clock.advance(3)
    expected = second if moment == "die_after" else first
    assert await served(cluster, "prod") == {expected.digest}
    again = await point(cluster, "prod", "b", op_id="move")
    assert again.targets == (AliasTarget("b"),)
    joined = await cluster.add_replica("r3")
    assert await cluster.clock.finish(joined.digest_for("prod")) == second.digest
    assert await cluster.controller.list_aliases() == [again]
