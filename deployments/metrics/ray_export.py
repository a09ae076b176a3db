"""Gives a registry's metrics to Ray, whose agents export those of every process of a node.

In Ray's names a colon is an underscore, and all begin with ``ray_``: vllm:num_requests_running
is ray_vllm_num_requests_running. Series of single adapters stay out, since Ray keeps every series
for as long as the process lives; /metrics has them.
"""

import logging
import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from ray.util.metrics import Counter, Gauge

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
_UNBOUNDED_LABELS = {"adapter", "running_lora_adapters"}


class RayExporter:
    """Publishes one registry from a thread of its own, until the process ends."""

    def __init__(self, registry: CollectorRegistry, *, period_s: float = PERIOD_S) -> None:
        self._registry = registry
        self._period_s = period_s
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        self._stopped = threading.Event()

    def start(self) -> None:
        """Publish now and then."""
        threading.Thread(target=self._run, name="ray-metrics", daemon=True).start()

    def stop(self) -> None:
        """Publish no more."""
        self._stopped.set()

    def publish(self) -> None:
        """Bring Ray's metrics to what the registry says now."""
        for family, sample in self._samples():
            if family.type == "counter":
                self._count(family, sample)
            else:
                # A histogram's series are cumulative: as gauges they reach Prometheus unchanged.
                self._gauge(family, sample).set(sample.value, tags=dict(sample.labels))

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self.publish()
            except Exception:
                logger.exception("cannot publish metrics to Ray")

    def _samples(self) -> Iterator[tuple[Metric, Sample]]:
        for family in self._registry.collect():
            for sample in family.samples:
                is_bounded = not _UNBOUNDED_LABELS & sample.labels.keys()
                if is_bounded and not sample.name.endswith("_created"):
                    yield family, sample

    def _gauge(self, family: Metric, sample: Sample) -> Gauge:
        name = sample.name.replace(":", "_")
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, family.documentation, tuple(sample.labels))
        return self._gauges[name]

    def _count(self, family: Metric, sample: Sample) -> None:
        name = sample.name.replace(":", "_")
        if name not in self._counters:
            self._counters[name] = Counter(name, family.documentation, tuple(sample.labels))
        key = (name, tuple(sample.labels.values()))
        more = sample.value - self._counted.get(key, 0.0)
        if more > 0:
            self._counted[key] = sample.value
            self._counters[name].inc(more, tags=dict(sample.labels))
