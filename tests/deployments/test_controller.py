"""Loads, replaces and unloads across replicas when everything works, or says no."""

import asyncio
import pickle
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from adapters import AdapterVersion, InvalidAdapterNameError
from deployments.backend import AdapterQuery, AdapterState, LoadAdapter, PinAdapter
from deployments.controller_settings import ControllerSettings
from deployments.errors import (
    AdapterAlreadyLoadedError,
    AdapterCapacityError,
    AdapterNotFoundError,
    AdapterRejectedError,
    AdapterSourceError,
    GenerationNotFoundError,
    NameConflictError,
    OperationTimeoutError,
    PathNotAllowedError,
    ReplicaUnavailableError,
    RuntimeUpdatingDisabledError,
)
from deployments.journal import StoredState
from deployments.state_store import SqliteStateStore
from engine.errors import UnsupportedAdapterError
from tests.deployments.cluster import BASE, Cluster, running_cluster
from tests.deployments.fake_clock import settle


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2", "r3") as cluster:
        yield cluster


async def test_loaded_adapter_is_served_by_every_replica(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    version = await cluster.clock.finish(cluster.load("sql", path))
    assert version.digest == cluster.digest(path)
    assert version.generation == 1
    assert version.rank == 8
    for replica in cluster.replicas.values():
        assert replica.link.table.find("sql") == version
        assert await replica.digest_for("sql") == version.digest


async def test_load_again_without_load_inplace_is_refused(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    await cluster.clock.finish(cluster.load("sql", path))
    with pytest.raises(AdapterAlreadyLoadedError):
        await cluster.clock.finish(cluster.load("sql", path))


async def test_load_in_place_of_the_same_bytes_keeps_the_version(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    first = await cluster.clock.finish(cluster.load("sql", path))
    again = await cluster.clock.finish(cluster.load("sql", path, load_inplace=True))
    assert again == first


async def test_pin_can_change_without_a_new_generation(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    first = await cluster.clock.finish(cluster.load("sql", path))
    pinned = await cluster.clock.finish(cluster.load("sql", path, load_inplace=True, pin=True))
    assert (pinned.generation, pinned.pinned) == (first.generation, True)
    for replica in cluster.replicas.values():
        assert replica.engine.pinned == {first.digest}
    await cluster.clock.finish(cluster.load("sql", path, load_inplace=True))
    for replica in cluster.replicas.values():
        assert replica.engine.pinned == set()


async def test_pin_brings_back_what_had_made_room(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    version = await cluster.clock.finish(cluster.load("sql", path))
    for replica in cluster.replicas.values():
        replica.engine.loaded.clear()
    await cluster.clock.finish(cluster.load("sql", path, load_inplace=True, pin=True))
    for replica in cluster.replicas.values():
        assert set(replica.engine.loaded) == replica.engine.pinned == {version.digest}


async def test_replace_is_seen_by_new_requests_and_not_by_running_ones(cluster: Cluster) -> None:
    old_path = cluster.write_adapter("v1", "old")
    new_path = cluster.write_adapter("v2", "new")
    old = await cluster.clock.finish(cluster.load("sql", old_path))
    replica = cluster.replicas["r1"]
    async with replica.link.admit("sql") as admitted:
        new = await cluster.clock.finish(cluster.load("sql", new_path, load_inplace=True))
        assert (admitted.version, admitted.lora.digest) == (old, old.digest)
        assert old.digest in replica.engine.loaded
        for other in cluster.replicas.values():
            assert await other.digest_for("sql") == new.digest
        assert old.digest not in cluster.replicas["r2"].engine.loaded
    await settle()
    assert old.digest not in replica.engine.loaded
    assert new.generation > old.generation


async def test_unload_stops_new_requests_and_frees_the_engine(cluster: Cluster) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    assert await cluster.clock.finish(cluster.unload("sql")) == version
    await settle()
    for replica in cluster.replicas.values():
        assert replica.engine.loaded == {}
        with pytest.raises(AdapterNotFoundError):
            await cluster.clock.finish(replica.digest_for("sql"))


async def test_forced_unload_aborts_running_requests(cluster: Cluster) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    await cluster.clock.finish(cluster.unload("sql", force=True))
    await settle()
    for replica in cluster.replicas.values():
        assert [end.name for end in replica.aborted] == ["sql"]
        assert replica.aborted[0].generation >= version.generation


async def test_unload_of_an_unknown_name_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.unload("sql"))


async def test_two_names_share_bytes_until_the_last_is_gone(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    first = await cluster.clock.finish(cluster.load("a", path))
    second = await cluster.clock.finish(cluster.load("b", path))
    assert (first.digest, first.generation) != (second.digest, second.generation)
    await cluster.clock.finish(cluster.unload("a"))
    await settle()
    engines = [replica.engine for replica in cluster.replicas.values()]
    assert all(set(engine.loaded) == {first.digest} for engine in engines)
    assert all(engine.num_loads == 1 for engine in engines)
    await cluster.clock.finish(cluster.unload("b"))
    await settle()
    assert all(engine.loaded == {} for engine in engines)


async def test_one_refusal_changes_nothing_anywhere(cluster: Cluster) -> None:
    old = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("v1", "old")))
    cluster.replicas["r2"].engine.refusals["sql"] = UnsupportedAdapterError("uses DoRA")
    with pytest.raises(AdapterRejectedError) as caught:
        await cluster.clock.finish(
            cluster.load("sql", cluster.write_adapter("v2", "new"), load_inplace=True)
        )
    assert caught.value.reasons == {"r2": "uses DoRA"}
    await settle()
    for replica in cluster.replicas.values():
        assert await replica.digest_for("sql") == old.digest
        assert set(replica.engine.loaded) == {old.digest}


async def test_generation_of_a_refused_load_is_not_used_again(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    cluster.replicas["r1"].engine.refusals["sql"] = UnsupportedAdapterError("no")
    with pytest.raises(AdapterRejectedError):
        await cluster.clock.finish(cluster.load("sql", path))
    cluster.replicas["r1"].engine.refusals.clear()
    assert (await cluster.clock.finish(cluster.load("sql", path))).generation == 2


async def test_lack_of_room_is_told_and_evicts_nothing(cluster: Cluster) -> None:
    pinned = await cluster.clock.finish(
        cluster.load("a", cluster.write_adapter("a", "a"), pin=True)
    )
    for replica in cluster.replicas.values():
        replica.engine.max_pinned = 1
    second = cluster.write_adapter("b", "b")
    with pytest.raises(AdapterCapacityError, match=r"1 is pinned \(r1, r2, r3\)") as caught:
        await cluster.clock.finish(cluster.load("b", second, pin=True))
    assert caught.value.reasons.keys() == cluster.replicas.keys()
    for replica in cluster.replicas.values():
        assert replica.engine.pinned == {pinned.digest}
        assert await replica.digest_for("a") == pinned.digest
    await cluster.clock.finish(cluster.load("b", second))
    pin = PinAdapter(name="b", pinned=True)
    with pytest.raises(AdapterCapacityError):
        await cluster.clock.finish(cluster.controller.pin(pin, "pin"))
    assert not (await cluster.controller.get_adapter("b")).version.pinned


async def test_prepare_that_never_ends_is_taken_back(cluster: Cluster) -> None:
    settings = replace(cluster.settings, prepare_timeout_s=5.0)
    cluster.controller.configure(settings, cluster.sources())
    cluster.replicas["r3"].engine.gate.clear()
    with pytest.raises(OperationTimeoutError, match="r3"):
        await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    cluster.replicas["r3"].engine.gate.set()
    assert await cluster.controller.list_adapters() == []
    await cluster.clock.until(lambda: not cluster.replicas["r3"].link._tasks)
    assert all(replica.engine.loaded == {} for replica in cluster.replicas.values())


async def test_content_that_differs_on_a_replica_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cluster.write_adapter("sql", "one")
    other = cluster.replicas["r2"].link.adapters._sources
    honest = other.fetch

    async def changed(name: str, source_uri: str, *, digest: str | None) -> object:
        cluster.write_adapter("sql", "other")
        try:
            return await honest(name, source_uri, digest=digest)
        finally:
            cluster.write_adapter("sql", "one")

    monkeypatch.setattr(other, "fetch", changed)
    with pytest.raises(AdapterRejectedError, match="its content changed"):
        await cluster.clock.finish(cluster.load("sql", path))


async def test_names_and_paths_are_checked_before_anything_happens(cluster: Cluster) -> None:
    inside = cluster.write_adapter("sql")
    outside = cluster.root / "elsewhere"
    outside.mkdir()
    (inside.parent / "link").symlink_to(outside)
    cases: list[tuple[str, str, type[Exception]]] = [
        ("../sql", str(inside), InvalidAdapterNameError),
        (BASE, str(inside), NameConflictError),
        ("sql", str(outside), PathNotAllowedError),
        ("sql", "/etc", PathNotAllowedError),
        ("sql", f"{inside}/../../elsewhere", PathNotAllowedError),
        ("sql", str(inside.parent / "link"), PathNotAllowedError),
        ("sql", outside.as_uri(), PathNotAllowedError),
        ("sql", "s3://bucket/sql", PathNotAllowedError),
        ("sql", str(inside.parent / "missing"), AdapterSourceError),
    ]
    for name, source, error in cases:
        with pytest.raises(error):
            load = LoadAdapter(name=name, source=source)
            await cluster.clock.finish(cluster.controller.load(load, f"{name} {source}"))
    assert all(replica.engine.num_loads == 0 for replica in cluster.replicas.values())


async def test_load_and_unload_need_the_operators_permission(cluster: Cluster) -> None:
    settings = ControllerSettings(base_model=BASE, deployed_at=1.0)
    cluster.controller.configure(settings, cluster.sources())
    with pytest.raises(RuntimeUpdatingDisabledError):
        await cluster.load("sql", cluster.write_adapter("sql"))
    with pytest.raises(RuntimeUpdatingDisabledError):
        await cluster.unload("sql")


async def test_a_generation_can_be_insisted_on(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    version = await cluster.clock.finish(cluster.load("sql", path))
    replica = cluster.replicas["r1"]
    assert await replica.digest_for(f"sql@{version.generation}") == version.digest
    with pytest.raises(GenerationNotFoundError):
        await replica.digest_for("sql@99")
    for nonsense in ("sql@", "sql@x", "../sql", "sql@1@1"):
        with pytest.raises(AdapterNotFoundError):
            await replica.digest_for(nonsense)


async def test_repeated_call_joins_the_first(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    calls = [cluster.load("sql", path, op_id="one") for _ in range(3)]
    versions = await cluster.clock.finish(asyncio.gather(*calls))
    assert len(set(versions)) == 1
    assert await cluster.clock.finish(cluster.load("sql", path, op_id="one")) == versions[0]


async def test_operations_on_one_name_run_in_order_and_others_go_ahead(cluster: Cluster) -> None:
    paths = [cluster.write_adapter(f"v{index}", str(index)) for index in range(5)]
    for replica in cluster.replicas.values():
        replica.engine.gate.clear()
    loads = [
        asyncio.ensure_future(cluster.load("sql", path, op_id=path.name, load_inplace=True))
        for path in paths
    ]
    other = asyncio.ensure_future(cluster.load("other", paths[4]))
    engine = cluster.replicas["r1"].engine
    await cluster.clock.until(lambda: engine.num_loads == 2)
    waiting = [status.version.name for status in await cluster.controller.list_adapters()]
    assert waiting == ["other", "sql"]
    for replica in cluster.replicas.values():
        replica.engine.gate.set()
    versions = await cluster.clock.finish(asyncio.gather(*loads))
    await cluster.clock.finish(other)
    generations = [version.generation for version in versions]
    assert generations == sorted(set(generations))
    for replica in cluster.replicas.values():
        assert replica.link.table.find("sql") == versions[-1]
        assert set(replica.engine.loaded) == {versions[-1].digest}


async def test_many_names_load_at_the_same_time(cluster: Cluster) -> None:
    paths = {f"a{i}": cluster.write_adapter(f"a{i}", str(i)) for i in range(40)}
    loads = [cluster.load(name, path) for name, path in paths.items()]
    versions = await cluster.clock.finish(asyncio.gather(*loads))
    assert len({version.generation for version in versions}) == 40
    for replica in cluster.replicas.values():
        assert len(replica.engine.loaded) == 40


async def test_caller_that_goes_away_does_not_stop_the_operation(cluster: Cluster) -> None:
    call = asyncio.ensure_future(cluster.load("sql", cluster.write_adapter("sql")))
    await settle()
    call.cancel()
    engine = cluster.replicas["r1"].engine
    await cluster.clock.until(lambda: engine.num_loads == 1)
    await cluster.clock.advance(1)
    assert (await cluster.controller.get_adapter("sql")).state is AdapterState.READY


async def test_status_shows_version_and_residency_on_each_replica(cluster: Cluster) -> None:
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    status = await cluster.controller.get_adapter("sql")
    assert status.version == version
    assert [(r.replica_id, r.host) for r in status.replicas] == [
        ("r1", True),
        ("r2", True),
        ("r3", True),
    ]
    replicas = await cluster.controller.list_replicas()
    assert [r.replica_id for r in replicas] == ["r1", "r2", "r3"]
    assert {r.table_version for r in replicas} == {1}
    with pytest.raises(AdapterNotFoundError):
        await cluster.controller.get_adapter("other")


async def test_without_replicas_nothing_can_be_checked(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        with pytest.raises(ReplicaUnavailableError):
            await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))


async def test_ten_thousand_names_cost_a_joining_replica_little(tmp_path: Path) -> None:
    async with running_cluster(tmp_path) as cluster:
        cluster.kill_controller()
        store = SqliteStateStore(tmp_path / "journal.sqlite3")
        store.journal.restore(
            StoredState(
                journal_id="",
                table_version=1,
                adapters={f"team/a{index}": registered(index) for index in range(10_000)},
            ),
            generation=10_000,
        )
        await store.close()
        cluster.start_controller()
        snapshot = cluster.controller._desired.snapshot()
        assert len(pickle.dumps(snapshot)) < 3_000_000
        tracemalloc.start()
        replica = await cluster.add_replica("r1")
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used < 20_000_000
        # Registered is not resident.
        assert replica.engine.num_loads == 0
        assert replica.link.table.find("team/a9999") == registered(9999)
        page = await cluster.controller.list_adapters(AdapterQuery(after="team/a5", limit=3))
        assert [status.version.name for status in page] == [
            "team/a50",
            "team/a500",
            "team/a5000",
        ]


def registered(index: int) -> AdapterVersion:
    return AdapterVersion(
        name=f"team/a{index}",
        generation=index + 1,
        digest=f"{index:064x}",
        source_uri=f"s3://models/adapters/a{index}",
        base_model=BASE,
        rank=16,
        size_bytes=1 << 24,
        pinned=False,
    )
