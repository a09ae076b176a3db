"""Operations can be asked about, and repeated under their id."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.errors import (
    AdapterNotFoundError,
    AdapterRejectedError,
    AdapterSourceError,
    OperationConflictError,
    OperationNotFoundError,
    OperationTimeoutError,
)
from deployments.operations import OperationKind, OperationPhase, OperationQuery, ReplicaPhase
from engine.errors import UnsupportedAdapterError
from tests.deployments.cluster import Cluster, running_cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        yield cluster


async def progress(cluster: Cluster, op_id: str) -> tuple[OperationPhase, dict[str, ReplicaPhase]]:
    status = await cluster.controller.get_operation(op_id)
    return status.operation.phase, {each.replica_id: each.phase for each in status.replicas}


async def reach(
    cluster: Cluster, op_id: str, phase: OperationPhase, replicas: dict[str, ReplicaPhase]
) -> None:
    """Let time pass until an operation stands just so."""
    for _ in range(2000):
        if await progress(cluster, op_id) == (phase, replicas):
            return
        await asyncio.sleep(0.001)  # work in threads needs the real clock
        await cluster.clock.advance(0.01)
    assert await progress(cluster, op_id) == (phase, replicas)


async def test_an_operation_tells_how_far_each_replica_is(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    first, second = cluster.replicas.values()
    second.engine.gate.clear()
    load = asyncio.ensure_future(cluster.load("sql", path, op_id="one", requested_by="ann"))
    await cluster.clock.until(lambda: second.engine.num_loads == 1)
    await reach(
        cluster,
        "one",
        OperationPhase.PREPARING,
        {"r1": ReplicaPhase.PREPARED, "r2": ReplicaPhase.PREPARING},
    )
    second.engine.gate.set()
    second.network.is_up.clear()  # its report arrived or never will: the load waits for the lease
    await cluster.clock.finish(load)
    status = await cluster.controller.get_operation("one")
    assert (status.operation.kind, status.operation.requested_by) == (OperationKind.LOAD, "ann")
    assert (status.operation.phase, status.operation.digest) == (
        OperationPhase.DONE,
        cluster.digest(path),
    )
    assert first.link.table.find("sql") is not None


async def test_a_flip_is_followed_replica_by_replica(cluster: Cluster) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    cluster.replicas["r2"].network.is_up.clear()
    unload = asyncio.ensure_future(cluster.unload("sql", op_id="two"))
    await cluster.clock.advance(1)
    assert await progress(cluster, "two") == (
        OperationPhase.COMMITTING,
        {"r1": ReplicaPhase.COMMITTED, "r2": ReplicaPhase.COMMITTING},
    )
    await cluster.clock.finish(unload)
    assert await progress(cluster, "two") == (OperationPhase.DONE, {})


async def test_a_rejected_operation_keeps_each_replicas_reason(cluster: Cluster) -> None:
    cluster.replicas["r2"].engine.refusals["sql"] = UnsupportedAdapterError("uses DoRA")
    with pytest.raises(AdapterRejectedError, match=r"uses DoRA \(r2\)"):
        await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql"), op_id="one"))
    cluster.kill_controller()
    cluster.start_controller()
    status = await cluster.controller.get_operation("one")
    assert status.operation.phase is OperationPhase.ABORTED
    assert [(each.replica_id, each.reason) for each in status.replicas] == [("r2", "uses DoRA")]


async def test_an_operation_refused_before_it_began_is_remembered(cluster: Cluster) -> None:
    missing = cluster.root / "adapters" / "missing"
    missing.parent.mkdir()
    with pytest.raises(AdapterSourceError):
        await cluster.clock.finish(cluster.load("sql", missing, op_id="one"))
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.unload("sql", op_id="two"))
    for op_id in ("one", "two"):
        operation = (await cluster.controller.get_operation(op_id)).operation
        assert (operation.phase, operation.generation) == (OperationPhase.ABORTED, 0)
        assert operation.detail
        assert operation.ended_at is not None
    version = await cluster.clock.finish(
        cluster.load("sql", cluster.write_adapter("missing"), op_id="one")
    )
    assert version.generation == 1
    assert (await progress(cluster, "one"))[0] is OperationPhase.DONE


async def test_an_operation_that_outlasts_its_caller_can_be_asked_about(cluster: Cluster) -> None:
    settings = replace(cluster.settings, operation_timeout_s=0.05)
    cluster.controller.configure(settings, cluster.sources())
    engine = cluster.replicas["r1"].engine
    engine.gate.clear()
    with pytest.raises(OperationTimeoutError, match="operation one") as caught:
        await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql"), op_id="one"))
    assert caught.value.op_id == "one"
    assert (await progress(cluster, "one"))[0] is OperationPhase.PREPARING
    engine.gate.set()
    await cluster.clock.until(lambda: cluster.phases().get("one") == "done")


async def test_waiting_operations_are_listed_first_and_by_name(cluster: Cluster) -> None:
    path = cluster.write_adapter("sql")
    await cluster.clock.finish(cluster.load("other", path, op_id="zero"))
    engine = cluster.replicas["r1"].engine
    engine.gate.clear()
    other = cluster.write_adapter("v2", "v2")
    loads = []
    for op_id in ("one", "two"):
        call = cluster.load("sql", other, op_id=op_id, load_inplace=True)
        loads.append(asyncio.ensure_future(call))
        await cluster.clock.advance(0.5)
    await cluster.clock.until(lambda: engine.num_loads == 2)
    listed = await cluster.controller.list_operations(OperationQuery())
    assert [(each.operation.op_id, each.operation.phase) for each in listed] == [
        ("two", OperationPhase.WAITING),
        ("one", OperationPhase.PREPARING),
        ("zero", OperationPhase.DONE),
    ]
    for query, expected in (
        (OperationQuery(name="sql"), ["two", "one"]),
        (OperationQuery(phase="done"), ["zero"]),
        (OperationQuery(limit=1), ["two"]),
    ):
        found = await cluster.controller.list_operations(query)
        assert [each.operation.op_id for each in found] == expected
    engine.gate.set()
    await cluster.clock.finish(asyncio.gather(*loads))
    # The second found the first one's work done and changed nothing.
    assert (await progress(cluster, "two"))[0] is OperationPhase.DONE


async def test_an_id_belongs_to_one_call(cluster: Cluster) -> None:
    path, other = cluster.write_adapter("a", "a"), cluster.write_adapter("b", "b")
    version = await cluster.clock.finish(cluster.load("sql", path, op_id="one"))
    for call in (
        cluster.load("sql", other, op_id="one"),
        cluster.load("other", path, op_id="one"),
        cluster.load("sql", path, op_id="one", load_inplace=True),
        cluster.unload("sql", op_id="one"),
    ):
        with pytest.raises(OperationConflictError, match="the load of 'sql'"):
            await cluster.clock.finish(call)
    assert await cluster.clock.finish(cluster.load("sql", path, op_id="one")) == version


async def test_an_unknown_operation_is_not_found(cluster: Cluster) -> None:
    with pytest.raises(OperationNotFoundError):
        await cluster.controller.get_operation("never")
