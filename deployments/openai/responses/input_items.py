"""Items of a response's input to chat messages.

A call, its reasoning and the text before them are items of their own here and one message in a
chat.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.openai.failures import ApiError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def input_messages(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """The messages that ``instructions`` and ``input`` come to."""
    if not given:
        raise ApiError("input must not be empty.", param="input")
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        conversation.messages.append({"role": "user", "content": given})
        return conversation.messages
    for index, item in enumerate(given):
        conversation.add(item, f"body.input.{index}")
    return conversation.finish()


class _Conversation:
    """Messages as items come, with the reasoning that belongs to the next of them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""
        self._names: dict[str, str] = {}

    def add(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message" if "role" in item else None)
        match kind:
            case "message":
                self._add_message(item, where)
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_output(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case _:
                raise ApiError(
                    f"{where}.type: only message, function_call, function_call_output and "
                    f"reasoning are supported",
                    param=f"{where}.type",
                )

    def finish(self) -> list[dict[str, Any]]:
        """All messages; reasoning that led to nothing is one of its own."""
        if self._reasoning:
            self._assistant("")
        return self.messages

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise ApiError(
                f"{where}.role: Input should be one of {', '.join(_ROLES)}", param=f"{where}.role"
            )
        text = _text(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._assistant(text)
        else:
            self.messages.append({"role": role, "content": text})

    def _add_call(self, item: Mapping[str, Any], where: str) -> None:
        call_id, name = _string(item, "call_id", where), _string(item, "name", where)
        arguments = _string(item, "arguments", where)
        self._names[call_id] = name
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or self._reasoning:
            last = self._assistant("")
        function = {"name": name, "arguments": arguments}
        calls = last.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _add_output(self, item: Mapping[str, Any], where: str) -> None:
        call_id = _string(item, "call_id", where)
        if call_id not in self._names:
            raise ApiError(
                f"{where}.call_id: no function_call of this id is in the input before it",
                param=f"{where}.call_id",
            )
        text = _text(item.get("output"), f"{where}.output")
        name = self._names[call_id]
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}
        )

    def _add_reasoning(self, item: Mapping[str, Any], where: str) -> None:
        if item.get("encrypted_content") is not None:
            raise ApiError(
                f"{where}.encrypted_content is not supported.", param=f"{where}.encrypted_content"
            )
        parts = item.get("content") or item.get("summary") or []
        kinds = ("reasoning_text", "summary_text")
        self._reasoning += _text(parts, f"{where}.content", kinds)

    def _assistant(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append(message)
        return message


def _text(content: object, where: str, kinds: Sequence[str] = _TEXT_PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: Input should be a string or a list of text parts", param=where)
    return "\n".join(
        _part_text(part, f"{where}.{index}", kinds) for index, part in enumerate(content)
    )


def _part_text(part: object, where: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, dict):
        raise ApiError(f"{where}: Input should be an object", param=where)
    if part.get("type") not in kinds:
        raise ApiError(
            f"{where}.type: only {', '.join(kinds)} are supported; this model reads no images, "
            "audio or files",
            param=f"{where}.type",
        )
    return _string(part, "text", where)


def _string(item: Mapping[str, Any], field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise ApiError(f"{where}.{field}: Input should be a string", param=f"{where}.{field}")
    return value
