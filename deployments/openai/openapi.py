"""The OpenAPI document: the routes as FastAPI knows them, with the bodies that are read by hand.

Knows which model reads which route's body. What the models do not say (ranges of sampling
parameters, shapes of prompts) the answers do.
"""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.openai.aliases import AliasBody
from deployments.openai.embeddings import EmbeddingsBody
from deployments.openai.management import LoadBody, RollBackBody
from deployments.openai.responses.body import ResponsesBody
from deployments.openai.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeChatBody,
    TokenizeTextBody,
    UnloadAdapterBody,
)

BODIES: Mapping[tuple[str, str], tuple[type[BaseModel], ...]] = {
    ("post", "/v1/completions"): (CompletionBody,),
    ("post", "/v1/chat/completions"): (ChatBody,),
    ("post", "/v1/responses"): (ResponsesBody,),
    ("post", "/v1/embeddings"): (EmbeddingsBody,),
    ("post", "/tokenize"): (TokenizeTextBody, TokenizeChatBody),
    ("post", "/detokenize"): (DetokenizeBody,),
    ("post", "/v1/load_lora_adapter"): (LoadAdapterBody,),
    ("post", "/v1/unload_lora_adapter"): (UnloadAdapterBody,),
    ("post", "/v1/adapters"): (LoadBody,),
    ("post", "/v1/adapters/{name}/rollback"): (RollBackBody,),
    ("put", "/v1/adapters/aliases/{name}"): (AliasBody,),
}
_REFERENCE = "#/components/schemas/{model}"


def openapi_router(app: FastAPI, version: str) -> APIRouter:
    """GET /openapi.json, written when it is first asked for."""
    router = APIRouter()
    written: list[bytes] = []

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not written:
            written.append(orjson.dumps(describe_app(app, version)))
        return Response(written[0], media_type="application/json")

    return router


def describe_app(app: FastAPI, version: str) -> dict[str, Any]:
    """Return the document of an app whose routes are all there."""
    document = get_openapi(title=app.title, version=version, routes=app.routes)
    models = list(dict.fromkeys(model for models in BODIES.values() for model in models))
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REFERENCE
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    for (method, path), bodies in BODIES.items():
        shapes = [references[model, "validation"] for model in bodies]
        schema = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        document["paths"][path][method]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return document
