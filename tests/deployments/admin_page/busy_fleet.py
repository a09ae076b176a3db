"""A cluster to look at: several replicas, any number of adapters, traffic that goes on."""

import random
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, Counter

from deployments.backend import (
    ALL_ADAPTERS,
    AdapterQuery,
    AdapterStatus,
    ClusterMetrics,
    ReplicaResidency,
    ReplicaStatus,
)
from deployments.metrics.snapshot import take_snapshot
from tests.deployments.fake_backend import FakeBackend

_TEAMS = ("billing", "legal", "search", "support", "sales", "ops")
_TASKS = ("summary", "sql", "reply", "triage", "extract", "tone", "translate")
_LABELS = ("replica", "adapter")


@dataclass
class BusyFleet(FakeBackend):
    """``num_adapters`` adapters on four replicas; every look finds more requests counted."""

    num_adapters: int = 40
    replica_ids: tuple[str, ...] = ("k3f9a2", "m81xqz", "p0v7dw", "z5c4ht")
    looks: int = 0
    held: dict[str, tuple[ReplicaResidency, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chance = random.Random(7)
        for number in range(self.num_adapters):
            name = f"{chance.choice(_TEAMS)}/{chance.choice(_TASKS)}-{number:04}"
            self.register(name, generation=number + 1)
            self.adapters[name] = replace(
                self.adapters[name],
                rank=chance.choice((8, 16, 32)),
                size_bytes=chance.randrange(5, 90) << 20,
                pinned=number % 11 == 0,
                digest=f"{chance.getrandbits(256):064x}",
            )
            self.held[name] = tuple(
                self._residency(replica_id, number, chance) for replica_id in self.replica_ids
            )
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests")
        self._tokens = self._counter("generation_tokens")
        self._sums = {
            name: self._counter(name)
            for name in (
                "request_seconds_sum",
                "request_seconds_count",
                "first_token_seconds_sum",
                "first_token_seconds_count",
            )
        }
        self._chance = chance

    def _residency(self, replica_id: str, number: int, chance: random.Random) -> ReplicaResidency:
        tier = chance.random()
        is_active = number < 14 and tier < 0.5
        return ReplicaResidency(
            replica_id=replica_id,
            generation=number + 1,
            host=tier < 0.35 or is_active,
            slot=chance.randrange(8) if is_active else None,
            num_running=chance.randrange(4) if is_active else 0,
        )

    def _counter(self, name: str) -> Counter:
        return Counter(f"lorafleet_adapter_{name}", name, _LABELS, registry=self._registry)

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        return [
            replace(
                status,
                replicas=self.held.get(status.version.name, ()),
                kept=tuple(self.kept.get(status.version.name, ())),
            )
            for status in await super().list_adapters(query)
        ]

    async def list_replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                replica_id=replica_id,
                node=f"node-{number}",
                table_version=9,
                lease_left_s=8.0,
                num_running=3 + number,
                num_waiting=number % 2,
            )
            for number, replica_id in enumerate(self.replica_ids)
        ]

    async def metrics(self) -> ClusterMetrics:
        self.looks += 1
        for number, name in enumerate(list(self.adapters)[:20]):
            self._serve(name, self._chance.randrange(0, max(2, 12 - number)))
        # The counters stand for summaries: their samples end in _total, which a summary's do not.
        snapshot = take_snapshot(self._registry)
        for suffix in (b"_sum", b"_count"):
            snapshot = snapshot.replace(suffix + b"_total", suffix)
        return ClusterMetrics(replicas=(snapshot,))

    def _serve(self, name: str, count: int) -> None:
        place = (self.replica_ids[0], name)
        self._requests.labels(*place).inc(count)
        self._tokens.labels(*place).inc(count * self._chance.randrange(40, 90))
        for metric, seconds in (("request_seconds", 1.4), ("first_token_seconds", 0.12)):
            spread = self._chance.uniform(0.7, 1.6)
            self._sums[f"{metric}_sum"].labels(*place).inc(count * seconds * spread)
            self._sums[f"{metric}_count"].labels(*place).inc(count)
