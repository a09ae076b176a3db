"""The controller as a Ray actor, and how a deployment reaches it.

The actor is named and detached: it outlives the application, and Ray restarts it when it dies. It
runs on the head node, where its journal is.
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.backend import (
    AdapterQuery,
    AdapterStatus,
    ClusterMetrics,
    DeleteAlias,
    LoadAdapter,
    PinAdapter,
    ReplicaStatus,
    RollBackAdapter,
    SetAlias,
    UnloadAdapter,
)
from deployments.clock import SystemClock
from deployments.cluster_protocol import (
    MemberId,
    PrepareReport,
    Register,
    RegisterAnswer,
    Resolved,
    Watch,
    WatchAnswer,
)
from deployments.config import DeploymentConfig
from deployments.controller import Controller
from deployments.controller_client import ControllerClient
from deployments.controller_settings import ControllerSettings
from deployments.journal_setup import open_journal, open_pushes
from deployments.metrics.controller_metrics import ControllerMetrics
from deployments.metrics.ray_export import RayExporter
from deployments.operations import OperationQuery, OperationStatus
from deployments.push_fetcher import PushedFile
from deployments.push_store import PushStore
from deployments.push_transfer import PushSharing
from deployments.source_setup import build_sources
from deployments.state_store import StateStore
from deployments.telemetry.logs import configure_logs

logger = logging.getLogger(__name__)

NAMESPACE = "lorafleet"
_SERVE_NAMESPACE = "serve"
# Each replica and each waiting operation occupies a place, at no other cost.
_MAX_CONCURRENCY = 10_000
# Ray gives this resource to the head node only.
_HEAD_NODE = {"node:__internal_head__": 0.001}
_PROBE_TIMEOUT_S = 1.0
_DEPLOYED = "deployed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A configuration and when it was deployed: for the controller, the latest one counts.

    Replicas leave the time out: they do not bring settings, the ingress does.
    """

    config: DeploymentConfig
    deployed_at: float = 0.0

    def controller_settings(self) -> ControllerSettings:
        """The controller's own record."""
        return self.config.controller_settings(deployed_at=self.deployed_at)

    def to_json(self) -> str:
        """For the journal, without what concerns the ingress alone (keys among it)."""
        # What was not said stays so: some settings exclude others.
        config = self.config.model_dump(mode="json", exclude={"http"}, exclude_unset=True)
        return json.dumps({"config": config, "deployed_at": self.deployed_at})

    @classmethod
    def from_json(cls, text: str) -> "Deployed":
        """The inverse of ``to_json``."""
        values = json.loads(text)
        config = DeploymentConfig.model_validate(values["config"])
        return cls(config=config, deployed_at=values["deployed_at"])


