"""Operations on adapters: their ids, and what became of them.

An operation's id is the caller's ``Idempotency-Key``, else a new one. Every answer names it in a
header, so that a caller whose time ran out can ask about it or repeat the call.
"""

import uuid
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from deployments.errors import OperationNotFoundError
from deployments.openai.api import Api
from deployments.openai.auth import admin_guard
from deployments.openai.failures import ApiError
from deployments.operations import (
    OperationPhase,
    OperationQuery,
    OperationStatus,
    is_operation_id,
)

_MAX_LISTED = 500


class OperationFilters(BaseModel):
    """Query parameters of the list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    phase: OperationPhase | None = None
    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] = 50


def operations_router(api: Api) -> APIRouter:
    """Views of operations, for whoever may start them."""
    router = APIRouter(dependencies=[Depends(admin_guard(api))])

    @router.get("/v1/adapters/operations")
    async def list_operations(request: Request) -> Response:
        filters = OperationFilters.model_validate(dict(request.query_params))
        query = OperationQuery(name=filters.name, phase=filters.phase or "", limit=filters.limit)
        found = [operation_document(each) for each in await api.backend.list_operations(query)]
        return _json({"object": "list", "data": found})

    @router.get("/v1/adapters/operations/{op_id:path}")
    async def get_operation(op_id: str) -> Response:
        if not is_operation_id(op_id):
            raise OperationNotFoundError(op_id[:128])
        return _json(operation_document(await api.backend.get_operation(op_id)))

    return router


def operation_id(request: Request) -> str:
    """The id of the operation that this request starts or repeats."""
    given = request.headers.get("idempotency-key")
    if given is not None and not is_operation_id(given):
        raise ApiError(
            "An Idempotency-Key has 1 to 128 letters, digits, '.', '_', ':' or '-', and starts "
            "with a letter or digit.",
            param="idempotency-key",
        )
    request.state.operation_id = given or uuid.uuid4().hex
    return str(request.state.operation_id)


def operation_document(status: OperationStatus) -> dict[str, Any]:
    """One operation as operators see it."""
    operation = status.operation
    return {
        "object": "adapter.operation",
        "id": operation.op_id,
        "kind": operation.kind,
        "name": operation.name,
        "phase": operation.phase,
        "generation": operation.generation or None,
        "digest": operation.digest or None,
        "source": operation.source_uri or None,
        "reason": operation.detail or None,
        "requested_by": operation.requested_by,
        "requested_from": operation.requested_from,
        "started_at": operation.started_at,
        "ended_at": operation.ended_at,
        "replicas": [asdict(replica) for replica in status.replicas],
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
