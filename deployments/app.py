"""The one place that binds the application: ``build_app`` is what Serve imports."""

import time
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from deployments.config import DeploymentConfig, HttpOptions, load_config
from deployments.controller_actor import Deployed
from deployments.http_app import create_http_app
from deployments.llm_replica import LLMReplica, MakeEngine, make_async_engine
from deployments.metrics.ray_export import RayExporter
from deployments.openai.metrics import HttpMetrics
from deployments.ray_backend import RayBackend
from deployments.telemetry.http_telemetry import HttpTelemetry
from deployments.telemetry.logs import configure_logs
from deployments.telemetry.tracing import make_tracer

REPLICAS = "LLMServer"
INGRESS = "Ingress"

_HEALTH_CHECK_PERIOD_S = 5
_SHUTDOWN_SLACK_S = 5.0


def build_app(args: dict[str, Any]) -> Application:
    """Build the application from its YAML arguments and the environment."""
    return bind_app(load_config(args))


def bind_app(config: DeploymentConfig, make_engine: MakeEngine = make_async_engine) -> Application:
    """Bind the ingress to the replicas."""
    deployed = Deployed(config=config, deployed_at=time.time())

    def build() -> FastAPI:
        return build_http(deployed)

    # Serve calls plain functions inside the replica; any other callable is an application to it.
    ingress = serve.deployment(serve.ingress(build)()).options(
        name=INGRESS,
        num_replicas=config.http.num_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=config.http.max_ongoing_requests,
        max_queued_requests=config.http.max_queued_requests,
        # Longer than the replicas take, so that their answers still go through.
        graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s + _SHUTDOWN_SLACK_S,
    )
    return ingress.bind(bind_replicas(config, make_engine))


def bind_replicas(
    config: DeploymentConfig, make_engine: MakeEngine = make_async_engine
) -> Application:
    """Bind the replicas, routed by adapter."""
    replicas = serve.deployment(LLMReplica).options(
        name=REPLICAS,
        **replica_count(config),
        **replica_resources(config),
        max_ongoing_requests=config.max_ongoing_requests,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        max_queued_requests=config.max_queued_requests,
        graceful_shutdown_timeout_s=config.graceful_shutdown_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class="deployments.routing:AdapterRouter",
            request_router_kwargs={"spill_over": config.routing.spill_over},
            request_routing_stats_period_s=config.routing.stats_period_s,
        ),
    )
    return replicas.bind(replica_config(config), make_engine)


def replica_count(config: DeploymentConfig) -> dict[str, Any]:
    """A number of replicas, or when to change it, in Serve's words."""
    if config.autoscaling is None:
        return {"num_replicas": config.num_replicas}
    return {"autoscaling_config": config.autoscaling.build()}


def replica_resources(config: DeploymentConfig) -> dict[str, Any]:
    """What a replica reserves, in Serve's words.

    The ranks of a split model are processes of their replica, which sees all of their GPUs: so
    they are one bundle, which is always on one node.
    """
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}
    }
    if config.engine.tensor_parallel_size > 1 and config.num_gpus:
        bundle = {"CPU": config.num_cpus, "GPU": config.num_gpus}
        options["placement_group_bundles"] = [{k: v for k, v in bundle.items() if v}]
        options["placement_group_strategy"] = "STRICT_PACK"
    return options


def replica_config(config: DeploymentConfig) -> str:
    """What replicas are told: everything but the HTTP surface, which has keys."""
    # What was not said stays so: some settings exclude others.
    return config.model_copy(update={"http": HttpOptions()}).model_dump_json(exclude_unset=True)


def build_http(deployed: Deployed) -> FastAPI:
    """Build the HTTP application inside an ingress replica."""
    app_name = serve.get_replica_context().app_name
    replicas = serve.get_deployment_handle(REPLICAS, app_name=app_name)
    # Serve's proxy adds the request's id to every response.
    metrics = HttpMetrics()
    RayExporter(metrics.registry).start()
    telemetry = deployed.config.telemetry
    configure_logs(telemetry.logs, component="ingress")
    return create_http_app(
        RayBackend(replicas, deployed),
        deployed.config.http.build(),
        sends_request_id=False,
        metrics=metrics,
        telemetry=HttpTelemetry(make_tracer(telemetry, "ingress")),
    )