class ControllerActor:
    """Hosts one ``Controller``; opens its journal when first called.

    (An error while an actor is made would end it for good; here it fails the call, and the next
    call tries again.)
    """

    def __init__(self, deployed: Deployed) -> None:
        configure_logs(deployed.config.telemetry.logs, component="controller")
        self._deployed = deployed
        self._store: StateStore | None = None
        self._opened: Controller | None = None
        self._pushes: PushStore | None = None
        self._sharing: PushSharing | None = None
        self._opening = asyncio.Lock()
        self._metrics = ControllerMetrics()
        RayExporter(self._metrics.registry).start()

    async def configure(self, deployed: Deployed) -> None:
        """Take over the settings of a newer deployment."""
        controller = await self._controller()
        async with self._opening:
            if deployed.deployed_at <= self._deployed.deployed_at:
                return
            assert self._store is not None
            await self._store.write_setting(_DEPLOYED, deployed.to_json())
            self._deployed = deployed
            configure_logs(deployed.config.telemetry.logs, component="controller")
            sources = build_sources(deployed.config, self._metrics.observe_resolver)
            controller.configure(deployed.controller_settings(), sources)

    async def process_id(self) -> int:
        """The actor's process, for operators."""
        return os.getpid()

    async def register(self, request: Register) -> RegisterAnswer:
        return await (await self._controller()).register(request)

    async def watch(self, request: Watch) -> WatchAnswer:
        return await (await self._controller()).watch(request)

    async def report(self, member: MemberId, op_id: str, report: PrepareReport) -> None:
        await (await self._controller()).report(member, op_id, report)

    async def resolve(self, name: str, member: MemberId) -> Resolved:
        return await (await self._controller()).resolve(name, member)

    async def has_upload(self, upload: str) -> bool:
        await self._controller()
        assert self._pushes is not None
        return await asyncio.to_thread(self._pushes.has_upload, upload)

    async def write_part(self, upload: str, name: str, offset: int, data: bytes) -> None:
        await self._controller()
        assert self._pushes is not None
        await asyncio.to_thread(self._pushes.write_part, upload, name, offset, data)

    async def share_push(self, digest: str) -> Sequence[PushedFile]:
        await self._controller()
        assert self._sharing is not None
        return await self._sharing.share(digest)

    async def leave(self, member: MemberId) -> None:
        await (await self._controller()).leave(member)

    async def load(self, load: LoadAdapter, op_id: str) -> AdapterVersion:
        return await (await self._controller()).load(load, op_id)

    async def unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        return await (await self._controller()).unload(unload, op_id)

    async def pin(self, pin: PinAdapter, op_id: str) -> AdapterVersion:
        return await (await self._controller()).pin(pin, op_id)

    async def roll_back(self, rollback: RollBackAdapter, op_id: str) -> AdapterVersion:
        return await (await self._controller()).roll_back(rollback, op_id)

    async def set_alias(self, asked: SetAlias, op_id: str) -> AdapterAlias:
        return await (await self._controller()).set_alias(asked, op_id)

    async def delete_alias(self, asked: DeleteAlias, op_id: str) -> AdapterAlias:
        return await (await self._controller()).delete_alias(asked, op_id)

    async def list_aliases(self) -> list[AdapterAlias]:
        return await (await self._controller()).list_aliases()

    async def list_adapters(self, query: AdapterQuery) -> list[AdapterStatus]:
        return await (await self._controller()).list_adapters(query)

    async def get_adapter(self, name: str) -> AdapterStatus:
        return await (await self._controller()).get_adapter(name)

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        return await (await self._controller()).list_operations(query)

    async def get_operation(self, op_id: str) -> OperationStatus:
        return await (await self._controller()).get_operation(op_id)

    async def list_replicas(self) -> list[ReplicaStatus]:
        return await (await self._controller()).list_replicas()

    async def metrics(self) -> ClusterMetrics:
        return await (await self._controller()).collect_metrics()

    async def _controller(self) -> Controller:
        if self._opened is None:
            async with self._opening:
                if self._opened is None:
                    self._opened = await self._open()
        assert self._store is not None
        self._store.check_held()
        return self._opened

    async def _open(self) -> Controller:
        config = self._deployed.config
        if self._store is None:
            self._store = await open_journal(config.cluster, config.public_model_id)
        self._pushes = await open_pushes(config.cluster, config.public_model_id)
        self._sharing = PushSharing(self._pushes)
        # Ray restarts an actor with the arguments that it was first made with.
        stored = self._store.journal.read_setting(_DEPLOYED)
        if stored is not None:
            latest = Deployed.from_json(stored)
            if latest.deployed_at > self._deployed.deployed_at:
                self._deployed = latest
        return Controller(
            self._deployed.controller_settings(),
            self._store,
            build_sources(self._deployed.config, self._metrics.observe_resolver),
            pushes=self._pushes,
            liveness=RayLiveness(),
            clock=SystemClock(),
            metrics=self._metrics,
        )


class RayLiveness:
    """Asks Ray which replicas' processes are gone."""

    async def find_dead(self, actors: Mapping[str, str]) -> set[str]:
        """Return the actors that certainly are; one that does not answer may still live.

        Of a node that it cannot reach, Ray says that all of its actors died. They may live on and
        serve whoever reaches them, so their leases have to end.
        """
        verdicts = await asyncio.gather(*map(self._is_dead, actors))
        dead = {name for name, is_dead in zip(actors, verdicts, strict=True) if is_dead}
        if not dead:
            return dead
        nodes = await asyncio.to_thread(ray.nodes)
        reached = {node["NodeID"] for node in nodes if node["Alive"]}
        return {name for name in dead if actors[name] in reached}

    async def _is_dead(self, actor_name: str) -> bool:
        try:
            actor = await asyncio.to_thread(ray.get_actor, actor_name, _SERVE_NAMESPACE)
        except ValueError:
            return True  # Ray forgets a name only with its actor.
        try:
            await asyncio.wait_for(actor.__ray_ready__.remote(), _PROBE_TIMEOUT_S)
        except ActorDiedError:
            return True
        except (RayActorError, TimeoutError):
            return False
        return False


def connect_controller(deployed: Deployed) -> ControllerClient:
    """A client that starts the controller if need be, and brings it the newest settings."""

    async def connect() -> ActorHandle:
        actor = await asyncio.to_thread(find_or_create_controller, deployed)
        await actor.configure.remote(deployed)
        return actor

    cluster = deployed.config.cluster
    # A watch answered after this time could not extend the lease any more.
    return ControllerClient(connect, watch_timeout_s=cluster.poll_s + cluster.lease_s)


def controller_name(model_id: str) -> str:
    """The actor's name: one controller for each base model."""
    return f"controller:{model_id}"


def find_or_create_controller(deployed: Deployed) -> ActorHandle:
    """Return the running controller, or start it."""
    return (
        ray.remote(ControllerActor)
        .options(
            name=controller_name(deployed.config.public_model_id),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_MAX_CONCURRENCY,
            num_cpus=0,
            resources=_HEAD_NODE,
        )
        .remote(deployed)
    )
