"""The Serve deployment around ``LLMServer``: one process with an engine that joins the cluster."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import ray
from ray import serve

from deployments.backend import BaseModelInfo
from deployments.clock import SystemClock
from deployments.cluster_protocol import MemberId, Register
from deployments.config import DeploymentConfig
from deployments.controller_actor import Deployed, connect_controller
from deployments.engine_port import GeneratingEngine
from deployments.errors import ClusterError
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    TokenizeRequest,
    TokenizeResult,
)
from deployments.llm_server import LLMServer
from deployments.metrics.engine_collector import EngineCollector
from deployments.metrics.ray_export import RayExporter
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.paths import find_model, find_prepared
from deployments.replica_link import ReplicaLink
from deployments.source_setup import build_sources
from deployments.telemetry.logs import configure_logs
from deployments.telemetry.request_origin import enter_origin
from deployments.telemetry.request_telemetry import RequestTelemetry
from deployments.telemetry.tracing import make_tracer
from engine.errors import EngineError

MakeEngine = Callable[[DeploymentConfig, int], Awaitable[GeneratingEngine]]


async def make_async_engine(config: DeploymentConfig, num_threads: int) -> GeneratingEngine:
    """Load the base model into an engine."""
    # Here, because whoever only binds or routes deployments needs no torch.
    from engine.async_engine import AsyncEngine

    model = await asyncio.to_thread(find_model, config.model)
    engine = AsyncEngine(
        config.engine.build(model, num_threads=num_threads),
        stream_interval_s=config.coalesce_ms / 1000,
    )
    await engine.start()
    return engine


class LLMReplica:
    """One replica. It takes requests once it has adopted what the cluster serves."""

    # Serve awaits the constructor, so that the replica is not ready before it has joined.
    # The settings come as text, which is the same for the same settings: Serve restarts replicas
    # whose arguments changed.
    async def __init__(  # type: ignore[misc]
        self, config_json: str, make_engine: MakeEngine = make_async_engine
    ) -> None:
        config = DeploymentConfig.model_validate_json(config_json)
        context = serve.get_replica_context()
        replica_id = context.replica_id.unique_id
        self._engine = await make_engine(config, num_threads(config, context.world_size or 1))
        base_model = describe_base_model(config, self._engine)
        metrics = ReplicaMetrics(base_model.id, replica_id, base_model.max_model_len)
        self._server = LLMServer(
            replica_id,
            self._engine,
            base_model,
            metrics=metrics,
            profile=config.profile,
            telemetry=make_telemetry(config, replica_id),
        )
        metrics.registry.register(
            EngineCollector(self._engine, base_model.id, replica_id, self._server.in_flight)
        )
        runtime = ray.get_runtime_context()
        controller = connect_controller(Deployed(config=config))
        self._link = ReplicaLink(
            Register(
                member=MemberId(replica_id, uuid.uuid4().hex),
                node=runtime.get_node_id(),
                actor_name=runtime.get_actor_name(),
            ),
            controller,
            self._engine,
            build_sources(config, metrics.observe_resolver, read_pushed=controller.share_push),
            clock=SystemClock(),
            abort_running=self._server.abort_running,
            metrics=metrics,
        )
        RayExporter(metrics.registry).start()
        self._server.attach(self._link)
        await self._link.join()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem | Exception]:
        """Stream one request. What goes wrong is the last item, since Serve logs what is raised."""
        # Serve runs each call in a context of its own.
        enter_origin(request.origin)
        try:
            async with aclosing(cast("Any", self._server.generate(request))) as items:
                async for item in items:
                    yield item
        except (ClusterError, EngineError) as error:
            yield error

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult | Exception:
        """Turn a prompt into token ids; returns what goes wrong."""
        try:
            return await self._server.tokenize(request)
        except (ClusterError, EngineError) as error:
            return error

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text."""
        return await self._server.detokenize(token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's own bytes."""
        return await self._server.token_bytes(token_ids)

    async def base_model(self) -> BaseModelInfo:
        """Describe the base model."""
        return self._server.base_model

    def check_health(self) -> None:
        """Called by Serve, which replaces the replica if this raises."""
        self._server.check_health()

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve for ``AdapterRouter``."""
        return {"adapters": self._server.resident_names(), "load": sum(self._server.load())}

    async def __del__(self) -> None:
        """Called by Serve once the replica's last request has ended."""
        await self._link.leave()
        await self._engine.stop()


def make_telemetry(config: DeploymentConfig, replica_id: str) -> RequestTelemetry | None:
    """What tells of single requests, None if nothing is to be told."""
    settings = config.telemetry
    configure_logs(settings.logs, component="replica")
    tracer = make_tracer(settings, replica_id)
    if tracer is None and settings.logs is None:
        return None
    return RequestTelemetry(replica_id, config.public_model_id, tracer)


def num_threads(config: DeploymentConfig, num_replicas: int) -> int:
    """A replica's share of the machine, if all replicas are on one."""
    if config.num_cpus >= 1:
        return int(config.num_cpus)
    return max(1, len(os.sched_getaffinity(0)) // num_replicas)


def describe_base_model(config: DeploymentConfig, engine: GeneratingEngine) -> BaseModelInfo:
    """What clients may know of the base model. It was created when this machine got its files."""
    path = find_prepared(config.model)
    created = 0 if path is None else int(path.stat().st_mtime)
    return BaseModelInfo(
        id=config.public_model_id,
        root=config.model,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        created=created,
    )
