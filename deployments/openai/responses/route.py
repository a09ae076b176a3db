"""POST /v1/responses."""

import secrets

from fastapi import APIRouter, Request, Response

from deployments.openai.api import Api, ResponseHead
from deployments.openai.body import read_body
from deployments.openai.failures import ApiError
from deployments.openai.fanout import Fanout
from deployments.openai.prompts import chat_prompt
from deployments.openai.respond import respond
from deployments.openai.responses.body import ResponsesBody
from deployments.openai.responses.writer import ResponseWriter
from deployments.openai.sampling import chat_params
from deployments.openai.tools import tool_plan
from engine.errors import InvalidRequestError

# What a chat's fields are called here.
_OWN_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}


def responses_router(api: Api) -> APIRouter:
    """The route of responses."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        body = await read_body(request, ResponsesBody, api.settings.max_body_bytes)
        try:
            return await _create(api, request, body)
        except (ApiError, InvalidRequestError) as error:
            error.param = _OWN_NAMES.get(error.param or "", error.param)
            raise

    return router


async def _create(api: Api, request: Request, body: ResponsesBody) -> Response:
    base = await api.base_model()
    chat, structured = body.as_chat(), body.structure()
    plan = tool_plan(chat)
    if plan.template_tools is not None and structured is not None:
        raise ApiError(
            f"{structured.field} does not go with tools that may be called.",
            param=structured.field,
        )
    prompt = chat_prompt(chat, api.settings, plan.template_tools)
    params = chat_params(chat, base.vocab_size, plan.structured or structured)
    head = ResponseHead(
        id=f"resp_{secrets.token_hex(12)}",
        model=body.model or base.id,
        system_fingerprint=api.version,
    )
    request_id = request.scope["state"]["request_id"]
    requests = api.requests(head, chat, [prompt], params, base, request_id=request_id)

    async def make_writer(fanout: Fanout) -> ResponseWriter:
        return ResponseWriter(api, head, body, fanout, plan, request_id)

    return await respond(request, Fanout(api.backend, requests), make_writer, stream=body.stream)
