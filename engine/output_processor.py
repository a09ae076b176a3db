"""Turns sampled tokens into what the caller sees: text, log probabilities, the reason to end.

Knows each sequence's text and stop rules, and which sequences make up a request. Knows nothing of
scheduling or tensors.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from engine.detokenizer import Detokenizer
from engine.outputs import FinishReason, PositionLogprobs, RequestOutput, RequestTiming
from engine.request import Request
from engine.sampler import Sampled, SamplingState
from engine.sampling_params import SamplingParams


@dataclass(slots=True)
class _Sequence:
    request: Request
    max_tokens: int
    stop_ids: frozenset[int]
    detokenizer: Detokenizer
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    is_first: bool = True


@dataclass(slots=True)
class OutputProcessor:
    """Text and endings of all sequences in the engine. Used by one thread.

    ``eos_token_ids`` end a sequence with stop_reason None, the caller's stop_token_ids with the id.
    """

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    max_model_len: int
    _sequences: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    _num_open: dict[str, int] = field(default_factory=dict)

    def add(self, request: Request, state: SamplingState) -> None:
        """Start to follow a sequence."""
        params = request.params
        room = self.max_model_len - request.num_prompt_tokens
        self._sequences[request.key] = _Sequence(
            request=request,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=state.stop_ids,
            detokenizer=Detokenizer(
                self.tokenizer,
                request.prompt_token_ids,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                shown={
                    token_id: self.tokenizer.id_to_token(token_id) or ""
                    for token_id in params.shown_special_token_ids
                },
                glued=self._glued(params),
            ),
            prompt_logprobs=_empty_prompt_logprobs(request),
        )
        self._num_open[request.request_id] = self._num_open.get(request.request_id, 0) + 1

    def add_prompt_logprobs(
        self, request: Request, found: Sequence[tuple[int, PositionLogprobs]]
    ) -> None:
        """Keep log probabilities of prompt positions until the first output carries them."""
        kept = self._sequences[request.key].prompt_logprobs
        if kept is not None:
            for position, logprobs in found:
                kept[position] = logprobs

    def process(self, request: Request, sampled: Sampled) -> RequestOutput:
        """Account for one sampled token. The request already has it among its output tokens."""
        sequence = self._sequences[request.key]
        if sampled.error is not None:
            return self.fail(request, sampled.error)
        reason, stop_reason, text = self._advance(sequence, sampled.token_id)
        if reason is not None:
            self._close(request)
        output = RequestOutput(
            request_id=request.request_id,
            index=request.index,
            text=text,
            token_ids=(sampled.token_id,),
            logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
            prompt_logprobs=_once(sequence),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            request_finished=request.request_id not in self._num_open,
            timing=_timing(request) if sequence.is_first else None,
        )
        sequence.is_first = False
        return output

    def process_embedding(self, request: Request, embedding: tuple[float, ...]) -> RequestOutput:
        """End a sequence whose prompt was to be pooled."""
        self._close(request)
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            finish_reason=FinishReason.STOP,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            request_finished=request.request_id not in self._num_open,
            embedding=embedding,
        )

    def fail(
        self, request: Request, error: Exception | None, reason: FinishReason = FinishReason.ERROR
    ) -> RequestOutput:
        """End a sequence before its time."""
        self._close(request)
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            request_finished=request.request_id not in self._num_open,
        )

    def _advance(
        self, sequence: _Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | str | None, str]:
        """Extend the text by one token and say whether, and why, the sequence ends with it."""
        params = sequence.request.params
        num_output = len(sequence.request.output_token_ids)
        detokenizer = sequence.detokenizer
        has_minimum = num_output >= params.min_tokens
        if has_minimum and token_id in sequence.stop_ids:
            text = detokenizer.finish()
            if params.include_stop_str_in_output or not params.skip_special_tokens:
                text += detokenizer.append(token_id) + detokenizer.finish()
            is_callers = token_id in params.stop_token_ids
            return FinishReason.STOP, token_id if is_callers else None, text
        text = detokenizer.append(token_id)
        if detokenizer.stop_reason is not None:
            return FinishReason.STOP, detokenizer.stop_reason, text
        if num_output >= sequence.max_tokens:
            return FinishReason.LENGTH, None, text + detokenizer.finish()
        return None, None, text

    def _glued(self, params: SamplingParams) -> dict[int, str]:
        """The added tokens' own texts, where no space may stand between them."""
        if params.skip_special_tokens or params.spaces_between_special_tokens:
            return {}
        added = self.tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    def _close(self, request: Request) -> None:
        del self._sequences[request.key]
        self._num_open[request.request_id] -= 1
        if not self._num_open[request.request_id]:
            del self._num_open[request.request_id]


def _empty_prompt_logprobs(request: Request) -> list[PositionLogprobs | None] | None:
    if request.params.prompt_logprobs is None:
        return None
    return [None] * request.num_prompt_tokens


def _timing(request: Request) -> RequestTiming | None:
    if request.scheduled_s is None:
        return None
    return RequestTiming(request.arrival_s, request.scheduled_s, time.monotonic())


def _once(sequence: _Sequence) -> tuple[PositionLogprobs | None, ...] | None:
    if not sequence.is_first or sequence.prompt_logprobs is None:
        return None
    return tuple(sequence.prompt_logprobs)
