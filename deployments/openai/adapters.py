"""Loading, unloading and listing adapters, as vLLM's routes and as the cluster sees them."""

from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import PlainTextResponse

from adapters import InvalidAdapterNameError, validate_adapter_name
from deployments.backend import AdapterStatus, LoadAdapter, UnloadAdapter
from deployments.errors import AdapterNotFoundError, RuntimeUpdatingDisabledError
from deployments.openai.api import Api
from deployments.openai.auth import admin_guard, caller_of, peer_of
from deployments.openai.body import read_body
from deployments.openai.failures import (
    INVALID_USER_INPUT,
    NOT_FOUND,
    OPERATION_HEADER,
    ApiError,
)
from deployments.openai.operations import operation_id
from deployments.openai.schema import LoadAdapterBody, UnloadAdapterBody


def adapters_router(api: Api) -> APIRouter:
    """Read-only views of all adapters."""
    router = APIRouter()

    @router.get("/v1/adapters")
    async def list_adapters() -> Response:
        adapters = [adapter_document(status) for status in await api.backend.list_adapters()]
        replicas = [asdict(status) for status in await api.backend.list_replicas()]
        return _json({"object": "list", "data": adapters, "replicas": replicas})

    @router.get("/v1/adapters/{name:path}")
    async def get_adapter(name: str) -> Response:
        return _json(adapter_document(await find_adapter(api, name)))

    return router


def admin_router(api: Api) -> APIRouter:
    """Load and unload. While run-time updating is off they answer 404, saying how to turn it on."""

    async def check_enabled() -> None:
        if not api.backend.allow_runtime_updating:
            raise ApiError(str(RuntimeUpdatingDisabledError()), status=404, type=NOT_FOUND)

    guards = [Depends(admin_guard(api.settings)), Depends(check_enabled)]
    router = APIRouter(dependencies=guards)

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        op_id = operation_id(request)
        body = await read_body(request, LoadAdapterBody, api.settings.max_body_bytes)
        if not body.lora_name or not body.lora_path:
            raise ApiError(
                "Both 'lora_name' and 'lora_path' must be provided.", type=INVALID_USER_INPUT
            )
        if body.lora_name != (await api.base_model()).id:
            validate_adapter_name(body.lora_name)
        load = LoadAdapter(
            name=body.lora_name,
            source=body.lora_path,
            load_inplace=body.load_inplace,
            pin=body.pin,
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        await api.backend.load_adapter(load)
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' added successfully.",
            headers={OPERATION_HEADER: op_id},
        )

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        op_id = operation_id(request)
        body = await read_body(request, UnloadAdapterBody, api.settings.max_body_bytes)
        name = body.lora_name
        if not name:
            raise ApiError("'lora_name' must be provided.", type=INVALID_USER_INPUT)
        unload = UnloadAdapter(
            name=name,
            force=body.force,
            timeout_s=body.timeout_s,
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        try:
            validate_adapter_name(name)
            await api.backend.unload_adapter(unload)
        except (InvalidAdapterNameError, AdapterNotFoundError):
            raise ApiError(
                f"The lora adapter '{name[:128]}' cannot be found.",
                status=404,
                type=NOT_FOUND,
                param="lora_name",
            ) from None
        return PlainTextResponse(
            f"Success: LoRA adapter '{name}' removed successfully.",
            headers={OPERATION_HEADER: op_id},
        )

    return router


async def find_adapter(api: Api, name: str) -> AdapterStatus:
    """Describe an adapter; AdapterNotFoundError also for what cannot be a name."""
    try:
        validate_adapter_name(name)
    except InvalidAdapterNameError:
        raise AdapterNotFoundError(name[:128], param="model") from None
    return await api.backend.get_adapter(name)


def adapter_document(status: AdapterStatus) -> dict[str, Any]:
    """One row of the cluster matrix."""
    version = status.version
    return {
        "object": "adapter",
        "name": version.name,
        "generation": version.generation,
        "digest": version.digest,
        "source": version.source_uri,
        "state": status.state,
        "pinned": version.pinned,
        "base_model": version.base_model,
        "rank": version.rank,
        "size_bytes": version.size_bytes,
        "created_at": version.created_at,
        "created_by": version.created_by,
        "replicas": [asdict(replica) for replica in status.replicas],
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
