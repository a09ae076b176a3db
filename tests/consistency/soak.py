"""Runs the experiment for long: ``python -m tests.consistency.soak --minutes 20 --json OUT``.

``--history`` keeps what was recorded, ``--check`` judges such a recording again.
"""

import argparse
import asyncio
import json
import pickle
import sys
import tempfile
from pathlib import Path

from deployments.config import (
    AdapterSettings,
    ClusterSettings,
    DeploymentConfig,
    EngineSettings,
    HttpOptions,
)
from deployments.llm_replica import MakeEngine, make_async_engine
from tests.consistency.adapter_makers import (
    AdapterMaker,
    ForcingAdapters,
    NamedAdapters,
    save_forced_model,
)
from tests.consistency.experiment import Load, Report, final_changes_done, run_experiment
from tests.consistency.served import local_ray, run_app
from tests.consistency.slow_controllers import SlowController
from tests.consistency.versioned_engine import make_versioned_engine


def promise_config(root: Path, model: str, model_id: str) -> DeploymentConfig:
    """Three replicas behind two ingress processes, with a short lease."""
    return DeploymentConfig(
        model=model,
        model_id=model_id,
        num_replicas=3,
        engine=EngineSettings(
            max_model_len=64, kv_cache_bytes=1 << 24, max_loras=4, max_cpu_loras=32
        ),
        adapters=AdapterSettings(
            directories=(), allowed_roots=(str(root / "adapters"),), allow_runtime_updating=True
        ),
        cluster=ClusterSettings(state_dir=str(root), lease_s=3.0, poll_s=0.3),
        http=HttpOptions(num_replicas=2),
    )


def run(engine: str, minutes: float, load: Load, seed: int) -> Report:
    """Start a cluster, run the experiment on it, and stop it."""
    with tempfile.TemporaryDirectory() as directory, local_ray() as address:
        root = Path(directory)
        make_engine: MakeEngine = make_versioned_engine
        adapters: AdapterMaker = NamedAdapters(root / "adapters")
        model = "fake"
        if engine == "real":
            save_forced_model(root / "model")
            make_engine, model = make_async_engine, str(root / "model")
            adapters = ForcingAdapters(root / "adapters")
        config = promise_config(root, model, f"soak-{engine}")
        served = run_app(address, config, make_engine, controller_class=SlowController)
        return asyncio.run(run_experiment(served, adapters, load, seconds=minutes * 60, seed=seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("fake", "real"), default="fake")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--history", type=Path)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    load = Load(num_clients=arguments.clients)
    if arguments.check is not None:
        report: Report = pickle.loads(arguments.check.read_bytes())
    else:
        report = run(arguments.engine, arguments.minutes, load, arguments.seed)
    if arguments.history is not None:
        arguments.history.write_bytes(pickle.dumps(report))
    figures = {"engine": arguments.engine, "seed": arguments.seed, **report.figures()}
    text = json.dumps(figures, indent=2)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return 0 if not report.violations and final_changes_done(report, load) else 1


if __name__ == "__main__":
    sys.exit(main())
