"""The metrics of the controller: operations, their broadcast, and what is where.

Gauges of single adapters are bounded: those whose weights are in memory somewhere come first, by
name, since only of these there is something to see.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, Histogram

from deployments.backend import AdapterStatus, ReplicaStatus
from deployments.errors import ClusterError, OperationTimeoutError
from deployments.metrics import buckets
from deployments.metrics.snapshot import take_snapshot

MAX_ADAPTERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """What the controller knows at a moment. ``adapters`` are those worth a gauge of their own."""

    table_version: int
    num_adapters: int
    num_aliases: int
    num_operations: int
    replicas: Sequence[ReplicaStatus] = ()
    adapters: Sequence[AdapterStatus] = ()


class ControllerMetrics:
    """Counts what one controller does."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.registry = CollectorRegistry()
        self.operation_seconds = Histogram(
            "lorafleet_operation_seconds",
            "Time that calls waited for operations on names, by kind and outcome",
            ("kind", "outcome"),
            buckets=buckets.STEP_S,
            registry=self.registry,
        )
        self.broadcast_seconds = Histogram(
            "lorafleet_broadcast_seconds",
            "Time from a change's entry in the journal until every replica followed it",
            buckets=buckets.STEP_S,
            registry=self.registry,
        )
        self.resolver_seconds = Histogram(
            "lorafleet_resolver_seconds",
            "Time for look-ups and fetches of adapters, by resolver",
            ("backend", "outcome"),
            buckets=buckets.STEP_S,
            registry=self.registry,
        )

    @contextmanager
    def operation(self, kind: str) -> Iterator[None]:
        """Time one call, whatever comes of it."""
        began, outcome = self._now(), "failed"
        try:
            yield
            outcome = "done"
        except OperationTimeoutError:
            outcome = "timeout"
            raise
        except (ClusterError, ValueError):
            outcome = "refused"
            raise
        finally:
            self.operation_seconds.labels(kind, outcome).observe(self._now() - began)

    def observe_resolver(self, backend: str, outcome: str, seconds: float) -> None:
        """A resolver was asked, or a source fetched from; called from any thread."""
        self.resolver_seconds.labels(backend, outcome).observe(seconds)

    def snapshot(self, view: FleetView) -> bytes:
        """Everything as bytes."""
        return take_snapshot(self.registry, fleet_gauges(view))


def fleet_gauges(view: FleetView) -> CollectorRegistry:
    """Gauges made anew each time, so that what is gone leaves no stale series."""
    registry = CollectorRegistry()
    facts = {
        "table_version": ("Version of the table of names in the journal", view.table_version),
        "adapters_registered": ("Adapters that can be asked for by name", view.num_adapters),
        "aliases": ("Names that stand for adapters", view.num_aliases),
        "operations_in_progress": ("Operations on names under way", view.num_operations),
        "replicas": ("Replicas that hold a lease", len(view.replicas)),
    }
    for name, (text, value) in facts.items():
        _gauge(registry, name, text).set(value)
    _replica_gauges(registry, view)
    _adapter_gauges(registry, view.adapters[:MAX_ADAPTERS])
    return registry


def _replica_gauges(registry: CollectorRegistry, view: FleetView) -> None:
    running = _gauge(registry, "replica_requests_running", "Running requests", "replica")
    waiting = _gauge(registry, "replica_requests_waiting", "Waiting requests", "replica")
    lease = _gauge(registry, "replica_lease_seconds", "Time left of the lease", "replica")
    lag = _gauge(registry, "replica_journal_lag", "Table versions behind the journal", "replica")
    for replica in view.replicas:
        running.labels(replica.replica_id).set(replica.num_running)
        waiting.labels(replica.replica_id).set(replica.num_waiting)
        lease.labels(replica.replica_id).set(replica.lease_left_s)
        lag.labels(replica.replica_id).set(view.table_version - replica.table_version)


def _adapter_gauges(registry: CollectorRegistry, adapters: Sequence[AdapterStatus]) -> None:
    generation = _gauge(registry, "adapter_generation", "Generation in service", "adapter")
    resident = _gauge(
        registry, "adapter_resident", "1 where weights are", "adapter", "replica", "tier"
    )
    for status in adapters:
        name = status.version.name
        generation.labels(name).set(status.version.generation)
        for held in status.replicas:
            resident.labels(name, held.replica_id, "host").set(held.host)
            resident.labels(name, held.replica_id, "slot").set(held.slot is not None)


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"lorafleet_{name}", text, labels, registry=registry)
