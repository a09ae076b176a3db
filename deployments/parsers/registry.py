"""The parsers by the names under which settings and adapters choose them."""

from collections.abc import Mapping

from deployments.parsers.reasoning import MAGISTRAL, THINK, ReasoningFormat
from deployments.parsers.tool_parsers import HERMES, LLAMA3, MISTRAL, CallFormat

TOOL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3": LLAMA3,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": THINK,
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "mistral": MAGISTRAL,
}

# What a chat template says to the model about the format of its calls.
_TEMPLATE_MARKS = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3"}


def detect_tool_parser(chat_template: str) -> str | None:
    """The parser for the format that a template asks for, if it names one that is known."""
    return next((name for mark, name in _TEMPLATE_MARKS.items() if mark in chat_template), None)
