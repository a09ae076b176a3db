"""An unknown name's first request: looked up once for the whole cluster."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adapters import LoRARequest, find_adapter_files
from deployments.cluster_protocol import MemberId, Resolved
from deployments.errors import (
    AdapterNotFoundError,
    AdapterRejectedError,
    AdapterSourceError,
    OverloadedError,
    ReplicaUnavailableError,
    ResolverForbiddenError,
    ResolverUnavailableError,
)
from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from resolvers.base import SourceForbiddenError, SourceUnavailableError, StoreFullError
from resolvers.filesystem import FilesystemResolver
from resolvers.store import AdapterStore
from tests.deployments.cluster import Cluster, running_cluster
from tests.deployments.fake_clock import settle


class CountingResolver:
    def __init__(self, inner: FilesystemResolver) -> None:
        self.inner = inner
        self.asked: list[str] = []
        self.failure: Exception | None = None

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append(lora_name)
        if self.failure is not None:
            raise self.failure
        return await self.inner.resolve_lora(base_model_name, lora_name)


class Resolving(Cluster):
    resolver: CountingResolver


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Resolving]:
    async with running_cluster(tmp_path, cluster_type=Resolving) as cluster:
        cluster.resolver = CountingResolver(
            FilesystemResolver([str(tmp_path / "adapters")], settle_s=0)
        )
        cluster.resolvers.append(cluster.resolver)
        cluster.controller.configure(cluster.settings, cluster.sources())
        for name in ("r1", "r2"):
            await cluster.add_replica(name)
        yield cluster


def digests_for(cluster: Cluster, name: str, times: int = 1) -> "asyncio.Future[list[str]]":
    replicas = list(cluster.replicas.values()) * times
    return asyncio.gather(*(replica.digest_for(name) for replica in replicas))


async def test_burst_of_first_requests_is_one_lookup_and_one_version(cluster: Resolving) -> None:
    path = cluster.write_adapter("team/sql")
    digests = await cluster.clock.finish(digests_for(cluster, "team/sql", times=20))
    assert set(digests) == {cluster.digest(path)}
    assert cluster.resolver.asked == ["team/sql"]
    (status,) = await cluster.controller.list_adapters()
    assert (status.version.generation, status.version.created_by) == (1, "resolve")
    assert [replica.engine.num_loads for replica in cluster.replicas.values()] == [1, 1]


async def test_other_replicas_load_it_only_when_asked(cluster: Resolving) -> None:
    cluster.write_adapter("sql")
    await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    await cluster.clock.advance(1)
    other = cluster.replicas["r2"]
    assert other.link.table.find("sql") is not None
    assert other.engine.loaded == {}


async def test_bytes_are_pinned_from_the_first_request_on(cluster: Resolving) -> None:
    cluster.write_adapter("sql", "one")
    first = await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    cluster.write_adapter("sql", "two")
    with pytest.raises(AdapterSourceError, match="content changed"):
        await cluster.clock.finish(cluster.replicas["r2"].digest_for("sql"))
    assert await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql")) == first
    cluster.lose_store("r1")
    with pytest.raises(AdapterSourceError, match="content changed"):
        await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))


async def test_files_that_left_the_store_are_fetched_again(cluster: Resolving) -> None:
    cluster.write_adapter("sql")
    first = await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    cluster.lose_store("r1")
    assert await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql")) == first
    assert cluster.digest(cluster.store_dir("r1") / "adapters" / first) == first


async def test_files_stay_in_the_store_while_a_request_runs(cluster: Resolving) -> None:
    cluster.write_adapter("sql")
    first = await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    full = AdapterStore(cluster.store_dir("r1"), max_bytes=10)
    cluster.write_adapter("other", "others!!")
    other = find_adapter_files(cluster.root / "adapters" / "other")
    async with cluster.replicas["r1"].link.admit("sql") as admitted:
        assert cluster.digest(Path(admitted.lora.lora_path)) == first
        with pytest.raises(StoreFullError):
            full.add(other)
    full.add(other)
    assert full.find(first) is None


async def test_damaged_copy_in_the_store_is_replaced(cluster: Resolving) -> None:
    cluster.write_adapter("sql")
    first = await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    replica = cluster.replicas["r2"]
    sources = replica.link.adapters._sources
    await sources.fetch("sql", (cluster.root / "adapters/sql").as_uri(), digest=first)
    weights = cluster.store_dir("r2") / "adapters" / first / "adapter_model.safetensors"
    weights.chmod(0o600)
    weights.write_text("bit rot")
    replica.engine.refusals["sql"] = InvalidAdapterError("its files changed")
    with pytest.raises(InvalidAdapterError):
        await cluster.clock.finish(replica.digest_for("sql"))
    assert weights.read_text() == "weights"
    assert replica.engine.num_loads == 2


async def test_unknown_name_is_asked_for_again_only_after_a_while(cluster: Resolving) -> None:
    for _ in range(5):
        with pytest.raises(AdapterNotFoundError):
            await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    assert cluster.resolver.asked == ["sql"]
    cluster.write_adapter("sql")
    await cluster.clock.advance(3.1)
    await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    assert cluster.resolver.asked == ["sql", "sql"]


async def test_flood_of_wrong_names_is_a_bounded_number_of_lookups(cluster: Resolving) -> None:
    controller, member = cluster.controller, cluster.replicas["r1"].link._identity.member
    names = [f"wrong-{number}" for number in range(500)]
    answers = await cluster.clock.finish(
        asyncio.gather(*(controller.resolve(n, member) for n in names), return_exceptions=True)
    )
    kinds = Counter(type(answer) for answer in answers)
    assert kinds[OverloadedError] > 250 and kinds[AdapterNotFoundError] >= 200
    assert len(cluster.resolver.asked) == kinds[AdapterNotFoundError]
    await cluster.clock.advance(1)
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(controller.resolve("another", member))
    assert controller._operations.runner.tasks == {}


async def test_not_found_from_before_a_load_is_not_told_to_requests_from_after_it(
    cluster: Resolving, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = cluster.replicas["r2"]
    # The controller's answer is on its way for longer than the replica's lease.
    answered, arrives = asyncio.Event(), asyncio.Event()

    async def resolve(name: str, member: MemberId) -> Resolved:
        try:
            return await cluster.controller.resolve(name, member)
        finally:
            answered.set()
            await arrives.wait()

    monkeypatch.setattr(lost.network, "resolve", resolve)
    early = asyncio.ensure_future(lost.digest_for("sql"))
    await cluster.clock.until(answered.is_set)
    monkeypatch.undo()
    lost.network.is_up.clear()
    version = await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("sql")))
    late = asyncio.ensure_future(lost.digest_for("sql"))
    await settle()
    arrives.set()
    await cluster.clock.until(lambda: early.done() and late.done())
    for request in (early, late):
        with pytest.raises(ReplicaUnavailableError):
            await request
    lost.network.is_up.set()
    await cluster.clock.until(lambda: lost.link.holds_lease)
    assert await cluster.clock.finish(lost.digest_for("sql")) == version.digest


async def test_explicit_load_is_not_hidden_by_a_remembered_miss(cluster: Resolving) -> None:
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("elsewhere")))
    await cluster.clock.finish(digests_for(cluster, "sql"))


async def test_failing_source_is_not_a_missing_adapter(cluster: Resolving) -> None:
    cluster.resolver.failure = SourceUnavailableError("bucket is down", retry_after_s=7)
    for _ in range(5):
        with pytest.raises(ResolverUnavailableError, match="bucket is down") as caught:
            await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
        assert caught.value.retry_after_s == 7
    assert cluster.resolver.asked == ["sql"]
    cluster.resolver.failure = SourceForbiddenError("no access")
    with pytest.raises(ResolverForbiddenError, match="no access"):
        await cluster.clock.finish(cluster.replicas["r1"].digest_for("other"))
    cluster.resolver.failure = None
    cluster.write_adapter("sql")
    await cluster.clock.advance(3.1)
    await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))


async def test_refused_adapter_says_why_and_is_not_registered(cluster: Resolving) -> None:
    cluster.write_adapter("sql")
    cluster.replicas["r1"].engine.refusals["sql"] = UnsupportedAdapterError("uses DoRA")
    for _ in range(3):
        with pytest.raises(AdapterRejectedError, match="uses DoRA"):
            await cluster.clock.finish(cluster.replicas["r1"].digest_for("sql"))
    assert cluster.resolver.asked == ["sql"]
    assert await cluster.controller.list_adapters() == []


async def test_asking_replica_that_dies_leaves_nothing_behind(cluster: Resolving) -> None:
    cluster.write_adapter("sql")
    asking = cluster.replicas["r1"]
    asking.engine.gate.clear()
    request = asyncio.ensure_future(cluster.controller.resolve("sql", asking.link._identity.member))
    await cluster.clock.until(lambda: asking.engine.num_loads == 1)
    asking.kill()
    cluster.liveness.dead.add("r1")
    with pytest.raises(ReplicaUnavailableError):
        await cluster.clock.finish(request, within_s=2)
    await cluster.clock.finish(cluster.replicas["r2"].digest_for("sql"))


async def test_unloaded_name_stays_away_until_it_is_loaded_again(cluster: Resolving) -> None:
    path = cluster.write_adapter("sql")
    await cluster.clock.finish(digests_for(cluster, "sql"))
    await cluster.clock.finish(cluster.unload("sql"))
    cluster.kill_controller()
    cluster.start_controller()
    for replica in cluster.replicas.values():
        with pytest.raises(AdapterNotFoundError):
            await cluster.clock.finish(replica.digest_for("sql"))
    assert cluster.resolver.asked == ["sql"]
    await cluster.clock.finish(cluster.load("sql", path))
    await cluster.clock.finish(digests_for(cluster, "sql"))


async def test_load_without_a_path_asks_the_resolvers(cluster: Resolving) -> None:
    path = cluster.write_adapter("sql")
    version = await cluster.clock.finish(cluster.load("sql", None, pin=True))
    assert version.digest == cluster.digest(path)
    with pytest.raises(AdapterNotFoundError):
        await cluster.clock.finish(cluster.load("other", None))


async def test_request_during_an_unload_sees_the_old_or_nothing(cluster: Resolving) -> None:
    path = cluster.write_adapter("sql")
    await cluster.clock.finish(digests_for(cluster, "sql"))
    unload = asyncio.ensure_future(cluster.unload("sql"))
    outcomes = set()
    while not unload.done():
        for replica in cluster.replicas.values():
            try:
                outcomes.add(await replica.digest_for("sql"))
            except AdapterNotFoundError:
                outcomes.add("")
        await cluster.clock.advance(0.05)
        await settle()
    assert outcomes <= {cluster.digest(path), ""}
