"""A push reaches replicas on every node, though no directory is shared between them."""

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from adapters import AdapterVersion
from deployments.app import REPLICAS, bind_replicas
from deployments.backend import PushAdapter, ReplicaStatus
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig
from deployments.controller_actor import Deployed, find_or_create_controller
from deployments.errors import ClusterError
from deployments.generation import GenerateRequest, GenerationStart, PromptInput
from deployments.ray_backend import RayBackend
from engine.sampling_params import SamplingParams
from tests.consistency.served import worker_environment
from tests.consistency.versioned_engine import VersionedEngine
from tests.resolvers.s3_server import CREDENTIALS, Bucket, s3_server

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

APP = "push-nodes"
NAME = "policy"


async def make_engine(config: DeploymentConfig, num_threads: int) -> VersionedEngine:
    return VersionedEngine()


@dataclass(frozen=True, slots=True)
class Nodes:
    root: Path
    deployed: Deployed

    def backend(self) -> RayBackend:
        handle = serve.get_deployment_handle(REPLICAS, app_name=APP)
        return RayBackend(handle, self.deployed)

    def pushed(self, node: str) -> Path:
        return self.root / node / "state" / "pushed" / "adapters"


def add_node(cluster: Cluster, root: Path, name: str) -> None:
    cluster.add_node(num_cpus=1, env_vars={"LORAFLEET_HOME": str(root / name)})


@pytest.fixture(params=["disk", "s3"])
def nodes(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Nodes]:
    # This process receives pushes as an ingress does, with a directory of its own as well.
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path / "ingress"))
    environment, settings = worker_environment(), ClusterSettings(lease_s=4.0, poll_s=0.3)
    with ExitStack() as stack:
        if request.param == "s3":
            port = stack.enter_context(s3_server())
            Bucket(port, "state").create()
            environment |= CREDENTIALS
            place = {
                "state_dir": "s3://state/here",
                "state_endpoint_url": f"http://127.0.0.1:{port}",
            }
            settings = settings.model_copy(update=place)
        cluster = Cluster()
        stack.callback(cluster.shutdown)
        for name in ("head", "second", "third"):
            add_node(cluster, tmp_path, name)
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
        stack.callback(ray.shutdown)
        stack.callback(serve.shutdown)
        config = DeploymentConfig(
            model="fake",
            num_replicas=3,
            num_cpus=1,  # as much as a node has: one replica each
            adapters=AdapterSettings(allow_runtime_updating=True),
            cluster=settings,
        )
        serve.start(proxy_location="Disabled")
        serve.run(bind_replicas(config, make_engine), name=APP, route_prefix=None)
        yield Nodes(tmp_path, Deployed(config=config, deployed_at=1.0))


async def push(backend: RayBackend, content: str) -> AdapterVersion:
    with backend.receive_adapter() as directory:
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_text(content)
        return await backend.push_adapter(PushAdapter(name=NAME, directory=directory))


async def answers(backend: RayBackend, count: int) -> dict[str, str]:
    """What each of so many replicas says."""
    said: dict[str, str] = {}
    deadline = time.monotonic() + 60
    while len(said) < count:
        assert time.monotonic() < deadline, said
        for replica, text in await asyncio.gather(*(ask(backend) for _ in range(8))):
            said[replica] = text
        alive = {replica.replica_id for replica in await backend.list_replicas()}
        said = {replica: text for replica, text in said.items() if replica in alive}
    return said


async def ask(backend: RayBackend) -> tuple[str, str]:
    request = GenerateRequest(
        request_id=os.urandom(8).hex(),
        prompt=PromptInput(text="x"),
        params=SamplingParams(max_tokens=1),
        adapter=NAME,
    )
    replica, text = "", ""
    async for item in backend.generate(request):
        if isinstance(item, GenerationStart):
            replica = item.replica_id
        else:
            text += "".join(output.text for output in item)
    return replica, text.strip()


async def test_pushes_reach_every_node_and_outlive_the_controllers_disk(nodes: Nodes) -> None:
    backend = nodes.backend()
    for content in ("one", "two"):
        await push(backend, content)
        assert set((await answers(backend, 3)).values()) == {content}
    assert len({replica.node for replica in await backend.list_replicas()}) == 3
    # Only the controller's node keeps what was pushed; each node's store has a copy.
    assert len(list(nodes.pushed("head").iterdir())) == 2
    assert not nodes.pushed("second").exists()
    assert len(list((nodes.root / "third" / "adapter-store" / "adapters").iterdir())) == 2

    if nodes.deployed.config.cluster.journal_uri("fake") is not None:
        ray.kill(find_or_create_controller(nodes.deployed), no_restart=False)
        shutil.rmtree(nodes.pushed("head"))
    replaced = await replace_replica(nodes, backend)
    assert (await answers(backend, 3))[replaced] == "two"


async def replace_replica(nodes: Nodes, backend: RayBackend) -> str:
    """Have a replica of the third node start anew, with an empty store; returns its id."""
    before = {replica.replica_id: replica.node for replica in await members(backend, 3)}
    head = ray.get_runtime_context().get_node_id()
    victim, _ = next(found for found in before.items() if found[1] != head)
    for node in ("second", "third"):
        shutil.rmtree(nodes.root / node / "adapter-store" / "adapters")
        (nodes.root / node / "adapter-store" / "adapters").mkdir()
    name = f"SERVE_REPLICA::{APP}#{REPLICAS}#{victim}"
    ray.kill(ray.get_actor(name, namespace="serve"))
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        after = {replica.replica_id for replica in await members(backend, 3)}
        if victim not in after:
            return (after - before.keys()).pop()


async def members(backend: RayBackend, count: int) -> list[ReplicaStatus]:
    """All replicas, once so many have joined."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        with suppress(ClusterError):
            replicas = await backend.list_replicas()
            if len(replicas) == count:
                return replicas
        await asyncio.sleep(0.2)
