"""GET /metrics: this ingress' requests, and the cluster's replicas and adapters, for Prometheus.

Request counters are those of the process that answers; the gauges are read from the controller
when asked, so any ingress gives the same.
"""

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deployments.openai.api import Api

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class HttpMetrics:
    """Counters of one app; each app has its own, so several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "lorafleet_http_requests",
            "HTTP requests by route and status; 0 is a connection lost before the status",
            ["route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "lorafleet_http_request_seconds",
            "Time from a request's headers to the end of its response",
            ["route"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )

    def count(self, route: str, status: int | None, seconds: float) -> None:
        self._requests.labels(route, status or 0).inc()
        self._seconds.labels(route).observe(seconds)


def metrics_router(api: Api, metrics: HttpMetrics) -> APIRouter:
    """The route that Prometheus scrapes."""
    router = APIRouter()

    @router.get("/metrics")
    async def scrape() -> Response:
        cluster = await _cluster_gauges(api)
        text = generate_latest(metrics.registry) + generate_latest(cluster)
        return Response(text, headers={"content-type": _CONTENT_TYPE})

    return router


async def _cluster_gauges(api: Api) -> CollectorRegistry:
    """Gauges made anew for each scrape, so that what is gone leaves no stale series."""
    registry = CollectorRegistry()
    running = _gauge(registry, "replica_requests_running", "Running requests", "replica")
    waiting = _gauge(registry, "replica_requests_waiting", "Waiting requests", "replica")
    lease = _gauge(registry, "replica_lease_seconds", "Time left of the lease", "replica")
    for replica in await api.backend.list_replicas():
        running.labels(replica.replica_id).set(replica.num_running)
        waiting.labels(replica.replica_id).set(replica.num_waiting)
        lease.labels(replica.replica_id).set(replica.lease_left_s)
    generation = _gauge(registry, "adapter_generation", "Generation in service", "adapter")
    resident = _gauge(
        registry, "adapter_resident", "1 where weights are", "adapter", "replica", "tier"
    )
    for status in await api.backend.list_adapters():
        name = status.version.name
        generation.labels(name).set(status.version.generation)
        for held in status.replicas:
            resident.labels(name, held.replica_id, "host").set(held.host)
            resident.labels(name, held.replica_id, "slot").set(held.slot is not None)
    return registry


def _gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"lorafleet_{name}", text, labels, registry=registry)
