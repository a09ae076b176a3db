"""GET /v1/models: the base model and every adapter and alias that can be asked for."""

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from deployments.aliases import AdapterAlias
from deployments.backend import AdapterState, AdapterStatus, BaseModelInfo
from deployments.openai.adapters import find_adapter
from deployments.openai.api import Api
from deployments.openai.visit import visit_of

OWNER = "lorafleet"


def models_router(api: Api) -> APIRouter:
    """The routes of model cards."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        base = await api.base_model()
        may_use = visit_of(request).may_use
        cards = [_base_card(base)]
        cards += [
            _adapter_card(status, base)
            for status in await api.backend.list_adapters()
            if status.state is not AdapterState.PREPARING
        ]
        cards += [_alias_card(alias, base) for alias in await api.backend.list_aliases()]
        allowed = [card for card in cards if may_use(card["id"])]
        return _json({"object": "list", "data": allowed})

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
