"""Aliases over HTTP: names that stand for adapters, perhaps several in shares of the requests."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from adapters import validate_adapter_name
from deployments.aliases import MAX_TARGETS, AdapterAlias, AliasTarget, check_targets
from deployments.backend import DeleteAlias, SetAlias
from deployments.errors import AdapterNotFoundError, AliasNotFoundError
from deployments.openai.admin_guards import admin_guards
from deployments.openai.api import Api
from deployments.openai.auth import caller_of, peer_of, user_guard
from deployments.openai.body import Body, read_body
from deployments.openai.failures import OPERATION_HEADER, ApiError
from deployments.openai.model_name import parse_model
from deployments.openai.operations import operation_id
from deployments.openai.visit import visit_of

_ROUTE = "/v1/adapters/aliases"

Weights = Annotated[dict[str, float], Field(min_length=1, max_length=MAX_TARGETS)]


class AliasBody(Body):
    """PUT /v1/adapters/aliases/{alias}: one target, or several with weights."""

    target: str | None = None
    weights: Weights | None = None


def aliases_router(api: Api) -> APIRouter:
    """Views for everybody, changes for administrators."""
    router = APIRouter()
    guards = admin_guards(api)
    views = [Depends(user_guard(api))]

    @router.get(_ROUTE, dependencies=views)
    async def list_aliases(request: Request) -> Response:
        may_use = visit_of(request).may_use
        found = [
            alias_document(alias)
            for alias in await api.backend.list_aliases()
            if may_use(alias.name)
        ]
        return _json({"object": "list", "data": found})

    @router.get(_ROUTE + "/{name:path}", dependencies=views)
    async def get_alias(request: Request, name: str) -> Response:
        visit_of(request).check(name)
        for alias in await api.backend.list_aliases():
            if alias.name == name:
                return _json(alias_document(alias))
        raise AliasNotFoundError(name[:128])

    @router.put(_ROUTE + "/{name:path}", dependencies=guards)
    async def set_alias(request: Request, name: str) -> Response:
        op_id = operation_id(request)
        body = await read_body(request, AliasBody, api.settings.max_body_bytes)
        asked = SetAlias(
            name=validate_adapter_name(name),
            targets=_targets(body, (await api.base_model()).id),
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        return _answer(await api.backend.set_alias(asked), op_id)

    @router.delete(_ROUTE + "/{name:path}", dependencies=guards)
    async def delete_alias(request: Request, name: str) -> Response:
        op_id = operation_id(request)
        asked = DeleteAlias(
            name=validate_adapter_name(name),
            requested_by=caller_of(request),
            requested_from=peer_of(request),
            op_id=op_id,
        )
        return _answer(await api.backend.delete_alias(asked), op_id)

    return router


def alias_document(alias: AdapterAlias) -> dict[str, Any]:
    """One alias as users see it."""
    return {
        "object": "adapter.alias",
        "alias": alias.name,
        "targets": [
            {"adapter": target.adapter, "weight": target.weight} for target in alias.targets
        ],
        "generation": alias.generation,
        "created_at": alias.created_at,
        "created_by": alias.created_by,
    }


def _targets(body: AliasBody, base_id: str) -> tuple[AliasTarget, ...]:
    if (body.target is None) == (body.weights is None):
        raise ApiError("Exactly one of 'target' and 'weights' is needed.", param="target")
    weights = {body.target: 1.0} if body.target is not None else body.weights or {}
    targets = tuple(AliasTarget(_adapter(name, base_id), weights[name]) for name in weights)
    try:
        check_targets(targets)
    except ValueError as error:
        raise ApiError(str(error), param="weights") from None
    return targets


def _adapter(name: str, base_id: str) -> str:
    """A target in its one spelling."""
    try:
        adapter = parse_model(name, base_id)
    except AdapterNotFoundError as error:
        error.param = "target"
        raise
    if adapter is None:
        raise ApiError("An alias stands for adapters, not for the base model.", param="target")
    return adapter


def _answer(alias: AdapterAlias, op_id: str) -> Response:
    return _json({**alias_document(alias), "operation": op_id}, {OPERATION_HEADER: op_id})


def _json(document: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), headers=headers, media_type="application/json")
