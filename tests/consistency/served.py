"""A real application on a real Ray cluster, with its processes by their roles."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import ray
from ray import serve

from deployments.app import INGRESS, REPLICAS, bind_app
from deployments.config import DeploymentConfig
from deployments.controller_actor import ControllerActor, Deployed
from deployments.llm_replica import MakeEngine
from tests.consistency.slow_controllers import start_controller

ROOT = Path(__file__).resolve().parents[2]
_HOST = "127.0.0.1"


class Role(StrEnum):
    """Kinds of processes, all of which may die."""

    REPLICA = "replica"
    INGRESS = "ingress"
    CONTROLLER = "controller"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One application: where it answers, its settings, and its processes."""

    app: str
    url: str
    config: DeploymentConfig
    controller_class: type[ControllerActor]

    @property
    def journal(self) -> Path:
        """The controller's journal."""
        return self.config.cluster.journal_path(self.config.public_model_id)

    def pids(self, role: Role) -> list[int]:
        """The processes of a role that live now."""
        titles = {
            Role.REPLICA: f"ray::ServeReplica:{self.app}:{REPLICAS}",
            Role.INGRESS: f"ray::ServeReplica:{self.app}:{INGRESS}",
            Role.CONTROLLER: f"ray::{self.controller_class.__name__}",
            Role.PROXY: "ray::ProxyActor",
        }
        return sorted(_children_with_title(titles[role]))


def _children_with_title(title: str) -> Iterator[int]:
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
            is_alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue
        # A title says which method runs, too.
        if is_alive and command and command[0].partition(".")[0].strip() == title:
            yield process.pid


@contextmanager
def local_ray(num_cpus: int = 8) -> Iterator[str]:
    """Run Ray and Serve's proxy on this machine; yields the proxy's address."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": worker_environment()},
    )
    try:
        serve.start(http_options={"host": _HOST, "port": port})
        yield f"http://{_HOST}:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def worker_environment() -> dict[str, str]:
    """What Ray's workers need to find the tests, and to leave room for each other."""
    return {
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def run_app(
    address: str,
    config: DeploymentConfig,
    make_engine: MakeEngine,
    *,
    controller_class: type[ControllerActor],
) -> Served:
    """Deploy an application under its model's name and wait until it serves."""
    name = config.public_model_id
    start_controller(Deployed(config=config), controller_class)
    serve.run(bind_app(config, make_engine), name=name, route_prefix=f"/{name}")
    return Served(
        app=name,
        url=f"{address}/{name}",
        config=config,
        controller_class=controller_class,
    )
