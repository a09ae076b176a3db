"""Managing adapters by name, beside vLLM's routes: load, unload, pin, roll back.

Every answer is JSON and tells the generation that is in service now.
"""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from adapters import AdapterVersion, validate_adapter_name
from deployments.backend import LoadAdapter, PinAdapter, RollBackAdapter, UnloadAdapter
from deployments.openai.admin_guards import admin_guards
from deployments.openai.api import Api
from deployments.openai.auth import caller_of, peer_of
from deployments.openai.body import Body, read_body
from deployments.openai.failures import OPERATION_HEADER
from deployments.openai.operations import operation_id


class LoadBody(Body):
    """POST /v1/adapters. Without ``source`` the resolvers are asked for the name."""

    name: str
    source: str | None = None
    replace: bool = False
    pin: bool = False


class RollBackBody(Body):
    """POST /v1/adapters/{name}/rollback."""

    generation: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None


class UnloadOptions(BaseModel):
    """Query parameters of DELETE /v1/adapters/{name}."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    force: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = None


def management_router(api: Api) -> APIRouter:
    """The routes that change one adapter."""
    router = APIRouter(dependencies=admin_guards(api))

    @router.post("/v1/adapters")
    async def load(request: Request) -> Response:
        op_id = operation_id(request)
        body = await read_body(request, LoadBody, api.settings.max_body_bytes)
        load = LoadAdapter(
            name=validate_adapter_name(body.name),
            source=body.source,
            load_inplace=body.replace,
            pin=body.pin,
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        return version_answer(await api.backend.load_adapter(load), op_id)

    @router.delete("/v1/adapters/{name:path}")
    async def unload(request: Request, name: str) -> Response:
        op_id = operation_id(request)
        options = UnloadOptions.model_validate(dict(request.query_params))
        unload = UnloadAdapter(
            name=validate_adapter_name(name),
            force=options.force,
            timeout_s=options.timeout_s,
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        return version_answer(await api.backend.unload_adapter(unload), op_id)

    @router.post("/v1/adapters/{name:path}/rollback")
    async def roll_back(request: Request, name: str) -> Response:
        op_id = operation_id(request)
        body = await _read_optional_body(request, RollBackBody, api.settings.max_body_bytes)
        rollback = RollBackAdapter(
            name=validate_adapter_name(name),
            generation=body.generation,
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        return version_answer(await api.backend.roll_back_adapter(rollback), op_id)

    @router.post("/v1/adapters/{name:path}/pin")
    async def pin(request: Request, name: str) -> Response:
        return await set_pin(request, name, pinned=True)

    @router.post("/v1/adapters/{name:path}/unpin")
    async def unpin(request: Request, name: str) -> Response:
        return await set_pin(request, name, pinned=False)

    async def set_pin(request: Request, name: str, *, pinned: bool) -> Response:
        op_id = operation_id(request)
        pin = PinAdapter(
            name=validate_adapter_name(name),
            pinned=pinned,
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        return version_answer(await api.backend.pin_adapter(pin), op_id)

    return router


def version_answer(version: AdapterVersion, op_id: str) -> Response:
    """What an operation put in service, or took out of it."""
    document: dict[str, Any] = {
        "object": "adapter.version",
        "name": version.name,
        "generation": version.generation,
        "digest": version.digest,
        "source": version.source_uri,
        "pinned": version.pinned,
        "rank": version.rank,
        "size_bytes": version.size_bytes,
        "operation": op_id,
    }
    return Response(
        orjson.dumps(document),
        headers={OPERATION_HEADER: op_id},
        media_type="application/json",
    )


async def _read_optional_body(
    request: Request, model: type[RollBackBody], max_bytes: int
) -> RollBackBody:
    is_sent = "transfer-encoding" in request.headers
    if not is_sent and request.headers.get("content-length", "0") == "0":
        return model()
    return await read_body(request, model, max_bytes)
