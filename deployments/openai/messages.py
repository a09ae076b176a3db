"""Deltas of a message to OpenAI's shapes: the whole message, or what one chunk adds."""

from collections.abc import Sequence
from typing import Any

from deployments.parsers.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)


class MessageParts:
    """What some deltas come to: text, reasoning, and calls by their index."""

    def __init__(self, deltas: Sequence[Delta], *, include_reasoning: bool) -> None:
        self.text = ""
        self.reasoning = ""
        self._calls: dict[int, dict[str, Any]] = {}
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self.text += text
                case ReasoningDelta(text):
                    self.reasoning += text if include_reasoning else ""
                case ToolCallStart(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    self._calls[index] = {"id": call_id, "type": "function", "function": function}
                case ToolCallArguments(index, text):
                    call = self._calls.setdefault(index, {"function": {"arguments": ""}})
                    call["function"]["arguments"] += text

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    def whole(self) -> dict[str, Any]:
        """The fields of a whole message that depend on what was said."""
        fields: dict[str, Any] = {
            "content": self.text or (None if self._calls else ""),
            "reasoning": self.reasoning or None,
        }
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        if self._calls:
            fields["tool_calls"] = list(self._calls.values())
        return fields

    def delta(self) -> dict[str, Any]:
        """What a chunk adds; nothing for what is not known yet."""
        fields: dict[str, Any] = {}
        if self.reasoning:
            fields |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.text:
            fields["content"] = self.text
        if self._calls:
            fields["tool_calls"] = [{"index": index, **call} for index, call in self._calls.items()]
        return fields
