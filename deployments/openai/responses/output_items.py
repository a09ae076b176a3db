"""The items that a response is made of, and the events of their growth.

Whole and streamed responses are built here alike; one of them throws the events away. Knows the
shapes of items and events, nothing of tokens or parsers.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Literal

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
Kind = Literal["message", "reasoning", "call"]


class TextItem:
    """A message or its reasoning: one part of text."""

    def __init__(self, index: int, *, is_reasoning: bool) -> None:
        self._is_reasoning = is_reasoning
        self._id = f"{'rs' if is_reasoning else 'msg'}_{secrets.token_hex(12)}"
        self._part_type = "reasoning_text" if is_reasoning else "output_text"
        self._place = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._index = index
        self._text = ""
        self._logprobs: list[Any] = []

    def opening(self) -> list[Event]:
        return [
            _item_event("added", self._index, self.document("in_progress", parts=[])),
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def add(self, text: str, logprobs: Sequence[Any]) -> list[Event]:
        self._text += text
        self._logprobs += logprobs
        return [self._text_event("delta", delta=text, logprobs=list(logprobs))]

    def closing(self, status: Status) -> list[Event]:
        return [
            self._text_event("done", text=self._text, logprobs=self._logprobs),
            {"type": "response.content_part.done", **self._place, "part": self._part()},
            _item_event("done", self._index, self.document(status)),
        ]

    def document(self, status: Status, parts: list[Any] | None = None) -> dict[str, Any]:
        content = [self._part()] if parts is None else parts
        document = {"id": self._id, "status": status, "content": content}
        if self._is_reasoning:
            return {"type": "reasoning", **document, "summary": []}
        return {"type": "message", **document, "role": "assistant"}

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._part_type, "text": self._text}
        if not self._is_reasoning:
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _text_event(self, what: str, *, logprobs: list[Any], **fields: str) -> Event:
        event = {"type": f"response.{self._part_type}.{what}", **self._place, **fields}
        return event if self._is_reasoning else {**event, "logprobs": logprobs}


class CallItem:
    """A call of one function."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._id = f"fc_{secrets.token_hex(12)}"
        self._place = {"item_id": self._id, "output_index": index}
        self._index = index
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def opening(self) -> list[Event]:
        return [_item_event("added", self._index, self.document("in_progress"))]

    def add(self, text: str) -> list[Event]:
        self._arguments += text
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, **self._place, "delta": text}]

    def closing(self, status: Status) -> list[Event]:
        kind = "response.function_call_arguments.done"
        whole = {"name": self._name, "arguments": self._arguments}
        return [
            {"type": kind, **self._place, **whole},
            _item_event("done", self._index, self.document(status)),
        ]

    def document(self, status: Status) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": self._id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
            "status": status,
        }


class OutputItems:
    """One item after the other: what comes for another item ends the one before."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self._open: TextItem | CallItem | None = None
        self._kind: Kind | None = None

    def say(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        """More of the message."""
        return self._add_text(text, logprobs, is_reasoning=False)

    def reason(self, text: str) -> list[Event]:
        """More of the reasoning."""
        return self._add_text(text, (), is_reasoning=True)

    def start_call(self, call_id: str, name: str) -> list[Event]:
        """A call begins."""
        events = self._end("completed")
        return events + self._begin(CallItem(len(self.documents), call_id, name), "call")

    def add_arguments(self, text: str) -> list[Event]:
        """More of the arguments of the call that began last."""
        assert isinstance(self._open, CallItem)
        return self._open.add(text)

    def end(self, status: Status) -> list[Event]:
        """Nothing more comes. A response says at least that it says nothing."""
        events: list[Event] = []
        if self._open is None and not self.documents:
            events = self._begin(TextItem(0, is_reasoning=False), "message")
        return events + self._end(status)

    def _add_text(self, text: str, logprobs: Sequence[Any], *, is_reasoning: bool) -> list[Event]:
        events: list[Event] = []
        kind: Kind = "reasoning" if is_reasoning else "message"
        if self._kind != kind:
            events = self._end("completed")
            item = TextItem(len(self.documents), is_reasoning=is_reasoning)
            events += self._begin(item, kind)
        assert isinstance(self._open, TextItem)
        return events + self._open.add(text, logprobs)

    def _begin(self, item: TextItem | CallItem, kind: Kind) -> list[Event]:
        self._open, self._kind = item, kind
        return item.opening()

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.closing(status)
        self.documents.append(self._open.document(status))
        self._open, self._kind = None, None
        return events


def _item_event(what: str, index: int, item: dict[str, Any]) -> Event:
    return {"type": f"response.output_item.{what}", "output_index": index, "item": item}
