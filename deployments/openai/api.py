"""What the routes of one app share: the backend, the settings and what is known of the model."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from deployments.backend import Backend, BaseModelInfo
from deployments.generation import GenerateRequest, PromptInput
from deployments.openai.failures import ApiError
from deployments.openai.model_name import parse_model
from deployments.openai.schema import GenerationBody
from deployments.openai.settings import HttpSettings, lorafleet_version
from deployments.openai.tokens import TokenTable
from engine.sampling_params import SamplingParams


class Api:
    """Shared by all routes of one app. The base model never changes while an app lives."""

    def __init__(self, backend: Backend, settings: HttpSettings) -> None:
        self.backend = backend
        self.settings = settings
        self.access = settings.access_control()
        self.tokens = TokenTable(backend)
        self.version = lorafleet_version()
        self._base: BaseModelInfo | None = None

    async def base_model(self) -> BaseModelInfo:
        if self._base is None:
            self._base = await self.backend.base_model()
        return self._base

    async def adapter_of(self, model: str) -> str | None:
        """The adapter that a ``model`` field asks for, None for the base model."""
        return parse_model(model, (await self.base_model()).id)

    def head(self, kind: str, body: GenerationBody, base: BaseModelInfo) -> "ResponseHead":
        return ResponseHead(
            id=f"{kind}-{secrets.token_hex(8)}",
            model=body.model or base.id,
            system_fingerprint=f"lorafleet-{self.version}",
        )

    def requests(
        self,
        head: "ResponseHead",
        body: GenerationBody,
        prompts: Sequence[PromptInput],
        params: SamplingParams,
        base: BaseModelInfo,
        *,
        request_id: str,
    ) -> list[GenerateRequest]:
        """One generate request for each prompt.

        An alias chooses by the user, else by the HTTP request, so all prompts go one way.
        """
        if len(prompts) * body.n > self.settings.max_choices:
            raise ApiError(
                f"{len(prompts)} prompts times n={body.n} are more than the "
                f"{self.settings.max_choices} choices that one request may ask for.",
                param="prompt" if len(prompts) > 1 else "n",
            )
        adapter = parse_model(body.model, base.id)
        truncate = _truncation(body.truncate_prompt_tokens, params, base.max_model_len)
        return [
            GenerateRequest(
                request_id=f"{head.id}-{index}",
                prompt=prompt,
                params=params,
                adapter=adapter,
                split_key=body.user or request_id,
                priority=body.priority,
                timeout_s=body.timeout,
                add_special_tokens=getattr(body, "add_special_tokens", True),
                truncate_prompt_tokens=truncate,
                given=_given(body),
            )
            for index, prompt in enumerate(prompts)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What every chunk of a response repeats."""

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def document(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def event_prefix(self, kind: str) -> bytes:
        """An event up to the inside of ``choices``, rendered once for a whole stream."""
        return b"data: " + orjson.dumps(self.document(kind))[:-1] + b',"choices":['

    def usage_event(self, prefix: bytes, usage: Mapping[str, Any]) -> bytes:
        """The event without choices that carries a stream's usage."""
        usage_field = b',"usage":' + orjson.dumps(usage)
        return prefix + b"]" + self.fingerprint_field + usage_field + b"}\n\n"

    @property
    def fingerprint_field(self) -> bytes:
        return b',"system_fingerprint":' + orjson.dumps(self.system_fingerprint)


def _given(body: GenerationBody) -> frozenset[str]:
    """The sampling parameters that the client gave, under their names in SamplingParams."""
    given = body.model_fields_set
    return frozenset(given | {"max_tokens"} if "max_completion_tokens" in given else given)


def _truncation(wanted: int | None, params: SamplingParams, max_model_len: int) -> int | None:
    """-1 keeps as much of the prompt's end as fits before the output."""
    if wanted is None or wanted >= 1:
        return wanted
    if wanted == -1:
        return max(1, max_model_len - (params.max_tokens or 1))
    raise ApiError(
        f"truncate_prompt_tokens must be -1 or at least 1, got {wanted}.",
        param="truncate_prompt_tokens",
    )
