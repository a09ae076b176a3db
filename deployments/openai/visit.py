"""One HTTP request's caller: which models it may use, and what its limits still allow.

Knows keys by their holders' names alone.
"""

import math
from collections.abc import Sequence
from typing import cast

from fastapi import Request

from deployments.access.key_holder import EVERYTHING, KeyHolder
from deployments.access.limiter import Quota, Standing, Ticket
from deployments.errors import LimitExceededError
from deployments.generation import GenerateRequest, PromptInput
from deployments.openai.api import Api
from deployments.openai.failures import ApiError

_MAX_SHOWN_CHARS = 128
# What OpenAI assumes of a text before it is tokenised.
_CHARS_PER_TOKEN = 4


class Visit:
    """What the guards found out about a request. ``headers`` tell where its limits stand."""

    def __init__(self, api: Api, holder: KeyHolder) -> None:
        self.holder = holder
        self.headers: dict[str, str] = {}
        self._api = api

    @property
    def is_unrestricted(self) -> bool:
        """Whether the key is for every model."""
        return self.holder.adapters is EVERYTHING

    def may_use(self, model: str) -> bool:
        """Whether the key is for this model: an adapter, an alias or the base model."""
        return self.holder.adapters.match(model)

    def check(self, model: str) -> None:
        """Raise ApiError if the key is not for this model, whether or not there is one."""
        if not self.may_use(model):
            shown = model if len(model) <= _MAX_SHOWN_CHARS else model[:_MAX_SHOWN_CHARS] + "..."
            raise ApiError(
                f"This key may not use the model `{shown}`.",
                status=403,
                type="PermissionDeniedError",
                param="model",
                reason="model_not_allowed",
            )

    async def admit(self, adapter: str | None, num_tokens: int) -> Ticket:
        """Count a request that expects so many tokens; whoever gets the ticket closes it.

        Raises ApiError for a model that the key is not for, LimitExceededError beyond a limit.
        """
        base = (await self._api.base_model()).id
        model = base if adapter is None else adapter.partition("@")[0]
        self.check(model)
        quotas = self._api.access.quotas(self.holder, model)
        try:
            return self._api.access.limiter.admit(quotas, num_tokens)
        except LimitExceededError as error:
            error.headers = self._standing(quotas)
            raise
        finally:
            self.headers = self._standing(quotas)

    def _standing(self, quotas: Sequence[Quota]) -> dict[str, str]:
        limiter = self._api.access.limiter
        return {
            **_headers("requests", limiter.requests_left(quotas)),
            **_headers("tokens", limiter.tokens_left(quotas)),
        }


def visit_of(request: Request) -> Visit:
    """The visit of a request that has passed a guard."""
    return cast("Visit", request.state.visit)


def expected_tokens(requests: Sequence[GenerateRequest]) -> int:
    """What requests will take at most, as far as they say so and as far as texts can be guessed."""
    return sum(
        _prompt_tokens(request.prompt) + request.params.n * (request.params.max_tokens or 0)
        for request in requests
    )


def _prompt_tokens(prompt: PromptInput) -> int:
    if prompt.token_ids is not None:
        return len(prompt.token_ids)
    texts = [prompt.text or ""]
    texts += [str(message.get("content") or "") for message in prompt.messages or ()]
    return math.ceil(sum(map(len, texts)) / _CHARS_PER_TOKEN)


def _headers(kind: str, standing: Standing | None) -> dict[str, str]:
    """OpenAI's headers; nothing where nothing is limited."""
    if standing is None:
        return {}
    return {
        f"x-ratelimit-limit-{kind}": str(standing.limit),
        f"x-ratelimit-remaining-{kind}": str(standing.remaining),
        f"x-ratelimit-reset-{kind}": f"{math.ceil(standing.reset_s)}s",
    }
