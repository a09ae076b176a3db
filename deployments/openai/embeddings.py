"""POST /v1/embeddings: one vector for each input."""

import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from deployments.errors import ReplicaUnavailableError
from deployments.generation import GenerateRequest
from deployments.openai.api import Api
from deployments.openai.body import Body, read_body
from deployments.openai.failures import ApiError
from deployments.openai.fanout import Fanout
from deployments.openai.prompts import completion_prompts
from deployments.openai.respond import respond
from deployments.openai.schema import MAX_TIMEOUT_S, CompletionBody, Int
from deployments.openai.unsupported import REFUSED_EMBEDDINGS, Refused
from engine.sampling_params import SamplingParams


class EmbeddingsBody(Body):
    """POST /v1/embeddings. ``pooling`` and ``normalize`` are this server's own."""

    refused: ClassVar[Refused] = REFUSED_EMBEDDINGS

    model: str = ""
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    user: str | None = None
    priority: Int = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1)] | None = None


def embeddings_router(api: Api) -> APIRouter:
    """The route of embeddings."""
    router = APIRouter()

    @router.post("/v1/embeddings")
    async def create_embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingsBody, api.settings.max_body_bytes)
        try:
            requests = await _requests(api, request, body)
        except ApiError as error:
            if error.param == "prompt":
                error.param = "input"
            raise
        model = body.model or (await api.base_model()).id

        async def make_writer(fanout: Fanout) -> EmbeddingsWriter:
            return EmbeddingsWriter(fanout, model, body)

        return await respond(request, Fanout(api.backend, requests), make_writer, stream=False)

    return router


async def _requests(api: Api, request: Request, body: EmbeddingsBody) -> list[GenerateRequest]:
    base = await api.base_model()
    prompts = completion_prompts(body.input, base.vocab_size, field="input")
    shared = {"model", "user", "priority", "timeout", "add_special_tokens"}
    shared |= {"truncate_prompt_tokens"}
    alike = CompletionBody(**body.model_dump(include=shared & body.model_fields_set))
    # An engine has room for one token behind every prompt.
    params = SamplingParams(pooling=body.pooling, max_tokens=1, temperature=0)
    head = api.head("embd", alike, base)
    request_id = request.scope["state"]["request_id"]
    return api.requests(head, alike, prompts, params, base, request_id=request_id)


class EmbeddingsWriter:
    """Formats the vectors of one request."""

    def __init__(self, fanout: Fanout, model: str, body: EmbeddingsBody) -> None:
        self._fanout = fanout
        self._model = model
        self._body = body

    async def document(self) -> dict[str, Any]:
        vectors: dict[int, Sequence[float]] = {}
        async for items in self._fanout.outputs():
            for item in items:
                if item.output.embedding is None:
                    raise ReplicaUnavailableError("the request was aborted")
                vectors[item.prompt_index] = item.output.embedding
        num_tokens = sum(len(start.prompt_token_ids) for start in self._fanout.starts)
        return {
            "object": "list",
            "model": self._model,
            "data": [
                {"object": "embedding", "index": index, "embedding": self._shown(vector)}
                for index, vector in sorted(vectors.items())
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _shown(self, vector: Sequence[float]) -> list[float] | str:
        values = list(vector)
        if self._body.normalize:
            length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
            values = [value / length for value in values]
        if self._body.encoding_format == "float":
            return values
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
