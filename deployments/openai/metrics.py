"""GET /metrics: this ingress' requests, and the cluster's replicas and adapters, for Prometheus.

Request counters are those of the process that answers; all else is read from the controller when
asked, so any ingress gives the same.
"""

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deployments.metrics.snapshot import Snapshots
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

        self._refusals = Counter(
            "lorafleet_http_refusals",
            "Requests that were refused before any work, or ran out of time, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.keys_stale = Gauge(
            "lorafleet_http_keys_stale",
            "1 while the file of keys says something that is not in use, because it cannot be",
            registry=self.registry,
        )

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def count(self, route: str, status: int | None, seconds: float) -> None:
        self._requests.labels(route, status or 0).inc()
        self._seconds.labels(route).observe(seconds)


def metrics_router(api: Api, metrics: HttpMetrics) -> APIRouter:
    """The route that Prometheus scrapes."""
    router = APIRouter()

    @router.get("/metrics")
    async def scrape() -> Response:
        cluster = await api.backend.metrics()
        fleet = CollectorRegistry()
        fleet.register(Snapshots((cluster.controller, *cluster.replicas)))
        text = generate_latest(metrics.registry) + generate_latest(fleet)
        return Response(text, headers={"content-type": _CONTENT_TYPE})

    return router
