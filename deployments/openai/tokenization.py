"""POST /tokenize and /detokenize."""

import orjson
from fastapi import APIRouter, Request, Response

from deployments.generation import PromptInput, TokenizeRequest
from deployments.openai.api import Api
from deployments.openai.body import parse_body, read_json
from deployments.openai.failures import ApiError
from deployments.openai.prompts import chat_prompt
from deployments.openai.schema import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from deployments.openai.tools import tool_plan
from deployments.openai.visit import visit_of


def tokenization_router(api: Api) -> APIRouter:
    """The routes between text and token ids."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        data = await read_json(request, api.settings.max_body_bytes)
        body: TokenizeTextBody | TokenizeChatBody
        if data.get("messages") is None:
            body = parse_body(data, TokenizeTextBody)
            prompt = PromptInput(text=body.prompt)
            add_special_tokens = body.add_special_tokens
        else:
            body = parse_body(data, TokenizeChatBody)
            prompt = chat_prompt(body, api.settings, tool_plan(body).template_tools)
            add_special_tokens = False
        asked = TokenizeRequest(
            prompt=prompt,
            adapter=await api.adapter_of(body.model),
            add_special_tokens=add_special_tokens,
        )
        visit = visit_of(request)
        with await visit.admit(asked.adapter, num_tokens=0):
            result = await api.backend.tokenize(asked)
        document = {
            "count": len(result.token_ids),
            "max_model_len": result.max_model_len,
            "tokens": result.token_ids,
            "token_strs": result.token_strs if body.return_token_strs else None,
        }
        return Response(
            orjson.dumps(document), headers=visit.headers, media_type="application/json"
        )

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        data = await read_json(request, api.settings.max_body_bytes)
        body = parse_body(data, DetokenizeBody)
        adapter = await api.adapter_of(body.model)
        vocab_size = (await api.base_model()).vocab_size
        if any(token_id >= vocab_size for token_id in body.tokens):
            raise ApiError(
                f"Token id {max(body.tokens)} is out of vocabulary.", param="body.tokens"
            )
        visit = visit_of(request)
        with await visit.admit(adapter, num_tokens=0):
            text = await api.backend.detokenize(body.tokens)
        return Response(
            orjson.dumps({"prompt": text}), headers=visit.headers, media_type="application/json"
        )

    return router
