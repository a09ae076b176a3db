"""Pushed adapters: kept by content, replaced like any other, removed once nothing means them."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import AdapterVersion
from deployments.backend import LoadAdapter, RollBackAdapter
from deployments.errors import (
    AdapterRejectedError,
    AdapterSourceError,
    OperationConflictError,
    ReplicaUnavailableError,
)
from deployments.push_store import PushStore
from engine.errors import UnsupportedAdapterError
from tests.deployments.cluster import Cluster, running_cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        yield cluster


async def push(cluster: Cluster, content: str, *, op_id: str = "") -> AdapterVersion:
    with cluster.pushes.receive() as directory:
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_text(content)
        load = LoadAdapter(
            name="policy",
            upload=directory.name,
            digest=cluster.pushes.digest(directory),
            load_inplace=True,
        )
        return await cluster.clock.finish(
            cluster.controller.load(load, op_id or f"push-{content}-{cluster.clock.now()}")
        )


def kept(cluster: Cluster) -> set[str]:
    return {path.name for path in (cluster.root / "pushed" / "adapters").iterdir()}


async def served(cluster: Cluster, adapter: str) -> set[str]:
    replicas = cluster.replicas.values()
    return {await cluster.clock.finish(replica.digest_for(adapter)) for replica in replicas}


async def test_each_push_is_served_and_old_ones_go(cluster: Cluster) -> None:
    versions = []
    for index in range(6):
        versions.append(await push(cluster, str(index)))
        assert await served(cluster, "policy") == {versions[-1].digest}
    assert kept(cluster) == {version.digest for version in versions[-3:]}
    earlier = versions[-2]
    assert await served(cluster, f"policy@{earlier.generation}") == {earlier.digest}
    assert list((cluster.root / "pushed" / "incoming").iterdir()) == []


async def test_a_rollout_stays_on_its_generation_while_others_are_pushed(cluster: Cluster) -> None:
    first = await push(cluster, "1")
    async with cluster.replicas["r1"].link.admit(f"policy@{first.generation}") as admitted:
        for content in "2345":
            await push(cluster, content)
        assert admitted.version == first
        assert first.digest in cluster.replicas["r1"].engine.loaded


async def test_the_same_bytes_again_change_nothing(cluster: Cluster) -> None:
    first = await push(cluster, "1")
    assert await push(cluster, "1") == first


async def test_what_a_restart_lost_is_asked_for_again(tmp_path: Path) -> None:
    before, after = PushStore(tmp_path), PushStore(tmp_path)
    with before.receive() as directory:
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_text("1")
        digest = before.digest(directory)
        await before.take_over("policy", directory.name, digest)
        # The next controller is asked for something else first.
        await after.remove_unused(set)
        with pytest.raises(ReplicaUnavailableError, match="lost what was sent for 'policy'"):
            await after.take_over("policy", directory.name, digest)


async def test_a_repeated_push_is_recognised_and_another_is_not(cluster: Cluster) -> None:
    first = await push(cluster, "1", op_id="step-1")
    await push(cluster, "2", op_id="step-2")
    assert await push(cluster, "1", op_id="step-1") == first
    with pytest.raises(OperationConflictError):
        await push(cluster, "3", op_id="step-1")


async def test_a_refused_push_leaves_the_old_version_and_no_files(cluster: Cluster) -> None:
    first = await push(cluster, "1")
    cluster.replicas["r2"].engine.refusals["policy"] = UnsupportedAdapterError("rank")
    with pytest.raises(AdapterRejectedError):
        await push(cluster, "2")
    assert await served(cluster, "policy") == {first.digest}
    assert kept(cluster) == {first.digest}


async def test_pushed_versions_outlive_every_process_and_node(cluster: Cluster) -> None:
    first, second = await push(cluster, "1"), await push(cluster, "2")
    cluster.kill_controller()
    cluster.start_controller()
    joined = await cluster.add_replica("r3")
    assert await cluster.clock.finish(joined.digest_for("policy")) == second.digest
    rollback = RollBackAdapter(name="policy")
    back = await cluster.clock.finish(cluster.controller.roll_back(rollback, "back"))
    assert back.digest == first.digest


async def test_unload_removes_the_files(cluster: Cluster) -> None:
    await push(cluster, "1")
    await cluster.clock.finish(cluster.unload("policy"))
    assert kept(cluster) == set()


async def test_pushes_that_wait_for_their_turn_keep_their_files(cluster: Cluster) -> None:
    pushes = [asyncio.ensure_future(push(cluster, content)) for content in "1234"]
    versions = await cluster.clock.finish(asyncio.gather(*pushes))
    latest = max(versions, key=lambda version: version.generation)
    assert await served(cluster, "policy") == {latest.digest}


async def test_files_received_on_another_node_reach_the_controller_in_parts(
    cluster: Cluster,
) -> None:
    ingress = PushStore(cluster.root / "ingress")
    with ingress.receive() as directory:
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_text("from afar")
        upload, digest = directory.name, ingress.digest(directory)
        assert not cluster.pushes.has_upload(upload)
        for path in directory.iterdir():
            data = path.read_bytes()
            for offset in (4, 0, 0):  # a part whose answer was lost comes again
                cluster.pushes.write_part(upload, path.name, offset, data[offset:])
    load = LoadAdapter(name="policy", upload=upload, digest=digest)
    await cluster.clock.finish(cluster.controller.load(load, "push"))
    assert await served(cluster, "policy") == {digest}
    assert list((cluster.root / "pushed" / "incoming").iterdir()) == []
    for name in ("../x", "a/b", "", ".."):
        with pytest.raises(AdapterSourceError):
            cluster.pushes.write_part(upload, name, 0, b"x")


async def test_files_that_changed_on_their_way_are_refused(cluster: Cluster) -> None:
    first = await push(cluster, "1")
    honest = cluster._part

    async def damaged(data: bytes) -> bytes:
        return (await honest(data)).replace(b"2", b"3")

    cluster._part = damaged  # type: ignore[method-assign]
    with pytest.raises(AdapterRejectedError, match="have digest"):
        await push(cluster, "2")
    assert await served(cluster, "policy") == {first.digest}


async def test_only_received_files_can_be_named(cluster: Cluster) -> None:
    for upload, digest in (("../x", "a" * 64), ("0" * 32, "../x")):
        load = LoadAdapter(name="policy", upload=upload, digest=digest)
        with pytest.raises(AdapterSourceError):
            await cluster.clock.finish(cluster.controller.load(load, f"{upload}{digest}"))


async def test_what_a_dead_receiver_left_is_removed(cluster: Cluster) -> None:
    abandoned = cluster.root / "pushed" / "incoming" / "old"
    abandoned.mkdir(parents=True)
    fresh = abandoned.with_name("new")
    fresh.mkdir()
    os.utime(abandoned, (time.time() - 7200,) * 2)
    await push(cluster, "1")
    assert not abandoned.exists()
    assert fresh.exists()
