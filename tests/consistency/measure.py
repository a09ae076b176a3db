"""Measures what the agreement costs: ``python -m tests.consistency.measure --json OUT``.

A broadcast to eight replicas, a controller killed under load, replicas killed, and routing by
residency on real replicas. The engine is the small one, so the figures are those of the cluster.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from ray import serve

from adapters import LoRARequest
from deployments.app import REPLICAS
from deployments.backend import LoadAdapter
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig, HttpOptions
from deployments.controller_actor import ControllerActor, Deployed
from deployments.errors import ClusterError
from deployments.generation import GenerateRequest, GenerationStart, PromptInput
from deployments.ray_backend import RayBackend
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from tests.consistency.adapter_makers import NamedAdapters
from tests.consistency.served import Role, Served, local_ray, run_app
from tests.consistency.versioned_engine import VersionedEngine

NUM_REPLICAS = 8
LOAD_S = 0.2
_NUM_REPLACES = 20
_NUM_ADAPTERS = 200
_NUM_ROUTED = 1500
_RESIDENT = 50
_COLD_S = 0.1


@dataclass(kw_only=True)
class CachingEngine(VersionedEngine):
    """Holds a limited number of adapters in memory and takes a while to bring one back."""

    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def loras(self) -> list[Any]:
        return [held for held in super().loras() if held.digest in self.resident]

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        lora: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[list[RequestOutput]]:
        if lora is not None and lora.digest is not None:
            if lora.digest not in self.resident:
                await asyncio.sleep(_COLD_S)
            self.resident[lora.digest] = None
            self.resident.move_to_end(lora.digest)
            if len(self.resident) > _RESIDENT:
                self.resident.popitem(last=False)
        async for outputs in super().generate(request_id, prompt_token_ids, params, lora=lora):
            yield outputs


async def make_engine(config: DeploymentConfig, num_threads: int) -> VersionedEngine:
    if config.model_id == "routing":
        return CachingEngine(token_delay_s=0.01)
    return VersionedEngine(load_delay_s=LOAD_S, token_delay_s=0.01)


class Bench:
    """One application and its backend."""

    def __init__(self, address: str, root: Path, model_id: str, num_replicas: int) -> None:
        config = DeploymentConfig(
            model="fake",
            model_id=model_id,
            num_replicas=num_replicas,
            adapters=AdapterSettings(
                directories=(str(root / model_id),), allow_runtime_updating=True
            ),
            cluster=ClusterSettings(state_dir=str(root)),
            http=HttpOptions(num_replicas=1),
        )
        self.served: Served = run_app(
            address, config, make_engine, controller_class=ControllerActor
        )
        self.adapters = NamedAdapters(root / model_id)
        handle = serve.get_deployment_handle(REPLICAS, app_name=model_id)
        self.backend = RayBackend(handle, Deployed(config=config, deployed_at=1.0))
        self._index = 0

    async def load(self, name: str) -> float:
        """Load a new version; returns how long that took."""
        path = self.adapters.write(self._index)
        self._index += 1
        started = time.perf_counter()
        await self.backend.load_adapter(LoadAdapter(name=name, source=str(path), load_inplace=True))
        return time.perf_counter() - started

    async def generate(self, adapter: str | None) -> tuple[float, str]:
        """One request; returns how long it took and who served it."""
        request = GenerateRequest(
            request_id=uuid4().hex,
            prompt=PromptInput(text="x"),
            params=SamplingParams(max_tokens=2),
            adapter=adapter,
        )
        started, replica = time.perf_counter(), ""
        async for item in self.backend.generate(request):
            if isinstance(item, GenerationStart):
                replica = item.replica_id
        return time.perf_counter() - started, replica


async def measure_broadcast(bench: Bench) -> dict[str, Any]:
    """How long a replace takes on all replicas, against one replica's own load."""
    times = [await bench.load("policy") for _ in range(_NUM_REPLACES)]
    return {
        "replicas": bench.served.config.num_replicas,
        "own_load_ms": LOAD_S * 1e3,
        "limit_ms": (1.5 * LOAD_S + 0.05) * 1e3,
        **_summary(times),
    }


