"""How long a replace takes on eight replicas, against one replica's own load.

    python -m benchmarks.broadcast --json benchmarks/results/broadcast.json

The controller, its journal and the replicas' side of the agreement are the real ones, each in a
process of its own; the engine stands in for a real one and loads for ``--load-ms``, so that eight
of them fit on a laptop and the figure is that of the agreement. Also: what requests notice of a
controller that is killed, and the time from a killed replica to the next one that serves.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray import serve

from deployments.app import REPLICAS
from deployments.backend import LoadAdapter
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig, HttpOptions
from deployments.controller_actor import ControllerActor, Deployed
from deployments.errors import ClusterError
from deployments.generation import GenerateRequest, GenerationStart, PromptInput
from deployments.ray_backend import RayBackend
from engine.sampling_params import SamplingParams
from tests.consistency.served import Role, Served, local_ray, run_app
from tests.consistency.versioned_engine import VersionedEngine

MODEL = "broadcast"
NAME = "policy"
# A broadcast may take half as long again as one replica's own load, and this much more.
LIMIT_FACTOR, LIMIT_EXTRA_MS = 1.5, 50.0


async def make_engine(config: DeploymentConfig, num_threads: int) -> VersionedEngine:
    """An engine that takes as long to load as the model's name says."""
    return VersionedEngine(load_delay_s=float(config.model) / 1e3, token_delay_s=0.01)


class Fleet:
    """One application, seen as its ingress does."""

    def __init__(self, address: str, root: Path, num_replicas: int, load_ms: float) -> None:
        config = DeploymentConfig(
            model=str(load_ms),
            model_id=MODEL,
            num_replicas=num_replicas,
            adapters=AdapterSettings(
                directories=(str(root / "adapters"),), allow_runtime_updating=True
            ),
            cluster=ClusterSettings(state_dir=str(root)),
            http=HttpOptions(num_replicas=1),
        )
        self.served: Served = run_app(
            address, config, make_engine, controller_class=ControllerActor
        )
        self._root = root / "adapters"
        handle = serve.get_deployment_handle(REPLICAS, app_name=MODEL)
        self.backend = RayBackend(handle, Deployed(config=config, deployed_at=1.0))
        self._num_versions = 0

    async def replace(self, name: str = NAME) -> float:
        """Load a new version; returns how long that took, in seconds."""
        self._num_versions += 1
        path = self._root / f"v{self._num_versions}"
        await asyncio.to_thread(_write_adapter, path)
        began = time.perf_counter()
        await self.backend.load_adapter(LoadAdapter(name=name, source=str(path), load_inplace=True))
        return time.perf_counter() - began

    async def ask(self, adapter: str | None = NAME) -> tuple[float, str]:
        """One request; returns how long it took and who served it."""
        request = GenerateRequest(
            request_id=uuid4().hex,
            prompt=PromptInput(text="x"),
            params=SamplingParams(max_tokens=2),
            adapter=adapter,
        )
        began, replica = time.perf_counter(), ""
        async for item in self.backend.generate(request):
            if isinstance(item, GenerationStart):
                replica = item.replica_id
        return time.perf_counter() - began, replica


def _write_adapter(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(path.name)


async def measure_broadcast(fleet: Fleet, load_ms: float, rounds: int) -> dict[str, Any]:
    """How long replaces take, one after the other."""
    await fleet.replace()
    times = [await fleet.replace() for _ in range(rounds)]
    limit_ms = LIMIT_FACTOR * load_ms + LIMIT_EXTRA_MS
    return {
        "own_load_ms": load_ms,
        "limit_ms": limit_ms,
        "within_limit": sum(1e3 * took <= limit_ms for took in times),
        "replace_ms": quantiles(times),
    }


async def measure_controller_kill(fleet: Fleet) -> dict[str, Any]:
    """What requests for an adapter notice of a controller that dies and comes back."""
    seen: list[tuple[float, float]] = []
    failures: list[str] = []
    is_over = asyncio.Event()

    async def client() -> None:
        while not is_over.is_set():
            began = time.perf_counter()
            try:
                took, _ = await fleet.ask()
                seen.append((began, took))
            except ClusterError as error:
                failures.append(str(error))
            await asyncio.sleep(0.05)

    clients = [asyncio.create_task(client()) for _ in range(4)]
    await asyncio.sleep(5)
    killed_at = time.perf_counter()
    os.kill(fleet.served.pids(Role.CONTROLLER)[0], signal.SIGKILL)
    await fleet.replace("other")
    changes_again_s = time.perf_counter() - killed_at
    await asyncio.sleep(5)
    is_over.set()
    await asyncio.gather(*clients)
    return {
        "requests_failed": len(failures),
        "failures": failures[:3],
        "request_before_ms": quantiles([took for began, took in seen if began < killed_at]),
        "request_after_ms": quantiles([took for began, took in seen if began >= killed_at]),
        "first_change_answered_s": round(changes_again_s, 2),
    }


async def measure_replica_kill(fleet: Fleet, rounds: int) -> list[float]:
    """Seconds from a replica's death until a new one has the current table and serves."""
    times = []
    for _ in range(rounds):
        before = {replica.replica_id for replica in await fleet.backend.list_replicas()}
        killed_at = time.perf_counter()
        os.kill(random.choice(fleet.served.pids(Role.REPLICA)), signal.SIGKILL)
        is_whole = False
        while not is_whole:
            await asyncio.sleep(0.05)
            is_whole = await _serves_with_current_table(fleet, before)
        times.append(round(time.perf_counter() - killed_at, 2))
    return times


async def _serves_with_current_table(fleet: Fleet, before: set[str]) -> bool:
    """Whether one that is not among ``before`` has been asked.

    For the base model, which goes to any replica: an adapter goes to those that hold it already.
    """
    try:
        members = await fleet.backend.list_replicas()
        _, replica = await fleet.ask(adapter=None)
    except ClusterError:
        return False
    current = max((member.table_version for member in members), default=0)
    new = {m.replica_id for m in members if m.table_version == current} - before
    return replica in new


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    shown = {"p50": cuts[49], "p99": cuts[98], "max": max(seconds)}
    return {name: round(1e3 * value, 1) for name, value in shown.items()}


async def measure(fleet: Fleet, load_ms: float, rounds: int) -> dict[str, Any]:
    """Everything, one after the other."""
    return {
        "broadcast": await measure_broadcast(fleet, load_ms, rounds),
        "controller_kill": await measure_controller_kill(fleet),
        "replica_kill_s": await measure_replica_kill(fleet, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--load-ms", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, local_ray() as address:
        fleet = Fleet(address, Path(directory), arguments.replicas, arguments.load_ms)
        results = asyncio.run(measure(fleet, arguments.load_ms, arguments.rounds))
    document = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "replicas": arguments.replicas,
        **results,
    }
    text = json.dumps(document, indent=2) + "\n"
    print(text, end="")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
