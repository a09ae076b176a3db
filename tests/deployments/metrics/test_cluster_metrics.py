"""The whole cluster's metrics: from replicas through the controller to one page, and to Ray."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from adapters import LoRARequest
from deployments.backend import ClusterMetrics
from deployments.errors import AdapterAlreadyLoadedError
from deployments.metrics import ray_export
from deployments.metrics.ray_export import RayExporter
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.metrics.resolver_timing import TimedFetcher, TimedResolver
from deployments.metrics.snapshot import Snapshots, take_snapshot
from resolvers.base import ResolverError, SourceForbiddenError, SourceUnavailableError
from tests.deployments.cluster import Cluster, running_cluster


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "r1", "r2") as cluster:
        yield cluster


def read(metrics: ClusterMetrics) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Snapshots((metrics.controller, *metrics.replicas)))
    return registry


async def collected(cluster: Cluster) -> CollectorRegistry:
    return read(await cluster.controller.collect_metrics())


async def test_operations_are_timed_by_kind_and_outcome(cluster: Cluster) -> None:
    path = cluster.write_adapter("one")
    await cluster.clock.finish(cluster.load("sql", path))
    with pytest.raises(AdapterAlreadyLoadedError):
        await cluster.clock.finish(cluster.load("sql", path, op_id="again"))
    registry = await collected(cluster)

    def count(kind: str, outcome: str) -> float | None:
        labels = {"kind": kind, "outcome": outcome}
        return registry.get_sample_value("lorafleet_operation_seconds_count", labels)

    assert (count("load", "done"), count("load", "refused")) == (1, 1)
    assert registry.get_sample_value("lorafleet_broadcast_seconds_count") == 1


async def test_gauges_tell_what_is_where(cluster: Cluster) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("one")))
    await cluster.clock.advance(3)
    registry = await collected(cluster)
    assert registry.get_sample_value("lorafleet_adapters_registered") == 1
    assert registry.get_sample_value("lorafleet_replicas") == 2
    assert registry.get_sample_value("lorafleet_adapter_generation", {"adapter": "sql"}) == 1
    for replica in ("r1", "r2"):
        labels = {"adapter": "sql", "replica": replica, "tier": "host"}
        assert registry.get_sample_value("lorafleet_adapter_resident", labels) == 1
        lag = registry.get_sample_value("lorafleet_replica_journal_lag", {"replica": replica})
        assert lag == 0


async def test_a_replica_that_does_not_answer_falls_behind_the_journal(cluster: Cluster) -> None:
    await cluster.clock.finish(cluster.load("sql", cluster.write_adapter("one")))
    await cluster.clock.advance(3)
    cluster.replicas["r2"].network.is_up.clear()
    unloading = asyncio.ensure_future(cluster.unload("sql"))
    await cluster.clock.advance(1)
    registry = await collected(cluster)
    lag = {
        replica: registry.get_sample_value("lorafleet_replica_journal_lag", {"replica": replica})
        for replica in ("r1", "r2")
    }
    assert lag == {"r1": 0, "r2": 1}
    await cluster.clock.finish(unloading)
    registry = await collected(cluster)
    assert registry.get_sample_value("lorafleet_replicas") == 1


def test_snapshots_of_several_processes_are_one_page() -> None:
    parts = []
    for replica in ("r1", "r2"):
        metrics = ReplicaMetrics("base", replica, 100)
        metrics.observe_load(0.5, failed=False)
        parts.append(metrics.snapshot())
    text = generate_latest(read(ClusterMetrics(replicas=(*parts, b"")))).decode()
    assert text.count("# TYPE lorafleet_cold_load_seconds histogram") == 1
    for replica in ("r1", "r2"):
        labels = f'{{outcome="loaded",replica="{replica}"}}'
        assert f"lorafleet_cold_load_seconds_count{labels} 1.0" in text
    assert "_created" not in text


def test_values_of_one_name_can_be_looked_up() -> None:
    registry = CollectorRegistry()
    counter = Counter("asked", "Times", ["who"], registry=registry)
    counter.labels("a").inc(2)
    counter.labels("b").inc(3)
    found = {
        labels["who"]: value
        for labels, value in Snapshots([take_snapshot(registry)]).values("asked_total")
    }
    assert found == {"a": 2, "b": 3}


class Source:
    def __init__(self, outcome: LoRARequest | Exception | None) -> None:
        self.outcome = outcome

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return self._answer()

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        answer = self._answer()
        assert answer is not None
        return answer

    def _answer(self) -> LoRARequest | None:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


FOUND = LoRARequest(lora_name="sql", lora_path="/sql")


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (FOUND, "found"),
        (None, "not_found"),
        (SourceUnavailableError("down"), "unavailable"),
        (SourceForbiddenError("no"), "forbidden"),
        (ResolverError("odd"), "error"),
        (RuntimeError("crash"), "error"),
    ],
)
async def test_resolvers_are_timed_and_left_as_they_are(
    outcome: LoRARequest | Exception | None, expected: str
) -> None:
    seen: list[tuple[str, str]] = []
    timed = TimedResolver("s3", Source(outcome), lambda b, o, _: seen.append((b, o)))
    if isinstance(outcome, Exception):
        with pytest.raises(type(outcome)):
            await timed.resolve_lora("base", "sql")
    else:
        assert await timed.resolve_lora("base", "sql") is outcome
    assert seen == [("s3", expected)]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (FOUND, "fetched"),
        (FileNotFoundError(), "not_found"),
        (SourceForbiddenError("no"), "forbidden"),
    ],
)
async def test_fetches_are_timed(outcome: LoRARequest | Exception, expected: str) -> None:
    seen: list[tuple[str, str]] = []
    timed = TimedFetcher("s3", Source(outcome), lambda b, o, _: seen.append((b, o)))
    if isinstance(outcome, Exception):
        with pytest.raises(type(outcome)):
            await timed.fetch("s3://b/sql", "sql", None)
    else:
        assert await timed.fetch("s3://b/sql", "sql", None) is outcome
    assert seen == [("s3", expected)]


class RecordedMetric:
    """Stands for Ray's, which need a cluster."""

    every: ClassVar[dict[str, "RecordedMetric"]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.series: dict[tuple[str, ...], float] = {}
        self.tag_keys = tag_keys
        self.every[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.series[tuple(tags[key] for key in self.tag_keys)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        key = tuple(tags[key] for key in self.tag_keys)
        self.series[key] = self.series.get(key, 0) + value


def test_ray_gets_totals_once_and_no_series_of_single_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RecordedMetric.every = {}
    monkeypatch.setattr(ray_export, "Gauge", RecordedMetric)
    monkeypatch.setattr(ray_export, "Counter", RecordedMetric)
    metrics = ReplicaMetrics("base", "r1", 100)
    with metrics.request() as record:
        record.admitted("sql")
        record.tokenized(1)
    exporter = RayExporter(metrics.registry)
    exporter.publish()
    exporter.publish()
    every = RecordedMetric.every
    assert every["vllm_request_success_total"].series == {("base", "r1", "abort"): 1}
    assert every["lorafleet_admission_seconds_count"].series == {("r1",): 1}
    assert every["lorafleet_admission_seconds_bucket"].series[("r1", "+Inf")] == 1
    assert not any("adapter" in metric.tag_keys for metric in every.values())
    assert not any(":" in name or name.endswith("_created") for name in every)
