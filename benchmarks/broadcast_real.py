"""How long a replace takes with the real engine, against one engine's own load of such an adapter.

    python -m benchmarks.broadcast_real --json benchmarks/results/broadcast_real.json

Preparing an adapter is work for a core, so replicas that share a machine share its cores too: the
document says how many there were, and what a replace would take if that were all. ``broadcast.py``
measures what the agreement itself adds, with loads that only wait.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from ray import serve
from safetensors.torch import load_file, save_file

from benchmarks.broadcast import LIMIT_EXTRA_MS, LIMIT_FACTOR, quantiles
from deployments.app import REPLICAS
from deployments.backend import LoadAdapter
from deployments.config import (
    AdapterSettings,
    ClusterSettings,
    DeploymentConfig,
    EngineSettings,
    HttpOptions,
)
from deployments.controller_actor import ControllerActor, Deployed
from deployments.llm_replica import make_async_engine
from deployments.ray_backend import RayBackend
from deployments.source_setup import build_sources
from engine.async_engine import AsyncEngine
from tests.consistency.served import local_ray, run_app

NAME = "policy"
_WARM_UP = 3


class Variants:
    """Copies of one adapter, each with other weights."""

    def __init__(self, adapter: Path, root: Path) -> None:
        self.root = root
        self._config = (adapter / "adapter_config.json").read_bytes()
        self._weights = load_file(adapter / "adapter_model.safetensors")
        self._index = 0

    def write(self) -> Path:
        """One more."""
        self._index += 1
        path = self.root / str(self._index)
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_bytes(self._config)
        first = next(iter(self._weights))
        changed = {**self._weights, first: self._weights[first] * (1 + self._index * 1e-3)}
        save_file(changed, path / "adapter_model.safetensors")
        return path


def make_config(root: Path, model: str, num_replicas: int) -> DeploymentConfig:
    """Small caches, so that many replicas fit on one machine."""
    return DeploymentConfig(
        model=model,
        model_id=f"broadcast-{num_replicas}",
        num_replicas=num_replicas,
        engine=EngineSettings(
            max_model_len=64, kv_cache_bytes=1 << 24, max_loras=4, max_cpu_loras=32, num_threads=1
        ),
        adapters=AdapterSettings(
            directories=(str(root),),
            allow_runtime_updating=True,
            store_dir=str(root / f"store-{num_replicas}"),
        ),
        cluster=ClusterSettings(state_dir=str(root / "state")),
        http=HttpOptions(num_replicas=1),
    )


async def measure_own_load(
    config: DeploymentConfig, variants: Variants, rounds: int
) -> list[float]:
    """One engine alone, in this process: seconds to bring each adapter to a store and load it."""
    engine = await make_async_engine(config, 1)
    assert isinstance(engine, AsyncEngine)
    sources = build_sources(config)
    times = []
    for _ in range(_WARM_UP + rounds):
        path = variants.write()
        began = time.perf_counter()
        request = await sources.open(NAME, str(path))
        await engine.load_lora(request)
        times.append(time.perf_counter() - began)
        await engine.remove_lora(request.digest or "")
    await engine.stop()
    return times[_WARM_UP:]


async def measure_replaces(
    config: DeploymentConfig, variants: Variants, rounds: int
) -> list[float]:
    """Replaces on all replicas, one after the other: seconds for each."""
    handle = serve.get_deployment_handle(REPLICAS, app_name=config.public_model_id)
    backend = RayBackend(handle, Deployed(config=config, deployed_at=1.0))
    times = []
    for _ in range(_WARM_UP + rounds):
        path = variants.write()
        began = time.perf_counter()
        await backend.load_adapter(LoadAdapter(name=NAME, source=str(path), load_inplace=True))
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.2)
    return times[_WARM_UP:]


def measure(
    address: str, config: DeploymentConfig, variants: Variants, own_ms: float, rounds: int
) -> dict[str, Any]:
    """One number of replicas."""
    served = run_app(address, config, make_async_engine, controller_class=ControllerActor)
    times = asyncio.run(measure_replaces(config, variants, rounds))
    serve.delete(served.app)
    limit_ms = LIMIT_FACTOR * own_ms + LIMIT_EXTRA_MS
    shared = max(1.0, config.num_replicas / len(os.sched_getaffinity(0)))
    return {
        "replicas": config.num_replicas,
        "limit_ms": round(limit_ms, 1),
        "within_limit": sum(1e3 * took <= limit_ms for took in times),
        "rounds": len(times),
        "replace_ms": quantiles(times),
        "own_load_times_replicas_per_core_ms": round(own_ms * shared, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", type=Path, default=Path("examples/adapters/haiku"))
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, local_ray() as address:
        root = Path(directory)
        variants = Variants(arguments.adapter, root / "variants")
        config = make_config(root, arguments.model, 1)
        own = asyncio.run(measure_own_load(config, variants, arguments.rounds))
        own_ms = 1e3 * statistics.median(own)
        results = [
            measure(
                address,
                make_config(root, arguments.model, count),
                variants,
                own_ms,
                arguments.rounds,
            )
            for count in arguments.replicas
        ]
    document = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "model": arguments.model,
        "own_load_ms": quantiles(own),
        "results": results,
    }
    text = json.dumps(document, indent=2) + "\n"
    print(text, end="")
    if arguments.json is not None:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
