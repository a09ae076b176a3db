"""Loading, unloading and listing adapters, as vLLM's routes and as the cluster sees them."""

from dataclasses import asdict, replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse

from adapters import InvalidAdapterNameError, validate_adapter_name
from deployments.backend import (
    AdapterQuery,
    AdapterState,
    AdapterStatus,
    LoadAdapter,
    UnloadAdapter,
)
from deployments.errors import AdapterNotFoundError
from deployments.openai.admin_guards import admin_guards
from deployments.openai.api import Api
from deployments.openai.auth import caller_of, peer_of
from deployments.openai.body import read_body
from deployments.openai.failures import (
    INVALID_USER_INPUT,
    NOT_FOUND,
    OPERATION_HEADER,
    ApiError,
)
from deployments.openai.operations import operation_id
from deployments.openai.schema import LoadAdapterBody, UnloadAdapterBody
from deployments.openai.visit import Visit, visit_of

_MAX_LISTED = 10_000


class AdapterFilters(BaseModel):
    """Query parameters of the list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: str = ""
    state: AdapterState | None = None
    pinned: bool | None = None
    after: str = ""
    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] | None = None

    def query(self, *, extra: int) -> AdapterQuery:
        """The same for the backend, with a larger limit."""
        limit = None if self.limit is None else self.limit + extra
        return AdapterQuery(**self.model_dump(exclude={"limit"}), limit=limit)


def adapters_router(api: Api) -> APIRouter:
    """Read-only views of all adapters."""
    router = APIRouter()

    @router.get("/v1/adapters")
    async def list_adapters(request: Request) -> Response:
        filters = AdapterFilters.model_validate(dict(request.query_params))
        # One more than asked for tells whether there are more.
        found = await _allowed_adapters(api, filters, visit_of(request))
        page = found if filters.limit is None else found[: filters.limit]
        replicas = [asdict(status) for status in await api.backend.list_replicas()]
        document = {
            "object": "list",
            "data": list(map(adapter_document, page)),
            "has_more": len(page) < len(found),
            "replicas": replicas,
        }
        return _json(document)

    @router.get("/v1/adapters/{name:path}")
    async def get_adapter(request: Request, name: str) -> Response:
        visit_of(request).check(name)
        return _json(adapter_document(await find_adapter(api, name)))

    return router


async def _allowed_adapters(api: Api, filters: AdapterFilters, visit: Visit) -> list[AdapterStatus]:
    """One adapter more than the page has room for, if there are so many that the key is for."""
    query = filters.query(extra=1)
    if visit.is_unrestricted:
        return await api.backend.list_adapters(query)
    every = await api.backend.list_adapters(replace(query, limit=None))
    return [each for each in every if visit.may_use(each.version.name)][: query.limit]


def admin_router(api: Api) -> APIRouter:
    """Load and unload as vLLM has them."""
    router = APIRouter(dependencies=admin_guards(api))

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
        "kept": [
            {
                "generation": kept.generation,
                "digest": kept.digest,
                "source": kept.source_uri,
                "created_at": kept.created_at,
                "created_by": kept.created_by,
            }
            for kept in status.kept
        ],
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
