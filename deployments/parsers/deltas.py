"""The pieces that a message is made of, in the order in which they become known."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what the message says."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the message."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins: the ``index``-th of its message."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, which together are JSON."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments
