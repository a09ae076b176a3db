"""A histogram that takes many equal observations at once, which Prometheus' own does not."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TokenHistogram(Collector):
    """Observed for each token, at the cost of once for each list of tokens."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int) -> None:
        """Count a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def describe(self) -> list[HistogramMetricFamily]:
        """The name, for the registry."""
        return [HistogramMetricFamily(self._name, self._text, labels=list(self._labels))]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        [family] = self.describe()
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        counts = list(accumulate(self._counts))
        family.add_metric(
            list(self._labels.values()),
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=self._sum,
        )
        yield family
