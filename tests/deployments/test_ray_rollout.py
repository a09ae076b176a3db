"""New settings and other numbers of replicas, while clients go on: nobody notices."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from deployments.app import bind_app
from deployments.autoscaling import AutoscalingSettings
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig
from tests.deployments.fake_engine import make_fake_engine
from tests.serve.demo_server import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("sql", "pirate", "haiku")
PATIENCE_S = 90
# How often Serve hears of how much there is to do.
REPORTS = {
    f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5" for who in ("REPLICA", "HANDLE")
}


class Served:
    """An application behind Serve's proxy."""

    def __init__(self, root: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.root = root

    def config(self, **changes: Any) -> DeploymentConfig:
        settings = {
            "model": "fake-model",
            "adapters": AdapterSettings(
                directories=(str(self.root / "adapters"),), allow_runtime_updating=True
            ),
            "cluster": ClusterSettings(state_dir=str(self.root), poll_s=0.5),
        }
        return DeploymentConfig.model_validate(settings | changes)

    def deploy(self, **changes: Any) -> None:
        serve.run(bind_app(self.config(**changes), make_fake_engine), name="rollout")

    def write_adapter(self, name: str) -> str:
        path = self.root / "adapters" / name
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(name)
        return str(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    environment = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"} | REPORTS
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Served(tmp_path_factory.mktemp("rollout"), port)
    finally:
        serve.shutdown()
        ray.shutdown()


class Traffic:
    """Clients that ask for one adapter after the other, all the time."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._clients: list[asyncio.Task[None]] = []
        self.failures: list[str] = []
        self.served: Counter[str] = Counter()
        self.generations: dict[str, set[str]] = {name: set() for name in NAMES}

    async def use(self, num_clients: int) -> None:
        """Have so many clients from now on; those that leave finish their request first."""
        while len(self._clients) < num_clients:
            self._clients.append(asyncio.create_task(self._ask(len(self._clients))))
        leaving, self._clients = self._clients[num_clients:], self._clients[:num_clients]
        for client in leaving:
            client.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    async def _ask(self, turn: int) -> None:
        while True:
            turn += 1
            name = NAMES[turn % len(NAMES)]
            body = {"model": name, "prompt": "hi", "max_tokens": 20}
            # A client that leaves must not break off a request: that one would be a failure.
            await asyncio.shield(asyncio.create_task(self._send(name, body)))

    async def _send(self, name: str, body: dict[str, object]) -> None:
        try:
            answer = await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code != 200:
            self.failures.append(f"{answer.status_code}: {answer.text}")
            return
        self.served[answer.headers["x-lorafleet-replica"]] += 1
        self.generations[name].add(answer.headers["x-lorafleet-adapter-generation"])


@asynccontextmanager
async def traffic_to(url: str) -> AsyncIterator[Traffic]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        traffic = Traffic(http)
        try:
            yield traffic
        finally:
            await traffic.use(0)


async def replicas(url: str) -> set[str]:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        fleet = (await http.get("/v1/adapters")).json()["replicas"]
        return {replica["replica_id"] for replica in fleet}


async def until(url: str, is_right: Callable[[set[str]], bool]) -> set[str]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await replicas(url)
            if is_right(found):
                return found
            await asyncio.sleep(0.5)


async def test_upgrade_and_autoscaling_lose_no_request_and_no_adapter(served: Served) -> None:
    await asyncio.to_thread(served.deploy, num_replicas=2)
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        for name in NAMES:
            load = {"lora_name": name, "lora_path": served.write_adapter(name)}
            answer = await http.post("/v1/load_lora_adapter", json=load)
            assert answer.status_code == 200, answer.text
    async with traffic_to(served.url) as traffic:
        await traffic.use(4)
        first = await until(served.url, lambda found: len(found) == 2)

        # Other arguments: every replica and every ingress is replaced by a new one.
        changes = {"coalesce_ms": 5, "http": {"max_choices": 64}}
        await asyncio.to_thread(served.deploy, num_replicas=2, **changes)
        second = await until(served.url, lambda found: len(found) == 2 and not found & first)
        assert traffic.failures == []

        scaling = AutoscalingSettings(
            max_replicas=3,
            target_requests=2,
            upscale_delay_s=0.5,
            downscale_delay_s=2,
            look_back_s=11,
        )
        await traffic.use(1)
        await asyncio.to_thread(served.deploy, autoscaling=scaling, **changes)
        await until(served.url, lambda found: len(found) == 1 and not found & second)

        await traffic.use(12)
        three = await until(
            served.url, lambda found: len(found) == 3 and found <= traffic.served.keys()
        )

        await traffic.use(1)
        (last,) = await until(served.url, lambda found: len(found) == 1)
        assert last in three
    assert traffic.failures == []
    assert all(len(seen) == 1 for seen in traffic.generations.values()), traffic.generations
