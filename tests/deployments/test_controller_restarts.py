"""What a controller that starts owes to those who dealt with the one before it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.aliases import AliasTarget
from deployments.backend import PinAdapter, RollBackAdapter, SetAlias
from deployments.state_transfer import export_state, import_state
from tests.deployments.cluster import Cluster, Killed, running_cluster
from tests.deployments.fake_clock import settle

Call = Callable[[Cluster], Awaitable[Any]]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
        path = cluster.write_adapter("v2", "new")
        await cluster.clock.finish(cluster.load("sql", path, load_inplace=True))
        yield cluster


def replace_it(cluster: Cluster) -> Awaitable[Any]:
    path = cluster.write_adapter("v3", "newest")
    return cluster.load("sql", path, op_id="op", load_inplace=True)


def unload_it(cluster: Cluster) -> Awaitable[Any]:
    return cluster.unload("sql", op_id="op")


def pin_it(cluster: Cluster) -> Awaitable[Any]:
    return cluster.controller.pin(PinAdapter(name="sql", pinned=True), "op")


def roll_it_back(cluster: Cluster) -> Awaitable[Any]:
    return cluster.controller.roll_back(RollBackAdapter(name="sql"), "op")


def alias_it(cluster: Cluster) -> Awaitable[Any]:
    asked = SetAlias(name="prod", targets=(AliasTarget("sql"),))
    return cluster.controller.set_alias(asked, "op")


@pytest.mark.parametrize("call", [replace_it, unload_it, pin_it, roll_it_back, alias_it])
async def test_a_call_repeated_at_once_waits_for_what_was_committed_and_gets_its_result(
    cluster: Cluster, call: Call
) -> None:
    step = "commit_alias" if call is alias_it else "commit"
    cluster.store.die_after = step
    lost = cluster.replicas["r2"]

    def die() -> None:
        lost.network.is_up.clear()
        cluster.kill_controller()

    cluster.store.on_death = die
    with pytest.raises(Killed):
        await cluster.clock.finish(call(cluster))
    cluster.start_controller()
    again = asyncio.ensure_future(call(cluster))
    await cluster.clock.advance(1)
    assert lost.link.holds_lease
    assert not again.done()
    result = await cluster.clock.finish(again)
    assert not lost.link.holds_lease
    assert result.name == ("prod" if call is alias_it else "sql")
    assert result.generation > 0


async def test_leases_that_were_granted_for_longer_than_now_are_waited_for(
    cluster: Cluster,
) -> None:
    lost = cluster.replicas["r2"]
    await cluster.clock.advance(3)
    lost.network.is_up.clear()
    cluster.kill_controller()
    cluster.settings = replace(cluster.settings, lease_s=2.0, poll_s=0.5)
    cluster.start_controller()
    unload = asyncio.ensure_future(cluster.unload("sql"))
    while not unload.done():
        # Nobody is told while it may still be served.
        if lost.link.holds_lease:
            await lost.digest_for("sql")
        await cluster.clock.advance(0.05)
        assert not (unload.done() and lost.link.holds_lease)
    await unload


async def test_members_of_before_and_after_new_settings_keep_their_leases(
    cluster: Cluster,
) -> None:
    settings = replace(cluster.settings, lease_s=90.0, poll_s=30.0)
    cluster.controller.configure(settings, cluster.sources())
    await cluster.add_replica("r3")
    left = {r.replica_id: r.lease_left_s for r in await cluster.controller.list_replicas()}
    assert left["r1"] <= 10 < left["r3"] <= 90
    for _ in range(40):
        await cluster.clock.advance(1)
        assert all(replica.link.holds_lease for replica in cluster.replicas.values())


async def test_a_forced_unload_is_carried_out_by_the_next_controller(cluster: Cluster) -> None:
    cluster.store.die_after = "commit"
    with pytest.raises(Killed):
        await cluster.clock.finish(cluster.unload("sql", op_id="op", force=True))
    cluster.start_controller()
    await cluster.clock.finish(cluster.unload("sql", op_id="op", force=True))
    await settle()
    for replica in cluster.replicas.values():
        assert {end.name for end in replica.aborted} == {"sql"}


async def test_a_replica_that_was_away_aborts_what_was_forced_out(cluster: Cluster) -> None:
    lost = cluster.replicas["r2"]
    lost.network.is_up.clear()
    await cluster.clock.finish(cluster.unload("sql", force=True))
    assert lost.aborted == []
    lost.network.is_up.set()
    await cluster.clock.until(lambda: lost.link.holds_lease)
    await settle()
    assert {end.name for end in lost.aborted} == {"sql"}


def import_into(cluster: Cluster, document: dict[str, Any]) -> None:
    cluster.kill_controller()
    store = type(cluster.store)(cluster.root / "journal.sqlite3")
    import_state(store.journal, json.dumps(document), replace=True)
    store.journal.close()
    cluster.start_controller()


async def test_what_an_import_brings_back_is_not_forced_out_again(cluster: Cluster) -> None:
    document = export_state(cluster.store.journal)
    await cluster.clock.finish(cluster.unload("sql", force=True))
    await settle()
    for replica in cluster.replicas.values():
        replica.aborted.clear()
    import_into(cluster, document)
    await cluster.clock.until(
        lambda: all(replica.link.table.find("sql") for replica in cluster.replicas.values())
    )
    await settle()
    assert all(replica.aborted == [] for replica in cluster.replicas.values())


async def test_an_import_waits_for_replicas_that_still_serve_what_was_before(
    cluster: Cluster,
) -> None:
    lost = cluster.replicas["r2"]
    lost.network.is_up.clear()
    document = export_state(cluster.store.journal)
    del document["adapters"]["sql"], document["kept"]["sql"]
    import_into(cluster, document)
    load = asyncio.ensure_future(cluster.load("other", cluster.write_adapter("other")))
    await cluster.clock.advance(1)
    assert lost.link.holds_lease
    assert not load.done()
    await cluster.clock.finish(load)
    assert not lost.link.holds_lease
