"""The HTTP application: middleware, routers and nothing else.

Needs a ``Backend`` and settings; knows neither Ray nor where requests are served.
"""

from fastapi import APIRouter, Depends, FastAPI, Response

from deployments.admin_page.pages import admin_page_router
from deployments.backend import Backend
from deployments.openai.adapters import adapters_router, admin_router
from deployments.openai.aliases import aliases_router
from deployments.openai.api import Api
from deployments.openai.auth import user_guard
from deployments.openai.chat import chat_router
from deployments.openai.completions import completions_router
from deployments.openai.embeddings import embeddings_router
from deployments.openai.failures import install_failure_handlers
from deployments.openai.management import management_router
from deployments.openai.metrics import HttpMetrics, metrics_router
from deployments.openai.models import models_router
from deployments.openai.openapi import openapi_router
from deployments.openai.operations import operations_router
from deployments.openai.push import push_router
from deployments.openai.request_scope import RequestScope
from deployments.openai.responses.route import responses_router
from deployments.openai.settings import HttpSettings
from deployments.openai.tokenization import tokenization_router
from deployments.telemetry.http_telemetry import HttpTelemetry


def create_http_app(
    backend: Backend,
    settings: HttpSettings | None = None,
    *,
    sends_request_id: bool = True,
    metrics: HttpMetrics | None = None,
    telemetry: HttpTelemetry | None = None,
) -> FastAPI:
    """Build the OpenAI-compatible app in front of a backend.

    ``sends_request_id`` is off where a proxy in front adds ``x-request-id`` to responses.
    """
    settings = settings or HttpSettings()
    api, metrics = Api(backend, settings), metrics or HttpMetrics()
    app = FastAPI(title="lorafleet", openapi_url=None, redirect_slashes=False)
    app.add_middleware(
        RequestScope,
        metrics=metrics,
        telemetry=telemetry or HttpTelemetry(),
        sends_request_id=sends_request_id,
    )
    app.state.access = api.access
    install_failure_handlers(app, metrics.refused)
    metrics.keys_stale.set_function(lambda: api.access.keyring.is_stale)

    app.include_router(_health_router(api))
    app.include_router(metrics_router(api, metrics))
    # Before the adapters, whose names may hold slashes.
    app.include_router(operations_router(api))
    app.include_router(aliases_router(api))
    user_routers = (
        models_router(api),
        completions_router(api),
        chat_router(api),
        responses_router(api),
        embeddings_router(api),
        tokenization_router(api),
        adapters_router(api),
    )
    for router in user_routers:
        app.include_router(router, dependencies=[Depends(user_guard(api))])
    app.include_router(admin_router(api))
    app.include_router(management_router(api))
    app.include_router(push_router(api))
    app.include_router(admin_page_router(api))
    app.include_router(openapi_router(app, api.version))
    return app


def _health_router(api: Api) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await api.backend.healthy() else 503)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": api.version}

    return router
