"""What an engine tells about itself, as metrics: read when asked, at no cost in between."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from adapters import AdapterVersion
from deployments.engine_port import FullStatsLike, GeneratingEngine, ResidencyLike

# Names in one label value.
_MAX_NAMES = 100


class EngineCollector(Collector):
    """One engine's gauges and counters. ``in_flight`` are the versions of unfinished requests."""

    def __init__(
        self,
        engine: GeneratingEngine,
        base_model: str,
        replica_id: str,
        in_flight: Callable[[], Iterable[AdapterVersion]],
    ) -> None:
        self._engine = engine
        self._labels = {"model_name": base_model, "engine": replica_id}
        self._replica = {"replica": replica_id}
        self._in_flight = in_flight

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask the engine in order to know that names are unique."""
        return []

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        stats = self._engine.stats()
        residency = self._engine.loras()
        yield from self._vllm(stats)
        yield from self._lorafleet(stats, residency)
        yield self._lora_info(stats, residency)

    def _vllm(self, stats: FullStatsLike) -> Iterator[Metric]:
        used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        gauges = {
            "num_requests_running": ("Requests in the batch", stats.num_running),
            "num_requests_waiting": ("Requests that wait to be scheduled", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of KV blocks in use; 1 is all of them", used),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens", stats.total_prompt_tokens),
            "generation_tokens": ("Generated tokens", stats.total_output_tokens),
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache",
                stats.total_prompt_tokens,
            ),
            "prefix_cache_hits": (
                "Prompt tokens found in the prefix cache",
                stats.total_cached_prompt_tokens,
            ),
            "num_preemptions": ("Requests sent back to wait", stats.total_preemptions),
        }
        for name, (text, value) in gauges.items():
            yield _gauge(f"vllm:{name}", text, self._labels, value)
        for name, (text, total) in counters.items():
            yield _counter(f"vllm:{name}", text, self._labels, total)

    def _lorafleet(
        self, stats: FullStatsLike, residency: Sequence[ResidencyLike]
    ) -> Iterator[Metric]:
        gauges = {
            "slots": ("Places for active adapters", stats.max_loras),
            "slots_in_use": ("Slots that running requests use", stats.num_slots_in_use),
            "adapters_in_host_memory": (
                "Adapters whose weights are in host memory",
                sum(held.host for held in residency),
            ),
            "adapters_in_slots": (
                "Adapters whose weights are in a slot",
                sum(held.slot is not None for held in residency),
            ),
            "kv_blocks": ("Blocks of the KV cache", stats.num_blocks),
        }
        for name, (text, value) in gauges.items():
            yield _gauge(f"lorafleet_{name}", text, self._replica, value)
        counters = {
            "slot_loads": ("Adapters copied to a slot", stats.total_slot_loads),
            "engine_steps": ("Forward passes", stats.total_steps),
        }
        for name, (text, total) in counters.items():
            yield _counter(f"lorafleet_{name}", text, self._replica, total)

    def _lora_info(self, stats: FullStatsLike, residency: Sequence[ResidencyLike]) -> Metric:
        """As routers for vLLM read it: the labels are what counts, the value is the time."""
        running = {held.digest for held in residency if held.num_running}
        names: tuple[set[str], set[str]] = set(), set()
        for version in tuple(self._in_flight()):
            names[version.digest in running].add(version.name)
        waiting, active = (",".join(sorted(group)[:_MAX_NAMES]) for group in names)
        labels = {
            "max_lora": str(stats.max_loras),
            "running_lora_adapters": active,
            "waiting_lora_adapters": waiting,
            **self._labels,
        }
        text = "Adapters of unfinished requests; the value is when it was looked at"
        return _gauge("vllm:lora_requests_info", text, labels, time.time())


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
