"""GET /v1/models: the base model and every adapter and alias that can be asked for."""

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from deployments.aliases import AdapterAlias
from deployments.backend import AdapterQuery, AdapterState, AdapterStatus, BaseModelInfo
from deployments.openai.adapters import find_adapter
from deployments.openai.api import Api
from deployments.openai.visit import Visit, visit_of

OWNER = "lorafleet"

_MAX_LISTED = 10_000


class ModelPage(BaseModel):
    """Query parameters of the list: so many models after the one of this id."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    after: str = ""
    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] | None = None


def models_router(api: Api) -> APIRouter:
    """The routes of model cards."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        page = ModelPage.model_validate(dict(request.query_params))
        found = await _cards(api, page, visit_of(request))
        cards = found if page.limit is None else found[: page.limit]
        document = {
            "object": "list",
            "data": cards,
            "first_id": cards[0]["id"] if cards else None,
            "last_id": cards[-1]["id"] if cards else None,
            "has_more": len(cards) < len(found),
        }
        return _json(document)

    @router.get("/v1/models/{model_id:path}")
    async def get_model(request: Request, model_id: str) -> Response:
        base = await api.base_model()
        name = model_id.removeprefix(f"{base.id}:")
        visit_of(request).check(name)
        if model_id == base.id:
            return _json(_base_card(base))
        for alias in await api.backend.list_aliases():
            if alias.name == name:
                return _json(_alias_card(alias, base))
        return _json(_adapter_card(await find_adapter(api, name), base))

    return router


async def _cards(api: Api, page: ModelPage, visit: Visit) -> list[dict[str, Any]]:
    """The page's cards and one more if there is one: the base model, then all others by name."""
    base = await api.base_model()
    after = "" if page.after == base.id else page.after
    named = [_adapter_card(status, base) for status in await _adapters(api, page, after, visit)]
    named += [
        _alias_card(alias, base)
        for alias in await api.backend.list_aliases()
        if alias.name > after and visit.may_use(alias.name)
    ]
    named.sort(key=lambda card: str(card["id"]))
    first = [_base_card(base)] if not page.after and visit.may_use(base.id) else []
    return [*first, *named][: None if page.limit is None else page.limit + 1]


async def _adapters(api: Api, page: ModelPage, after: str, visit: Visit) -> list[AdapterStatus]:
    """Those that the caller may use, as many as the page and the look beyond it may need."""
    found: list[AdapterStatus] = []
    while True:
        limit = None if page.limit is None else page.limit + 1
        statuses = await api.backend.list_adapters(AdapterQuery(after=after, limit=limit))
        found += [
            status
            for status in statuses
            if status.state is not AdapterState.PREPARING and visit.may_use(status.version.name)
        ]
        if limit is None or len(found) >= limit or len(statuses) < limit:
            return found
        after = statuses[-1].version.name


def _base_card(base: BaseModelInfo) -> dict[str, Any]:
    return _card(base.id, base.created, base.root, None, base.max_model_len)


def _adapter_card(status: AdapterStatus, base: BaseModelInfo) -> dict[str, Any]:
    version = status.version
    created = int(version.created_at)
    return _card(version.name, created, version.source_uri, base.id, base.max_model_len)


def _alias_card(alias: AdapterAlias, base: BaseModelInfo) -> dict[str, Any]:
    """Its root names what it stands for, the largest share first."""
    targets = sorted(alias.targets, key=lambda target: -target.weight)
    root = "alias:" + ",".join(target.adapter for target in targets)
    return _card(alias.name, int(alias.created_at), root, base.id, base.max_model_len)


def _card(
    model_id: str, created: int, root: str, parent: str | None, max_model_len: int
) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def _json(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
