"""The records that travel between the ingress and a replica for one request.

Plain data: what to generate from, and what comes back. Knows no HTTP body and no Ray.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.telemetry.request_origin import RequestOrigin, current_origin
from engine.errors import InvalidRequestError
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """What to generate from: exactly one of token ids, text, or chat messages.

    The chat fields apply to ``messages`` only. ``chat_template`` None means the tokenizer's own.
    """

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.token_ids, self.text, self.messages) if value is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "exactly one of token ids, text and messages is needed", param="prompt"
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt to be continued by the base model or one adapter.

    ``adapter`` is a name or an alias, or ``name@generation`` to insist on one version; None is the
    base model. ``split_key`` chooses among the adapters that an alias stands for.
    ``params.max_tokens`` None generates until the context is full. ``add_special_tokens`` applies
    to text prompts (a chat template writes its own). ``truncate_prompt_tokens`` keeps the last k
    prompt tokens. ``given`` names the sampling parameters that the client gave: the others may be
    set by what is known of the model. ``origin`` is the HTTP request in whose context it was made.
    Tenants whose requests wait take turns. What takes longer than ``timeout_s`` is given up.
    """

    request_id: str
    prompt: PromptInput
    params: SamplingParams
    adapter: str | None = None
    split_key: str = ""
    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    given: frozenset[str] = frozenset()
    origin: RequestOrigin = field(default_factory=current_origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStart:
    """First item of a stream: who serves the request, and with which version.

    ``generation`` is 0 for the base model. It arrives once the request is admitted, before any
    token, so errors of admission are raised instead of it. ``tool_parser`` and
    ``reasoning_parser`` say how a chat's text is to be read; ``in_reasoning`` is true where the
    prompt has opened the reasoning, None where there will be none.
    """

    replica_id: str
    adapter_name: str | None
    generation: int
    prompt_token_ids: tuple[int, ...]
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    in_reasoning: bool | None = None


GenerationItem = GenerationStart | list[RequestOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """A prompt to turn into token ids without generating."""

    prompt: PromptInput
    adapter: str | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeResult:
    """Token ids of a prompt; ``token_strs`` are the vocabulary's own spellings."""

    token_ids: tuple[int, ...]
    token_strs: tuple[str, ...]
    max_model_len: int
