"""Writes one response, whole or as events."""

from collections.abc import AsyncIterator
from typing import Any

import orjson

from deployments.openai.api import Api, ResponseHead
from deployments.openai.choices import merge_by_choice
from deployments.openai.failures import ApiError, Failure, describe_failure
from deployments.openai.fanout import Fanout, PromptOutput
from deployments.openai.logprobs import TokenSpeller, chat_logprobs
from deployments.openai.responses.body import ResponsesBody
from deployments.openai.responses.output_items import Event, OutputItems
from deployments.openai.tools import ToolPlan, message_parser
from deployments.openai.usage import Usage
from deployments.parsers.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from engine.outputs import FinishReason

_ABORTED = Failure(500, "The request was aborted.", "InternalServerError")


class ResponseWriter:
    """Formats one response."""

    def __init__(
        self,
        api: Api,
        head: ResponseHead,
        body: ResponsesBody,
        fanout: Fanout,
        plan: ToolPlan,
        request_id: str,
    ) -> None:
        self._head = head
        self._body = body
        self._fanout = fanout
        self._request_id = request_id
        (start,) = fanout.starts
        self._parser = message_parser(plan, start)
        if self._parser is not None and body.wants_logprobs:
            raise ApiError(
                "Log probabilities of a text beside calls or reasoning are not supported.",
                param="include",
            )
        self._usage = Usage(fanout.starts)
        self._speller = TokenSpeller(api.tokens, as_ids=False)
        self._items = OutputItems()
        self._finish_reason: FinishReason | None = None
        self._num_events = 0

    async def document(self) -> dict[str, Any]:
        async for _ in self._growth():
            pass
        return self._document(self._final_status(), usage=self._usage.total())

    async def events(self) -> AsyncIterator[bytes]:
        begun = self._document("in_progress")
        yield self._written(
            [
                {"type": "response.created", "response": begun},
                {"type": "response.in_progress", "response": begun},
            ]
        )
        try:
            async for events in self._growth():
                if events:
                    yield self._written(events)
        except Exception as error:  # noqa: BLE001 -- described, logged and sent
            failure = describe_failure(error, self._request_id)
            yield self._written([self._failed(failure)])
            return
        status = self._final_status()
        document = self._document(status, usage=self._usage.total())
        yield self._written([{"type": f"response.{status}", "response": document}])

    async def _growth(self) -> AsyncIterator[list[Event]]:
        """What happens to the items, from the first output to the last."""
        async for items in self._fanout.outputs():
            for item in items:
                self._usage.add(item)
                self._speller.note(item.output)
            await self._speller.load_noted()
            (merged,) = merge_by_choice(items)
            yield self._grow(merged)
        is_whole = self._finish_reason is FinishReason.STOP
        yield self._items.end("completed" if is_whole else "incomplete")

    def _grow(self, item: PromptOutput) -> list[Event]:
        output = item.output
        self._finish_reason = output.finish_reason
        if self._parser is None:
            logprobs = []
            if self._body.wants_logprobs:
                logprobs = chat_logprobs(output.logprobs or (), self._speller)["content"]
            return self._items.say(output.text, logprobs) if output.text or logprobs else []
        deltas = self._parser.feed(output.text)
        if output.finish_reason is not None:
            deltas += self._parser.finish()
        return [event for delta in deltas for event in self._take(delta)]

    def _take(self, delta: Delta) -> list[Event]:
        match delta:
            case TextDelta(text):
                return self._items.say(text)
            case ReasoningDelta(text):
                return self._items.reason(text)
            case ToolCallStart(_, call_id, name):
                return self._items.start_call(call_id, name)
            case ToolCallArguments(_, text):
                return self._items.add_arguments(text)

    def _final_status(self) -> str:
        match self._finish_reason:
            case FinishReason.STOP:
                return "completed"
            case FinishReason.LENGTH:
                return "incomplete"
            case _:
                return "failed"

    def _failed(self, failure: Failure) -> Event:
        document = self._document("failed", failure=failure)
        return {"type": "response.failed", "response": document}

    def _written(self, events: list[Event]) -> bytes:
        frames = []
        for event in events:
            numbered = orjson.dumps({**event, "sequence_number": self._num_events})
            frames.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), numbered))
            self._num_events += 1
        return b"".join(frames)

    def _document(
        self,
        status: str,
        *,
        usage: dict[str, Any] | None = None,
        failure: Failure | None = None,
    ) -> dict[str, Any]:
        """The response, with what was asked for as it was understood."""
        body, choice = self._body, self._body.tool_choice
        text = body.text.model_dump(by_alias=True, exclude_none=True)
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        if status == "failed" and failure is None:
            failure = _ABORTED
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "background": False,
            "error": None if failure is None else _error(failure),
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._head.model,
            "output": list(self._items.documents),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
        }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Chat's usage under this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _error(failure: Failure) -> dict[str, str]:
    code = "rate_limit_exceeded" if failure.status == 429 else "server_error"
    return {"code": code, "message": failure.message}
