"""What the cluster promises when replicas or the controller die, stall or lose contact."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.aliases import AliasTarget
from deployments.backend import SetAlias
from deployments.cluster_protocol import Register
from deployments.errors import (
    AdapterNotFoundError,
    JournalUnavailableError,
    ReplicaUnavailableError,
)
from tests.deployments.cluster import Cluster, Killed, running_cluster
from tests.deployments.fake_clock import settle


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        yield cluster


async def test_replica_that_dies_during_prepare_is_not_waited_for(cluster: Cluster) -> None:
    cluster.replicas["r2"].engine.gate.clear()
    load = asyncio.ensure_future(cluster.load("sql", cluster.write_adapter("sql")))
    await cluster.clock.until(lambda: cluster.replicas["r2"].engine.num_loads == 1)
    assert not load.done()
    cluster.replicas["r2"].kill()
    cluster.liveness.dead.add("r2")
    await cluster.clock.finish(load, within_s=1)
    assert [r.replica_id for r in await cluster.controller.list_replicas()] == ["r1"]


async def test_load_waits_for_a_replica_that_is_just_being_replaced(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, "r1") as cluster:
        cluster.replicas["r1"].engine.gate.clear()
        load = asyncio.ensure_future(cluster.load("sql", cluster.write_adapter("sql")))
        await cluster.clock.until(lambda: cluster.replicas["r1"].engine.num_loads == 1)
        cluster.replicas["r1"].kill()
        cluster.liveness.dead.add("r1")
        await cluster.clock.advance(1)
        assert not load.done()
        joined = await cluster.add_replica("r2")
        version = await cluster.clock.finish(load)
        assert await joined.digest_for("sql") == version.digest


async def test_unreachable_replica_stops_admitting_before_the_load_succeeds(
    cluster: Cluster,
) -> None:
    old = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
    lost = cluster.replicas["r2"]
    lost.engine.gate.clear()
    replace = asyncio.ensure_future(
        cluster.load("sql", cluster.write_adapter("v2", "new"), load_inplace=True)
    )
    await cluster.clock.until(lambda: lost.engine.num_loads == 2)
    lost.network.is_up.clear()
    assert not replace.done()
    while not replace.done():
        # Whatever is admitted before the load succeeded may be old, but never afterwards.
        if lost.link.holds_lease:
            assert await lost.digest_for("sql") == old.digest
        await cluster.clock.advance(0.05)
        await asyncio.sleep(0)
    await replace
    assert not lost.link.holds_lease
    with pytest.raises(ReplicaUnavailableError):
        await lost.digest_for("sql")


async def test_repeated_load_asks_anew_what_was_reported_to_a_controller_that_died(
    cluster: Cluster,
) -> None:
    first, second = cluster.replicas["r1"], cluster.replicas["r2"]
    path = cluster.write_adapter("sql")
    second.engine.gate.clear()
    load = asyncio.ensure_future(cluster.load("sql", path, op_id="op"))
    await cluster.clock.until(lambda: second.engine.num_loads == 1)
    await cluster.clock.advance(1)
    # The new controller hears of the load again before it hears of the replica that is ready.
    first.network.is_up.clear()
    cluster.kill_controller()
    with pytest.raises(Killed):
        await load
    cluster.start_controller()
    again = asyncio.ensure_future(cluster.load("sql", path, op_id="op"))
    await cluster.clock.until(lambda: bool(cluster.controller._agreement._prepares))
    first.network.is_up.set()
    second.engine.gate.set()
    version = await cluster.clock.finish(again, within_s=5)
    assert await first.digest_for("sql") == version.digest


async def test_replica_adopts_what_it_missed_before_it_admits_again(cluster: Cluster) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
    lost = cluster.replicas["r2"]
    lost.network.is_up.clear()
    await cluster.clock.advance(11)
    new = await cluster.clock.finish(
        cluster.load("sql", cluster.write_adapter("v2", "new"), load_inplace=True)
    )
    lost.network.is_up.set()
    await cluster.clock.until(lambda: lost.link.holds_lease)
    assert await cluster.clock.finish(lost.digest_for("sql")) == new.digest
    await settle()
    assert set(lost.engine.loaded) == {new.digest}


async def test_replica_that_joins_during_a_prepare_takes_part(cluster: Cluster) -> None:
    cluster.replicas["r1"].engine.gate.clear()
    load = asyncio.ensure_future(cluster.load("sql", cluster.write_adapter("sql")))
    await cluster.clock.until(lambda: cluster.replicas["r1"].engine.num_loads == 1)
    joined = await cluster.add_replica("r3")
    assert not load.done()
    cluster.replicas["r1"].engine.gate.set()
    version = await cluster.clock.finish(load)
    assert await joined.digest_for("sql") == version.digest
    assert joined.engine.num_loads == 1


async def test_joining_replica_prepares_pinned_and_popular_adapters_only(
    cluster: Cluster,
) -> None:
    pinned = await cluster.clock.finish(
        cluster.load("pinned", cluster.write_adapter("pinned", "p"), pin=True)
    )
    popular = await cluster.clock.finish(cluster.load("hot", cluster.write_adapter("hot", "h")))
    cold = await cluster.clock.finish(cluster.load("cold", cluster.write_adapter("cold", "c")))
    for replica in cluster.replicas.values():
        del replica.engine.loaded[cold.digest]
    await cluster.clock.advance(5)
    joined = await cluster.add_replica("r3")
    assert set(joined.engine.loaded) == {pinned.digest, popular.digest}
    assert joined.engine.pinned == {pinned.digest}
    assert joined.link.table.find("cold") == cold


async def test_one_damaged_adapter_does_not_keep_a_replica_from_joining(
    cluster: Cluster,
) -> None:
    path = cluster.write_adapter("sql")
    await cluster.clock.finish(cluster.load("sql", path, pin=True))
    cluster.write_adapter("sql", "damaged since")
    joined = await cluster.add_replica("r3")
    assert joined.link.holds_lease
    assert joined.engine.loaded == {}


async def test_leaving_replica_is_not_waited_for(cluster: Cluster) -> None:
    leaving = cluster.replicas["r2"]
    await cluster.clock.finish(leaving.link.leave())
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")), within_s=1)
    with pytest.raises(ReplicaUnavailableError):
        leaving.link.table.apply(cluster.controller._desired.snapshot())
        await leaving.digest_for("sql")


@pytest.mark.parametrize(
    ("moment", "step", "survives"),
    [
        ("die_before", "begin", False),
        ("die_after", "begin", False),
        ("die_before", "commit", False),
        ("die_after", "commit", True),
        ("die_before", "finish", True),
        ("die_after", "finish", True),
    ],
)
async def test_controller_may_die_at_any_step_of_a_load(
    cluster: Cluster, moment: str, step: str, survives: bool
) -> None:
    old = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
    path = cluster.write_adapter("v2", "new")
    setattr(cluster.store, moment, step)
    with pytest.raises(Killed):
        await cluster.clock.finish(cluster.load("sql", path, op_id="op", load_inplace=True))
    cluster.start_controller()
    await cluster.clock.advance(3)
    expected = cluster.digest(path) if survives else old.digest
    for replica in cluster.replicas.values():
        assert await cluster.clock.finish(replica.digest_for("sql")) == expected
        await settle()
        assert set(replica.engine.loaded) == {expected}
    assert set(cluster.phases().values()) <= {"done", "aborted"}

    # The caller's repeated call ends well in any case, and only once.
    again = await cluster.clock.finish(cluster.load("sql", path, op_id="op", load_inplace=True))
    assert again.digest == cluster.digest(path)
    assert again.generation > old.generation
    for replica in cluster.replicas.values():
        assert replica.link.table.find("sql") == again


@pytest.mark.parametrize("moment", ["die_before", "die_after"])
@pytest.mark.parametrize("step", ["begin", "commit", "finish"])
async def test_controller_may_die_at_any_step_of_an_unload(
    cluster: Cluster, moment: str, step: str
) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    setattr(cluster.store, moment, step)
    with pytest.raises(Killed):
        await cluster.clock.finish(cluster.unload("sql", op_id="op"))
    cluster.start_controller()
    await cluster.clock.advance(3)
    assert await cluster.clock.finish(cluster.unload("sql", op_id="op")) == version
    for replica in cluster.replicas.values():
        assert replica.link.table.find("sql") is None


async def test_restarted_controller_waits_for_replicas_that_it_has_not_heard(
    cluster: Cluster,
) -> None:
    old = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
    lost = cluster.replicas["r2"]
    lost.network.is_up.clear()
    cluster.kill_controller()
    cluster.start_controller()
    unload = asyncio.ensure_future(cluster.unload("sql"))
    await cluster.clock.advance(2)
    assert lost.link.holds_lease
    assert await lost.digest_for("sql") == old.digest
    assert not unload.done()
    await cluster.clock.finish(unload)
    assert not lost.link.holds_lease


async def test_a_replica_that_registers_again_while_its_lease_ends_stays_in_the_journal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, store = cluster.replicas["r2"], cluster.store
    lost.network.is_up.clear()
    await cluster.clock.advance(11)
    add_member, go_on = store.add_member, asyncio.Event()

    async def add_slowly(member: Register) -> None:
        await add_member(member)
        await go_on.wait()

    monkeypatch.setattr(store, "add_member", add_slowly)
    again = asyncio.ensure_future(cluster.controller.register(lost.link._identity))
    await settle()
    await cluster.controller.list_replicas()
    go_on.set()
    await again
    assert {member.member.replica_id for member in store.load().members} == {"r1", "r2"}
    replicas = await cluster.controller.list_replicas()
    assert {replica.replica_id for replica in replicas} == {"r1", "r2"}


async def test_restart_keeps_adapters_and_generations(cluster: Cluster) -> None:
    first = await cluster.clock.finish(cluster.load("a", cluster.write_adapter("a", "a")))
    await cluster.clock.finish(cluster.load("b", cluster.write_adapter("b", "b")))
    await cluster.clock.finish(cluster.unload("b"))
    cluster.kill_controller()
    cluster.start_controller()
    assert [s.version for s in await cluster.controller.list_adapters()] == [first]
    third = await cluster.clock.finish(cluster.load("c", cluster.write_adapter("c", "c")))
    assert third.generation > first.generation + 1


async def test_lost_journal_does_not_leave_replicas_on_the_old_table(cluster: Cluster) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    cluster.kill_controller()
    for path in cluster.root.glob("journal.sqlite3*"):
        path.unlink()
    cluster.start_controller()
    await cluster.clock.advance(3)
    for replica in cluster.replicas.values():
        assert replica.link.holds_lease
        assert replica.link.table.find("sql") is None


@pytest.mark.parametrize("damage", ["stale", "missing", "kept", "alias"])
async def test_a_table_that_went_wrong_is_repaired(
    cluster: Cluster, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    old = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
    path = cluster.write_adapter("v2", "new")
    new = await cluster.clock.finish(cluster.load("sql", path, load_inplace=True))
    alias = SetAlias(name="prod", targets=(AliasTarget("sql"),))
    await cluster.clock.finish(cluster.controller.set_alias(alias, "alias"))
    await cluster.clock.advance(40)
    assert "is wrong" not in caplog.text
    table = cluster.replicas["r2"].link.table
    wrong = {
        "stale": lambda: table._versions.update(sql=old),
        "missing": lambda: table._versions.pop("sql"),
        "kept": lambda: table._kept.clear(),
        "alias": lambda: table._aliases.clear(),
    }
    wrong[damage]()
    await cluster.clock.advance(40)
    assert "the table of replica r2 is wrong" in caplog.text
    assert table.fingerprint() == cluster.replicas["r1"].link.table.fingerprint()
    assert await cluster.clock.finish(cluster.replicas["r2"].digest_for("prod")) == new.digest


async def test_journal_that_cannot_be_written_changes_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.store.journal._db.execute("PRAGMA max_page_count = 1")
    path = cluster.write_adapter("sql")
    with pytest.raises(JournalUnavailableError):
        for index in range(1000):
            await cluster.clock.finish(cluster.load(f"sql-{index}", path))
    names = {s.version.name for s in await cluster.controller.list_adapters()}
    for replica in cluster.replicas.values():
        assert set(replica.link.table._versions) == names


async def test_every_request_after_a_success_sees_it(cluster: Cluster) -> None:
    """Replaces in a row while requests arrive everywhere and the network fails at times."""
    paths = [cluster.write_adapter(f"v{index}", str(index)) for index in range(6)]
    order = [cluster.digest(path) for path in paths]
    await cluster.clock.finish(cluster.load("sql", paths[0]))
    answered = 0

    async def check() -> None:
        for replica in cluster.replicas.values():
            at_least = answered
            try:
                digest = await replica.digest_for("sql")
            except ReplicaUnavailableError:
                continue
            assert order.index(digest) >= at_least

    for index, path in enumerate(paths[1:], start=1):
        cut = cluster.replicas["r2"].network.is_up
        load = asyncio.ensure_future(cluster.load("sql", path, load_inplace=True))
        for _ in range(2000):
            await asyncio.sleep(0.0005)
            await cluster.clock.advance(0.05)
            await check()
            if load.done():
                break
            if index % 2:
                cut.clear()
        await load
        answered = index
        await check()
        cut.set()
        await cluster.clock.until(lambda: cluster.replicas["r2"].link.holds_lease)
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.replicas["r1"].digest_for("none"))
