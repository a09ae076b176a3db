"""First requests for adapters in S3, over several nodes, whatever the network does."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deployments.error_table import error_status
from deployments.errors import (
    AdapterNotFoundError,
    ClusterError,
    InvalidAdapterSourceError,
    PathNotAllowedError,
    ResolverForbiddenError,
    ResolverUnavailableError,
)
from deployments.sources import AdapterSources
from resolvers.chain import Link, ResolverChain
from resolvers.s3 import S3Resolver
from resolvers.store import AdapterStore
from tests.deployments.cluster import BASE, Cluster, running_cluster
from tests.resolvers.adapter_files import assert_whole
from tests.resolvers.s3_server import (
    CREDENTIALS,
    Bucket,
    Fault,
    FaultyProxy,
    refuse,
    reset,
    s3_server,
)

WEIGHTS = "adapter_model.safetensors"


class S3Cluster(Cluster):
    """Replicas "a-1" and "a-2" are on node "a", "b-1" on "b"; the controller is on "a" too."""

    proxy: FaultyProxy
    bucket: Bucket

    def sources(self, node: str = "a") -> AdapterSources:
        store = AdapterStore(self.store_dir(node[0]), max_adapter_bytes=5000)
        resolver = S3Resolver(
            store,
            f"s3://{self.bucket.name}/team",
            endpoint_url=self.proxy.url,
            region_name="us-east-1",
            download={"attempts": 2},
        )
        return AdapterSources(
            BASE,
            store,
            resolver=ResolverChain([Link("s3", resolver)]),
            allowed_roots=[f"s3://{self.bucket.name}/team"],
            fetchers={"s3": resolver},
        )


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
async def cluster(
    s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[S3Cluster]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with FaultyProxy(s3_port).running() as proxy:
        S3Cluster.proxy = proxy
        S3Cluster.bucket = Bucket(s3_port, tmp_path.name.replace("_", "-").lower()[-60:].strip("-"))
        S3Cluster.bucket.create()
        names = ("a-1", "a-2", "b-1")
        async with running_cluster(tmp_path, *names, cluster_type=S3Cluster) as cluster:
            yield cluster


async def ask(cluster: Cluster, name: str, times: int) -> list[str | ClusterError]:
    """Start that many requests at the same time, spread over all replicas."""
    replicas = list(cluster.replicas.values())
    requests = [replicas[turn % 3].digest_for(name) for turn in range(times)]
    outcomes: list[str | ClusterError] = await cluster.clock.finish(
        asyncio.gather(*requests, return_exceptions=True), within_s=600
    )
    return outcomes


async def test_hundred_first_requests_are_one_download_a_node(cluster: S3Cluster) -> None:
    cluster.bucket.put_adapter("team/sql", b"w" * 1000)
    outcomes = await ask(cluster, "sql", 100)
    assert len(set(outcomes)) == 1 and isinstance(outcomes[0], str)
    assert cluster.proxy.count(WEIGHTS) == 2
    for node in ("a", "b"):
        assert_whole(cluster.store_dir(node))
    (status,) = await cluster.controller.list_adapters()
    assert status.version.source_uri == f"s3://{cluster.bucket.name}/team/sql/"


REFUSED = refuse(403, "AccessDenied")
TROUBLED = refuse(500, "InternalError")


@pytest.mark.parametrize(
    ("fault", "error", "status", "has_retry_after"),
    [
        (None, AdapterNotFoundError, 404, False),
        (Fault(change=REFUSED, times=99), ResolverForbiddenError, 502, True),
        (Fault(change=TROUBLED, times=99), ResolverUnavailableError, 503, True),
        (Fault(before=reset, times=99), ResolverUnavailableError, 503, True),
    ],
    ids=["nothing there", "403", "500", "reset"],
)
async def test_failure_is_shared_and_says_what_it_is(
    cluster: S3Cluster,
    fault: Fault | None,
    error: type[ClusterError],
    status: int,
    has_retry_after: bool,
) -> None:
    if fault is not None:
        cluster.proxy.faults.append(fault)
    outcomes = await ask(cluster, "sql", 30)
    assert Counter(map(type, outcomes)) == {error: 30}
    assert len(cluster.proxy.seen) <= 2
    assert isinstance(outcomes[0], error)
    answer = error_status(outcomes[0])
    assert (answer.status, answer.retry_after_s is not None) == (status, has_retry_after)
    assert "secret" not in str(outcomes[0])
    cluster.proxy.faults.clear()
    cluster.bucket.put_adapter("team/sql")
    await cluster.clock.advance(3.1)
    assert len(set(await ask(cluster, "sql", 3))) == 1


async def test_bad_adapter_does_not_block_a_good_one(cluster: S3Cluster) -> None:
    cluster.bucket.put_adapter("team/huge", b"w" * 6000)
    cluster.bucket.put_adapter("team/sql", b"w")
    huge, sql = await asyncio.gather(ask(cluster, "huge", 3), ask(cluster, "sql", 3))
    assert {type(outcome) for outcome in huge} == {InvalidAdapterSourceError}
    assert {type(outcome) for outcome in sql} == {str}


async def test_operator_loads_from_an_allowed_prefix_only(cluster: S3Cluster) -> None:
    cluster.bucket.put_adapter("team/one/v2")
    cluster.bucket.put_adapter("private/one")

    async def load(uri: str) -> str:
        sources = cluster.controller._operations.sources
        return (await sources.open("one", uri)).source_uri or ""

    prefix = f"s3://{cluster.bucket.name}"
    assert await load(f"{prefix}/team/one/v2") == f"{prefix}/team/one/v2/"
    for uri in (f"{prefix}/private/one", f"{prefix}/team/../private/one", "s3://other/team/one"):
        with pytest.raises(PathNotAllowedError):
            await load(uri)
