"""The promise on several nodes, one of which dies in the middle of a replace."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from adapters import AdapterVersion
from deployments.app import REPLICAS, bind_replicas
from deployments.backend import LoadAdapter
from deployments.config import AdapterSettings, ClusterSettings, DeploymentConfig
from deployments.controller_actor import Deployed
from deployments.errors import ClusterError
from deployments.generation import GenerateRequest, GenerationStart, PromptInput
from deployments.ray_backend import RayBackend
from engine.sampling_params import SamplingParams
from tests.consistency.adapter_makers import NamedAdapters, content_of
from tests.consistency.checker import check
from tests.consistency.history import Answer, Change, History, Kind
from tests.consistency.served import worker_environment
from tests.consistency.versioned_engine import VersionedEngine

pytestmark = pytest.mark.ray

APP = "nodes"
NAME = "policy"
LOAD_S = 1.5


async def make_engine(config: DeploymentConfig, num_threads: int) -> VersionedEngine:
    return VersionedEngine(token_delay_s=0.02, load_delay_s=LOAD_S)


@dataclass(frozen=True, slots=True)
class Nodes:
    cluster: Cluster
    last: object
    config: DeploymentConfig
    adapters: NamedAdapters

    def backend(self) -> RayBackend:
        handle = serve.get_deployment_handle(REPLICAS, app_name=APP)
        return RayBackend(handle, Deployed(config=self.config, deployed_at=1.0))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    last = cluster.add_node(num_cpus=1)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": worker_environment()},
    )
    try:
        config = DeploymentConfig(
            model="fake",
            num_replicas=3,
            num_cpus=1,  # as much as a node has: one replica each
            adapters=AdapterSettings(
                directories=(str(tmp_path / "adapters"),), allow_runtime_updating=True
            ),
            cluster=ClusterSettings(state_dir=str(tmp_path), lease_s=3.0, poll_s=0.3),
        )
        serve.start(proxy_location="Disabled")
        serve.run(bind_replicas(config, make_engine), name=APP, route_prefix=None)
        yield Nodes(cluster, last, config, NamedAdapters(tmp_path / "adapters"))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


class Observer:
    """Loads and generates, and writes down what it saw."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._backend = nodes.backend()
        self.history = History()
        self.replicas: dict[str, str] = {}
        self.is_over = asyncio.Event()

    async def replace(self, index: int) -> AdapterVersion:
        path = self._nodes.adapters.write(index)
        started = time.monotonic()
        version = await self._backend.load_adapter(
            LoadAdapter(name=NAME, source=str(path), load_inplace=True, pin=True)
        )
        self.history.changes.append(
            Change(
                name=NAME,
                kind=Kind.REPLACE,
                content=content_of(index),
                started=started,
                ended=time.monotonic(),
            )
        )
        return version

    async def watch(self) -> None:
        while not self.is_over.is_set():
            try:
                await self._generate()
            except ClusterError:
                await asyncio.sleep(0.1)

    async def _generate(self) -> None:
        request = GenerateRequest(
            request_id=uuid4().hex,
            prompt=PromptInput(text="x"),
            params=SamplingParams(max_tokens=4),
            adapter=NAME,
        )
        started, answered, text, generation = time.monotonic(), 0.0, "", None
        async for item in self._backend.generate(request):
            if isinstance(item, GenerationStart):
                answered, generation, replica = time.monotonic(), item.generation, item.replica_id
            else:
                text += "".join(output.text for output in item)
        contents = self._nodes.adapters.contents(text)
        self.replicas[replica] = contents[-1]
        self.history.answers.append(
            Answer(
                name=NAME,
                started=started,
                answered=answered,
                contents=contents,
                generation=generation,
            )
        )

    async def until_all_serve(self, content: str, count: int) -> set[str]:
        """Wait until so many replicas hold leases and each has shown this content."""
        deadline = time.monotonic() + 30
        while True:
            alive = {replica.replica_id for replica in await self._backend.list_replicas()}
            shown = {replica for replica in alive if self.replicas.get(replica) == content}
            if len(alive) == len(shown) == count:
                return alive
            assert time.monotonic() < deadline, (alive, self.replicas)
            await asyncio.sleep(0.1)


async def test_a_node_that_dies_during_a_replace_changes_nothing_for_the_others(
    nodes: Nodes,
) -> None:
    observer = Observer(nodes)
    await observer.replace(0)
    watchers = [asyncio.create_task(observer.watch()) for _ in range(4)]
    before = await observer.until_all_serve(content_of(0), 3)
    assert len({node["NodeID"] for node in ray.nodes() if node["Alive"]}) == 3

    replace = asyncio.create_task(observer.replace(1))
    await asyncio.sleep(LOAD_S / 2)
    await asyncio.to_thread(nodes.cluster.remove_node, nodes.last, allow_graceful=False)
    assert not replace.done()
    await replace
    survivors = await observer.until_all_serve(content_of(1), 2)
    assert survivors < before

    # A new node brings a replica that knows what it was not there for.
    # On this thread: Ray installs a signal handler for the node.
    nodes.cluster.add_node(num_cpus=1)
    grown = await observer.until_all_serve(content_of(1), 3)
    assert len(grown - before) == 1
    observer.is_over.set()
    await asyncio.gather(*watchers)
    assert check(observer.history) == []