async def measure_controller_kill(bench: Bench) -> dict[str, Any]:
    """What requests for an adapter notice of a controller that is killed and comes back."""
    latencies: list[tuple[float, float]] = []
    failures, is_over = 0, asyncio.Event()

    async def client() -> None:
        nonlocal failures
        while not is_over.is_set():
            started = time.perf_counter()
            try:
                took, _ = await bench.generate("policy")
                latencies.append((started, took))
            except ClusterError:
                failures += 1
            await asyncio.sleep(0.02)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await asyncio.sleep(5)
    killed_at = time.perf_counter()
    os.kill(bench.served.pids(Role.CONTROLLER)[0], signal.SIGKILL)
    await bench.load("other")
    answers_again_s = time.perf_counter() - killed_at
    await asyncio.sleep(max(0.0, 5 - answers_again_s))
    is_over.set()
    await asyncio.gather(*clients)
    return {
        "failures": failures,
        "before": _summary([took for at, took in latencies if at < killed_at]),
        "after": _summary([took for at, took in latencies if at >= killed_at]),
        "first_load_answered_s": round(answers_again_s, 2),
    }


async def measure_replica_kill(bench: Bench) -> dict[str, Any]:
    """From the death of a replica until another one has joined and has served an adapter."""
    times = []
    for _ in range(2):
        before = {replica.replica_id for replica in await bench.backend.list_replicas()}
        killed_at = time.perf_counter()
        os.kill(random.choice(bench.served.pids(Role.REPLICA)), signal.SIGKILL)
        while True:
            try:
                _, replica = await bench.generate("policy")
            except ClusterError:
                continue
            if replica not in before:
                break
        times.append(time.perf_counter() - killed_at)
    return {"seconds": [round(took, 2) for took in times]}


async def measure_routing(bench: Bench, *, by_residency: bool) -> dict[str, Any]:
    """Requests for adapters of very different popularity."""
    chance = random.Random(0)
    names = [f"a{index}" for index in range(_NUM_ADAPTERS)]
    weights = list(accumulate(1 / (index + 1) for index in range(_NUM_ADAPTERS)))
    places, latencies, served = asyncio.Semaphore(8), [], Counter[str]()

    async def ask(name: str) -> None:
        async with places:
            took, replica = await bench.generate(name)
            latencies.append(took)
            served[replica] += 1

    wanted = chance.choices(names, cum_weights=weights, k=_NUM_ROUTED)
    # Without the adapter's name, the same router takes the less loaded of two random replicas.
    blind = patch("deployments.ray_backend._name", lambda adapter: "")
    with blind if not by_residency else patch.dict({}):
        await asyncio.gather(*map(ask, wanted))
    cold = sum(took > _COLD_S for took in latencies)
    return {
        "requests": len(latencies),
        "slower_than_a_cold_load": cold,
        "busiest_share_of_mean": round(max(served.values()) * len(served) / len(latencies), 2),
        **_summary(latencies),
    }


def _summary(times: Sequence[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(times, n=100)
    return {
        "count": len(times),
        "p50_ms": round(cuts[49] * 1e3, 1),
        "p99_ms": round(cuts[98] * 1e3, 1),
        "max_ms": round(max(times) * 1e3, 1),
    }


async def measure_agreement(bench: Bench) -> dict[str, Any]:
    """Everything about the eight replicas."""
    return {
        "broadcast": await measure_broadcast(bench),
        "controller_kill": await measure_controller_kill(bench),
        "replica_kill": await measure_replica_kill(bench),
    }


async def measure_routes(bench: Bench) -> dict[str, Any]:
    """Routing with and without the adapter's name."""
    places = asyncio.Semaphore(8)

    async def load(name: str) -> None:
        async with places:
            await bench.load(name)

    await asyncio.gather(*(load(f"a{index}") for index in range(_NUM_ADAPTERS)))
    return {
        "two_choices": await measure_routing(bench, by_residency=False),
        "residency": await measure_routing(bench, by_residency=True),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, local_ray() as address:
        bench = Bench(address, Path(directory), "agreement", NUM_REPLICAS)
        results = asyncio.run(measure_agreement(bench))
        serve.delete("agreement")
        bench = Bench(address, Path(directory), "routing", 4)
        results["routing"] = asyncio.run(measure_routes(bench))
    text = json.dumps({"cpus": os.cpu_count(), **results}, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
