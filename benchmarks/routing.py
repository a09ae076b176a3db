"""Routing by residency against random routing: ``python -m benchmarks.routing --json OUT``.

A simulation with the real policy (``deployments.routing.rank_replicas``) and made-up replicas: each
serves some requests at a time, holds some adapters, and takes a while to load another one. Loads of
replicas are known exactly, residency as late as the replicas report it.
"""

import argparse
import heapq
import json
import random
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any

from deployments.routing import ReplicaView, rank_replicas

_SPILL_OVER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The load and the replicas. ``hot_share`` of all requests go to one adapter."""

    num_replicas: int = 8
    num_adapters: int = 200
    zipf_exponent: float = 1.0
    hot_share: float = 0.0
    num_requests: int = 30_000
    requests_per_s: float = 400.0
    parallel: int = 16
    service_s: float = 0.2
    load_s: float = 0.1
    max_cpu_loras: int = 32
    report_period_s: float = 1.0


@dataclass(slots=True)
class _Replica:
    id: str
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    reported: frozenset[str] = frozenset()
    running: int = 0
    waiting: deque[tuple[float, str]] = field(default_factory=deque)

    @property
    def load(self) -> int:
        return self.running + len(self.waiting)


Route = Callable[[Sequence[ReplicaView], str], str]


def route_by_residency(views: Sequence[ReplicaView], adapter: str) -> str:
    """The policy of this project."""
    return rank_replicas(views, adapter, _SPILL_OVER)[0][0]


def route_to_less_loaded_of_two(views: Sequence[ReplicaView], adapter: str) -> str:
    """Two at random, then the less loaded: what Ray Serve does without multiplexing."""
    return min(random.sample(list(views), 2), key=lambda view: view.load).id


def route_at_random(views: Sequence[ReplicaView], adapter: str) -> str:
    """Any replica."""
    return random.choice(views).id


ROUTES: dict[str, Route] = {
    "residency": route_by_residency,
    "two choices": route_to_less_loaded_of_two,
    "random": route_at_random,
}


class _Simulation:
    def __init__(self, scenario: Scenario, route: Route) -> None:
        self._scenario = scenario
        self._route = route
        self._replicas = {f"r{i}": _Replica(f"r{i}") for i in range(scenario.num_replicas)}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._latencies: list[float] = []
        self._served: Counter[str] = Counter()
        self._num_cold = 0
        self._max_load_gap = 0

    def run(self) -> dict[str, Any]:
        self._arrive_all()
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        cuts = statistics.quantiles(self._latencies, n=100)
        mean = len(self._latencies) / len(self._replicas)
        return {
            "cold_loads": self._num_cold,
            "cold_share": round(self._num_cold / len(self._latencies), 4),
            "latency_ms": {"p50": round(cuts[49] * 1e3, 1), "p99": round(cuts[98] * 1e3, 1)},
            "busiest_replica_share_of_mean": round(max(self._served.values()) / mean, 3),
            "max_load_gap": self._max_load_gap,
        }

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), act))

    def _arrive_all(self) -> None:
        scenario, now = self._scenario, 0.0
        names = [f"a{index}" for index in range(scenario.num_adapters)]
        weights = [1 / (i + 1) ** scenario.zipf_exponent for i in range(scenario.num_adapters)]
        cumulative = list(accumulate(weights))
        for _ in range(scenario.num_requests):
            now += random.expovariate(scenario.requests_per_s)
            is_hot = random.random() < scenario.hot_share
            name = names[0] if is_hot else random.choices(names, cum_weights=cumulative)[0]
            self._at(now, lambda at, name=name: self._arrive(at, name))  # type: ignore[misc]
        reports = int(now / scenario.report_period_s) + 1
        for index in range(reports):
            self._at(index * scenario.report_period_s, self._report)

    def _report(self, now: float) -> None:
        for replica in self._replicas.values():
            replica.reported = frozenset(replica.resident)

    def _arrive(self, now: float, adapter: str) -> None:
        views = [
            ReplicaView(replica.id, replica.load, adapter in replica.reported)
            for replica in self._replicas.values()
        ]
        loads = [view.load for view in views]
        self._max_load_gap = max(self._max_load_gap, max(loads) - min(loads))
        replica = self._replicas[self._route(views, adapter)]
        self._served[replica.id] += 1
        replica.waiting.append((now, adapter))
        self._start(now, replica)

    def _start(self, now: float, replica: _Replica) -> None:
        while replica.waiting and replica.running < self._scenario.parallel:
            arrived, adapter = replica.waiting.popleft()
            replica.running += 1
            took = random.expovariate(1 / self._scenario.service_s)
            if adapter not in replica.resident:
                self._num_cold += 1
                took += self._scenario.load_s
                if len(replica.resident) >= self._scenario.max_cpu_loras:
                    replica.resident.popitem(last=False)
            replica.resident[adapter] = None
            replica.resident.move_to_end(adapter)
            self._at(now + took, self._finisher(replica, arrived))

    def _finisher(self, replica: _Replica, arrived: float) -> Callable[[float], None]:
        def finish(now: float) -> None:
            replica.running -= 1
            self._latencies.append(now - arrived)
            self._start(now, replica)

        return finish


SCENARIOS = {
    "zipf": Scenario(),
    "zipf, one adapter takes 80 %": Scenario(hot_share=0.8),
    "zipf, near saturation": Scenario(requests_per_s=600.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for title, scenario in SCENARIOS.items():
        for name, route in ROUTES.items():
            random.seed(0)
            figures = _Simulation(scenario, route).run()
            print(f"{title:32} {name:12} {figures}")
            results.append({"scenario": title, "route": name, **asdict(scenario), **figures})
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
