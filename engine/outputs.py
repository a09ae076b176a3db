"""What the scheduler tells the runner before a step, and the engine tells the caller after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where it has them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, with its 1-based rank in the vocabulary."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token's log probability and the most likely alternatives, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When a sequence came to the engine, joined the batch, and had its first token.

    Seconds of the machine's monotonic clock.
    """

    arrival_s: float
    scheduled_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What is new for one sequence of one request since the last output.

    ``index`` tells the n sequences of a request apart. ``text`` is the new text, already cut at a
    stop string and never ending inside a character. ``prompt_logprobs`` comes once, with the first
    output; its first entry is None because the first prompt token has no predecessor.
    ``num_cached_tokens`` counts prompt tokens served from the prefix cache. ``timing`` comes once,
    with a sequence's first token. ``embedding`` is all there is where the prompt was to be pooled.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: Exception | None = None
    request_finished: bool = False
    timing: RequestTiming | None = field(default=None, compare=False)
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: ``num_tokens`` tokens from ``num_computed_tokens`` on.

    ``slot`` is the device slot of its adapter, None for the base model. ``block_ids`` is its block
    table, long enough for the tokens of this step. ``samples`` is True when the step reaches the
    request's last known token, so that a new token is sampled from it.
    """

    request: Request
    num_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    slot: int | None
    samples: bool


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Copy this adapter's host weights to this slot before the step's forward pass."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: requests with exactly one scheduled token come first (see AttentionBatch)."""

    scheduled: tuple[ScheduledRequest, ...]
    slot_loads: tuple[SlotLoad, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)
