"""Prompts and chat messages of a body to ``PromptInput``. Tokenising happens at the replica."""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.generation import PromptInput
from deployments.openai.failures import ApiError
from deployments.openai.schema import ChatFields
from deployments.openai.settings import HttpSettings
from deployments.openai.tools import template_calls

# Arguments of the template call itself, which a request must not set behind the server's back.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def completion_prompts(
    prompt: object, vocab_size: int, *, field: str = "prompt"
) -> list[PromptInput]:
    """Take apart str | [str] | [int] | [[int]]."""
    if prompt is None or prompt in ("", []):
        raise ApiError(f"{field} must be given and not be empty.", param=field)
    if isinstance(prompt, str):
        return [PromptInput(text=prompt)]
    if not isinstance(prompt, list):
        raise _bad_prompt(field)
    if isinstance(prompt[0], str):
        return [_text_prompt(item, field) for item in prompt]
    if isinstance(prompt[0], list):
        return [_token_prompt(item, vocab_size, field) for item in prompt]
    return [_token_prompt(prompt, vocab_size, field)]


def _text_prompt(item: object, field: str) -> PromptInput:
    if not isinstance(item, str):
        raise _bad_prompt(field)
    if not item:
        raise _empty(field)
    return PromptInput(text=item)


def _token_prompt(item: object, vocab_size: int, field: str) -> PromptInput:
    if not isinstance(item, list) or not all(type(token_id) is int for token_id in item):
        raise _bad_prompt(field)
    if not item:
        raise _empty(field)
    if min(item) < 0 or max(item) >= vocab_size:
        worst = min(item) if min(item) < 0 else max(item)
        raise ApiError(f"Token id {_shown(worst)} is out of vocabulary.", param=field)
    return PromptInput(token_ids=tuple(item))


def _empty(field: str) -> ApiError:
    return ApiError(f"The {field} must not be empty.", param=field)


def _bad_prompt(field: str) -> ApiError:
    return ApiError(
        f"body.{field}: Input should be a string, a list of strings, a list of token ids, or a "
        "list of lists of token ids",
        param=f"body.{field}",
    )


def _shown(value: int) -> str:
    return str(value) if abs(value) < 1 << 64 else "beyond 64 bits"


def chat_prompt(
    body: ChatFields,
    settings: HttpSettings,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> PromptInput:
    """Check messages and template options; a template's own complaints come from the replica."""
    if not body.messages:
        raise ApiError("messages must not be empty.", param="messages")
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise ApiError(
            "This server does not run chat templates that come with a request "
            "(setting trust_request_chat_template).",
            param="chat_template",
        )
    for name in sorted(body.chat_template_kwargs.keys() & _RESERVED_TEMPLATE_KWARGS):
        raise ApiError(f"chat_template_kwargs must not set {name!r}.", param="chat_template_kwargs")
    return PromptInput(
        messages=tuple(_message(index, item) for index, item in enumerate(body.messages)),
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=tools,
        documents=body.documents,
    )


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Check one message and flatten its content to a string; other keys are the template's.

    Only a message that is a call needs no content.
    """
    where = f"body.messages.{index}"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ApiError(f"{where}.role: Input should be a non-empty string", param=f"{where}.role")
    if message.get("function_call"):
        raise ApiError(
            f"{where}.function_call is not supported, use tool_calls.",
            param=f"{where}.function_call",
        )
    if role == "developer":
        # OpenAI's newer word, which templates pass over in silence.
        message = {**message, "role": "system"}
    if not message.get("tool_calls"):
        return {**message, "content": _content(message.get("content"), f"{where}.content")}
    calls = template_calls(message["tool_calls"], f"{where}.tool_calls")
    content = message.get("content")
    text = "" if content is None else _content(content, f"{where}.content")
    return {**message, "content": text, "tool_calls": calls}


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: Input should be a string or a list of text parts", param=where)
    return "\n".join(_part_text(part, f"{where}.{index}") for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise ApiError(f"{where}: Input should be an object", param=where)
    if part.get("type") != "text":
        raise ApiError(
            f"{where}.type: only 'text' parts are supported, this model reads no images, audio "
            "or files",
            param=f"{where}.type",
        )
    if not isinstance(part.get("text"), str):
        raise ApiError(f"{where}.text: Input should be a string", param=f"{where}.text")
    return str(part["text"])
