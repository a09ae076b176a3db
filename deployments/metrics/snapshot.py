"""A registry's metrics as bytes, and several of them as one again.

Whoever passes a snapshot on need not read it.
"""

from collections.abc import Iterable, Iterator, Mapping

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def take_snapshot(*registries: CollectorRegistry) -> bytes:
    """Everything that the metrics of some registries say now."""
    families = [
        (
            family.name,
            family.type,
            family.documentation,
            [
                (sample.name, sample.labels, sample.value)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ],
        )
        for registry in registries
        for family in registry.collect()
    ]
    return orjson.dumps(families)


class Snapshots(Collector):
    """The metrics of several processes; the samples of one name come together."""

    def __init__(self, snapshots: Iterable[bytes]) -> None:
        self._families: dict[str, Metric] = {}
        for snapshot in filter(None, snapshots):
            for name, kind, text, samples in orjson.loads(snapshot):
                family = self._families.setdefault(name, Metric(name, text, kind))
                for sample_name, labels, value in samples:
                    family.add_sample(sample_name, labels, value)

    def collect(self) -> Iterator[Metric]:
        """For a registry."""
        yield from self._families.values()

    def values(self, sample_name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """The labels and value of every sample of this name."""
        for family in self._families.values():
            for sample in family.samples:
                if sample.name == sample_name:
                    yield sample.labels, sample.value
