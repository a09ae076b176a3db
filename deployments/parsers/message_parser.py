"""One message as it arrives: first its reasoning, then its text and calls."""

from deployments.parsers.deltas import Delta, TextDelta, ToolCallArguments, ToolCallStart
from deployments.parsers.reasoning import ReasoningSplitter
from deployments.parsers.tool_parsers import ToolParser


class MessageParser:
    """Either part may be missing. ``one_call`` leaves out all calls but the first."""

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolParser | None,
        *,
        one_call: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain now."""
        deltas: list[Delta] = [TextDelta(text)] if text else []
        if self._reasoning is not None:
            deltas = self._reasoning.feed(text)
        return self._with_calls(deltas)

    def finish(self) -> list[Delta]:
        """Return what was held back: no more text comes."""
        deltas = [] if self._reasoning is None else self._reasoning.finish()
        deltas = self._with_calls(deltas)
        if self._tools is not None:
            deltas += self._selected(self._tools.finish())
        return deltas

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        parsed: list[Delta] = []
        for delta in deltas:
            parsed += self._tools.feed(delta.text) if isinstance(delta, TextDelta) else [delta]
        return self._selected(parsed)

    def _selected(self, deltas: list[Delta]) -> list[Delta]:
        if not self._one_call:
            return deltas
        calls = (ToolCallStart, ToolCallArguments)
        return [each for each in deltas if not (isinstance(each, calls) and each.index > 0)]
