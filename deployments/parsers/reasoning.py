"""Splits what a model thinks from what it says."""

from collections.abc import Callable
from dataclasses import dataclass

from deployments.parsers.deltas import Delta, ReasoningDelta, TextDelta
from deployments.parsers.held_text import num_to_hold


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning, each one token."""

    opens: str
    closes: str


THINK = ReasoningFormat("<think>", "</think>")
MAGISTRAL = ReasoningFormat("[THINK]", "[/THINK]")


class ReasoningSplitter:
    """Reasoning comes first, if at all. ``in_reasoning``: the prompt has opened it already.

    Whitespace right inside and right behind the markers belongs to neither part.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, in_reasoning: bool) -> None:
        self._format = reasoning_format
        self._buffer = ""
        self._read: Callable[[], list[Delta]] = (
            self._read_reasoning if in_reasoning else self._read_opening
        )
        self._is_at_start = True

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain now."""
        self._buffer += text
        return self._read() if self._buffer else []

    def finish(self) -> list[Delta]:
        """Return what was held back: no more text comes."""
        text, self._buffer = self._buffer, ""
        if not text:
            return []
        # The bound methods are made anew each time, hence no "is".
        return [ReasoningDelta(text) if self._read == self._read_reasoning else TextDelta(text)]

    def _read_opening(self) -> list[Delta]:
        text = self._buffer.lstrip()
        if self._format.opens.startswith(text):
            # Nothing but whitespace, or a part of the marker, or all of it.
            if text != self._format.opens:
                return []
        elif not text.startswith(self._format.opens):
            self._is_at_start = False
            self._read = self._read_content
            return self._read()
        self._buffer = text.removeprefix(self._format.opens)
        self._read = self._read_reasoning
        return self._read()

    def _read_reasoning(self) -> list[Delta]:
        if self._is_at_start:
            self._buffer = self._buffer.lstrip()
        reasoning, closes, rest = self._buffer.partition(self._format.closes)
        if closes:
            self._buffer, self._is_at_start = rest, True
            self._read = self._read_content
            return [*_reasoning(reasoning.rstrip()), *self._read()]
        num_held = num_to_hold(self._buffer, (self._format.closes,))
        shown = self._buffer[: len(self._buffer) - num_held]
        self._buffer = self._buffer[len(shown) :]
        self._is_at_start = self._is_at_start and not shown
        return _reasoning(shown)

    def _read_content(self) -> list[Delta]:
        text = self._buffer.lstrip() if self._is_at_start else self._buffer
        self._buffer = ""
        self._is_at_start = self._is_at_start and not text
        return [TextDelta(text)] if text else []


def _reasoning(text: str) -> list[Delta]:
    return [ReasoningDelta(text)] if text else []
