"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from deployments.generation import PromptInput
from deployments.openai.api import Api, ResponseHead
from deployments.openai.body import read_body
from deployments.openai.choices import Choice, ChoiceSet, merge_by_choice
from deployments.openai.failures import ApiError
from deployments.openai.fanout import Fanout, PromptOutput
from deployments.openai.logprobs import (
    Positions,
    TokenSpeller,
    chat_logprobs,
    prompt_logprobs,
)
from deployments.openai.messages import MessageParts
from deployments.openai.prompts import chat_prompt
from deployments.openai.respond import respond
from deployments.openai.sampling import chat_params
from deployments.openai.schema import ChatBody
from deployments.openai.sse import DONE
from deployments.openai.structured import structured_output
from deployments.openai.tools import ToolPlan, message_parser, tool_plan
from deployments.openai.usage import Usage
from engine.outputs import FinishReason, PositionLogprobs

OBJECT = "chat.completion"
CHUNK_OBJECT = "chat.completion.chunk"


def chat_router(api: Api) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatBody, api.settings.max_body_bytes)
        base = await api.base_model()
        plan = _tool_plan(body)
        prompt = chat_prompt(body, api.settings, plan.template_tools)
        params = chat_params(body, base.vocab_size, plan.structured)
        head = api.head("chatcmpl", body, base)
        request_id = request.scope["state"]["request_id"]
        requests = api.requests(head, body, [prompt], params, base, request_id=request_id)

        async def make_writer(fanout: Fanout) -> ChatWriter:
            return ChatWriter(api, head, body, fanout, prompt, plan)

        return await respond(
            request, Fanout(api.backend, requests), make_writer, stream=body.stream
        )

    return router


def _tool_plan(body: ChatBody) -> ToolPlan:
    plan = tool_plan(body)
    structured = structured_output(body)
    if plan.template_tools is not None and structured is not None:
        raise ApiError(
            f"{structured.field} does not go with tools that may be called.",
            param=structured.field,
        )
    return plan


class ChatWriter:
    """Formats the choices of one chat request."""

    def __init__(
        self,
        api: Api,
        head: ResponseHead,
        body: ChatBody,
        fanout: Fanout,
        prompt: PromptInput,
        plan: ToolPlan,
    ) -> None:
        self._head = head
        self._body = body
        self._fanout = fanout
        (self._start,) = fanout.starts
        self._plan = plan
        # One for each choice, or none at all where the text is all there is.
        self._parsers = [
            parser
            for _ in range(body.n)
            if (parser := message_parser(plan, self._start)) is not None
        ]
        self._called: set[int] = set()
        self._usage = Usage(fanout.starts)
        self._prompt_scores: Positions = ()
        self._speller = TokenSpeller(api.tokens, as_ids=body.return_tokens_as_token_ids)
        self._prefix = head.event_prefix(CHUNK_OBJECT)
        last_message = (prompt.messages or ())[-1]
        self._role = "assistant" if body.add_generation_prompt else last_message["role"]
        is_continued = body.echo and last_message["role"] == self._role
        self._echo: str = last_message["content"] if is_continued else ""

    async def document(self) -> dict[str, Any]:
        choices = ChoiceSet(1, self._body.n)
        async for items in self._fanout.outputs():
            self._note(items)
            for item in items:
                choices.add(item)
        await self._speller.load_noted()
        scores = None
        if self._body.prompt_logprobs is not None:
            scores = prompt_logprobs(self._prompt_scores, self._speller)
        return {
            **self._head.document(OBJECT),
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": self._head.system_fingerprint,
            "usage": self._usage.total(),
            "prompt_logprobs": scores,
            "prompt_token_ids": self._prompt_ids(),
        }

    async def events(self) -> AsyncIterator[bytes]:
        opening = b"".join(map(self._role_chunk, range(self._body.n)))
        async for items in self._fanout.outputs():
            self._note(items)
            await self._speller.load_noted()
            # The roles travel with the first text, which spares a packet.
            chunks = opening + b"".join(map(self._chunk, merge_by_choice(items)))
            opening = b""
            if chunks:
                yield chunks
        if self._body.include_usage:
            yield self._head.usage_event(self._prefix, self._usage.total())
        yield DONE

    def _note(self, items: Sequence[PromptOutput]) -> None:
        """Count outputs, keep the prompt's scores, and note the tokens that are to be spelled."""
        for item in items:
            self._usage.add(item)
            self._speller.note(item.output)
            self._prompt_scores = item.output.prompt_logprobs or self._prompt_scores

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": self._role,
            "content": self._echo + choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        }
        if self._parsers:
            parts = self._parse(index, choice.text, is_finished=True)
            message |= parts.whole()
            if self._echo:
                message["content"] = self._echo + (message["content"] or "")
        return {
            "index": index,
            "message": message,
            "logprobs": self._choice_logprobs(choice.logprobs),
            "finish_reason": self._finish_reason(index, choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._body.return_token_ids else None,
        }

    def _role_chunk(self, index: int) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": self._role, "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        usage = self._usage.none_yet() if self._body.continuous_usage else None
        event = self._event(
            choice, usage, b',"prompt_token_ids":' + orjson.dumps(self._prompt_ids())
        )
        if not self._echo:
            return event
        echo = {**choice, "delta": {"content": self._echo}}
        return event + self._event(echo, usage)

    def _chunk(self, item: PromptOutput) -> bytes:
        """One event, or nothing when the output has nothing to show yet."""
        output = item.output
        logprobs = self._choice_logprobs(output.logprobs or ()) if output.token_ids else None
        token_ids = output.token_ids if self._body.return_token_ids else None
        is_finished = output.finish_reason is not None
        delta, has_news = {"content": output.text}, bool(output.text)
        if self._parsers:
            delta = self._parse(output.index, output.text, is_finished=is_finished).delta()
            has_news = bool(delta)
        if not (is_finished or has_news or logprobs or token_ids):
            return b""
        choice: dict[str, Any] = {
            "index": output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(output.index, output.finish_reason),
            "token_ids": token_ids,
        }
        if is_finished:
            choice["stop_reason"] = output.stop_reason
        usage = self._usage.so_far(item) if self._body.continuous_usage else None
        return self._event(choice, usage)

    def _parse(self, index: int, text: str, *, is_finished: bool) -> MessageParts:
        parser = self._parsers[index]
        deltas = parser.feed(text)
        if is_finished:
            deltas += parser.finish()
        parts = MessageParts(deltas, include_reasoning=self._body.include_reasoning)
        if parts.has_calls:
            self._called.add(index)
        return parts

    def _finish_reason(self, index: int, reason: FinishReason | None) -> str | None:
        """A message that calls ends for that reason, unless the client itself named the call."""
        if reason is FinishReason.STOP and index in self._called and self._plan.named is None:
            return "tool_calls"
        return reason

    def _event(
        self, choice: dict[str, Any], usage: dict[str, int] | None, extra: bytes = b""
    ) -> bytes:
        if usage is not None:
            extra += b',"usage":' + orjson.dumps(usage)
        return self._prefix + orjson.dumps(choice) + b"]" + extra + b"}\n\n"

    def _choice_logprobs(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(positions, self._speller) if self._body.logprobs else None

    def _prompt_ids(self) -> list[int] | None:
        return list(self._start.prompt_token_ids) if self._body.return_token_ids else None
