"""POST /v1/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from deployments.generation import GenerateRequest, GenerationStart
from deployments.openai.api import Api, ResponseHead
from deployments.openai.body import read_body
from deployments.openai.choices import Choice, ChoiceSet, merge_by_choice
from deployments.openai.fanout import Fanout, PromptOutput
from deployments.openai.logprobs import (
    CompletionLogprobs,
    Positions,
    TokenSpeller,
    prompt_logprobs,
)
from deployments.openai.prompts import completion_prompts
from deployments.openai.respond import respond
from deployments.openai.sampling import completion_params, completion_prompt_logprobs
from deployments.openai.schema import CompletionBody
from deployments.openai.sse import DONE
from deployments.openai.usage import Usage

OBJECT = "text_completion"


def completions_router(api: Api) -> APIRouter:
    """The route of text completions."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionBody, api.settings.max_body_bytes)
        base = await api.base_model()
        prompts = completion_prompts(body.prompt, base.vocab_size)
        params = completion_params(body, base.vocab_size)
        head = api.head("cmpl", body, base)
        request_id = request.scope["state"]["request_id"]
        requests = api.requests(head, body, prompts, params, base, request_id=request_id)

        async def make_writer(fanout: Fanout) -> CompletionWriter:
            if body.echo and body.logprobs is not None:
                for start in fanout.starts:
                    await api.tokens.load(start.prompt_token_ids)
            echoes = await _echo_texts(api, body, requests, fanout.starts)
            return CompletionWriter(api, head, body, fanout, echoes)

        return await respond(
            request, Fanout(api.backend, requests), make_writer, stream=body.stream
        )

    return router


async def _echo_texts(
    api: Api,
    body: CompletionBody,
    requests: Sequence[GenerateRequest],
    starts: Sequence[GenerationStart],
) -> list[str]:
    """The prompts' texts, as given or, where only token ids are at hand, detokenised."""
    if not body.echo:
        return [""] * len(requests)
    texts = []
    for request, start in zip(requests, starts, strict=True):
        text = request.prompt.text
        if text is None or request.truncate_prompt_tokens is not None:
            text = await api.backend.detokenize(start.prompt_token_ids)
        texts.append(text)
    return texts


class CompletionWriter:
    """Formats the choices of one completion request."""

    def __init__(
        self,
        api: Api,
        head: ResponseHead,
        body: CompletionBody,
        fanout: Fanout,
        echoes: Sequence[str],
    ) -> None:
        self._head = head
        self._body = body
        self._fanout = fanout
        self._echoes = echoes
        self._starts = fanout.starts
        self._usage = Usage(self._starts, count_output=not body.scores_only)
        self._prompt_scores: dict[int, Positions] = {}
        self._speller = TokenSpeller(api.tokens, as_ids=body.return_tokens_as_token_ids)
        num_choices = len(self._starts) * body.n
        self._logprobs = [CompletionLogprobs(self._speller) for _ in range(num_choices)]
        self._unseen = set(range(num_choices))
        self._num_open = num_choices
        self._prefix = head.event_prefix(OBJECT)

    async def document(self) -> dict[str, Any]:
        choices = ChoiceSet(len(self._starts), self._body.n)
        async for items in self._fanout.outputs():
            self._note(items)
            for item in items:
                choices.add(item)
        await self._speller.load_noted()
        return {
            **self._head.document(OBJECT),
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": self._head.system_fingerprint,
            "usage": self._usage.total(),
        }

    async def events(self) -> AsyncIterator[bytes]:
        async for items in self._fanout.outputs():
            self._note(items)
            await self._speller.load_noted()
            if chunks := b"".join(map(self._chunk, merge_by_choice(items))):
                yield chunks
        if self._body.include_usage:
            yield self._head.usage_event(self._prefix, self._usage.total())
        yield DONE

    def _note(self, items: Sequence[PromptOutput]) -> None:
        """Count outputs, keep prompts' scores, and note the tokens that are to be spelled."""
        for item in items:
            self._usage.add(item)
            self._speller.note(item.output)
            if item.output.prompt_logprobs is not None:
                self._prompt_scores[item.prompt_index] = item.output.prompt_logprobs

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shape = self._piece(
            index, choice.prompt_index, choice.text, choice.token_ids, choice.logprobs
        )
        scores = None
        if completion_prompt_logprobs(self._body) is not None:
            scores = prompt_logprobs(self._prompt_scores[choice.prompt_index], self._speller)
        return {
            **shape,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt_logprobs": scores,
            "prompt_token_ids": self._prompt_ids(choice.prompt_index),
        }

    def _chunk(self, item: PromptOutput) -> bytes:
        """One event, or nothing when the output has nothing to show yet."""
        output, index = item.output, item.prompt_index * self._body.n + item.output.index
        is_first = index in self._unseen
        piece = self._piece(
            index, item.prompt_index, output.text, output.token_ids, output.logprobs or ()
        )
        is_finished = output.finish_reason is not None
        if not (is_finished or piece["text"] or piece["logprobs"] or piece["token_ids"]):
            return b""
        self._unseen.discard(index)
        self._num_open -= is_finished
        piece["finish_reason"] = output.finish_reason
        piece["stop_reason"] = output.stop_reason
        piece["prompt_token_ids"] = self._prompt_ids(item.prompt_index) if is_first else None
        event = self._prefix + orjson.dumps(piece) + b"]"
        if self._num_open == 0 and not self._body.include_usage:
            event += self._head.fingerprint_field
        if self._body.continuous_usage:
            event += b',"usage":' + orjson.dumps(self._usage.so_far(item))
        return event + b"}\n\n"

    def _piece(
        self,
        index: int,
        prompt_index: int,
        text: str,
        token_ids: Sequence[int],
        positions: Positions,
    ) -> dict[str, Any]:
        """What is shown of a choice's next tokens, its echo before the first of them."""
        if self._body.scores_only:
            text, token_ids, positions = "", (), ()
        shown_ids: Sequence[int] = token_ids
        wants_logprobs = self._body.logprobs is not None
        if self._body.echo and index in self._unseen:
            text = self._echoes[prompt_index] + text
            if wants_logprobs:
                shown_ids = (*self._starts[prompt_index].prompt_token_ids, *token_ids)
                positions = (*self._prompt_scores[prompt_index], *positions)
        has_logprobs = wants_logprobs and shown_ids
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs[index].format(shown_ids, positions)
            if has_logprobs
            else None,
            "token_ids": list(token_ids) if self._body.return_token_ids else None,
        }

    def _prompt_ids(self, prompt_index: int) -> list[int] | None:
        if not self._body.return_token_ids:
            return None
        return list(self._starts[prompt_index].prompt_token_ids)
