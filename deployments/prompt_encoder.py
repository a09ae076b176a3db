"""Prompts to token ids and back, on a thread of its own.

A fast tokenizer must not be used by two threads at once, and a long prompt would hold up every
stream of the replica; so there is one copy of it, and one thread that uses it.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from jinja2 import TemplateError

from deployments.generation import PromptInput
from deployments.token_bytes import TokenBytes
from engine.errors import InvalidRequestError

T = TypeVar("T")

# Templates are programs, so they fail as programs do: a division by zero, a range without end.
_TEMPLATE_FAILURES = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class PromptEncoder:
    """Applies chat templates, tokenises and detokenises."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-encoder")

    async def encode(
        self,
        prompt: PromptInput,
        *,
        chat_template: str | None = None,
        add_special_tokens: bool = True,
        keep_last: int | None = None,
    ) -> list[int]:
        """Turn a prompt into token ids, of which the last ``keep_last`` are kept.

        ``chat_template`` is the adapter's own; one in the prompt goes before it.
        """
        if prompt.token_ids is not None:
            token_ids = list(prompt.token_ids)
        else:
            token_ids = await self._run(
                lambda: self._encode(prompt, chat_template, add_special_tokens)
            )
        if not token_ids:
            raise InvalidRequestError("The prompt holds no tokens.", param="prompt")
        return token_ids if keep_last is None else token_ids[-keep_last:]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens included."""
        return str(await self._run(lambda: self._tokenizer.decode(list(token_ids))))

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each token."""
        tokens = await self._run(lambda: self._tokenizer.convert_ids_to_tokens(list(token_ids)))
        return ["" if token is None else token for token in tokens]

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's own bytes."""
        return await self._run(lambda: [self._token_bytes[token_id] for token_id in token_ids])

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _encode(
        self, prompt: PromptInput, chat_template: str | None, add_special_tokens: bool
    ) -> list[int]:
        if prompt.messages is not None:
            # The template writes its own special tokens.
            return self._tokenize(self._render(prompt, chat_template), add_special_tokens=False)
        assert prompt.text is not None
        return self._tokenize(prompt.text, add_special_tokens=add_special_tokens)

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens)
        return list(encoded["input_ids"])

    def _render(self, prompt: PromptInput, chat_template: str | None) -> str:
        template = prompt.chat_template or chat_template
        if template is None and self._tokenizer.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template; use completions.", param="messages"
            )
        assert prompt.messages is not None
        if prompt.tools and "tools" not in str(template or self._tokenizer.chat_template):
            # The model would never hear of them.
            raise InvalidRequestError(
                "This model's chat template does not take tools.", param="tools"
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                tokenize=False,
                chat_template=template,
                tools=prompt.tools,
                documents=prompt.documents,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **prompt.chat_template_kwargs,
            )
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequestError(
                f"The chat template refused the messages: {error}", param="messages"
            ) from error
        return str(rendered)
