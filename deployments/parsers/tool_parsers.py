"""Finds tool calls in a message's text, in the formats that models were trained to write.

Knows the formats. Whole and streamed messages go through the same code, so they cannot differ.
"""

import re
import secrets
import string
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from deployments.parsers.call_scanner import CallScanner
from deployments.parsers.deltas import Delta, TextDelta, ToolCallArguments, ToolCallStart
from deployments.parsers.held_text import find_first, num_to_hold

_MISTRAL_ID_CHARS = string.ascii_letters + string.digits
_MISTRAL_ID_LENGTH = 9
_MAX_HEADER_CHARS = 300

# A name before its arguments, perhaps with an id: ``get_time[CALL_ID]x[ARGS]{``.
_NAME_BEFORE = re.compile(r"([A-Za-z0-9_.:-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*\{")


class ToolParser(Protocol):
    """Takes a message's text apart as it arrives."""

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain now."""

    def finish(self) -> list[Delta]:
        """Return what was held back: no more text comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls.

    Calls come after a marker of ``opens``, with ``separators`` and whitespace between them, up to
    the ``closes`` marker. ``starts_bare``: a text that begins with a brace or bracket is a call
    without a marker. ``names_before``: a call may be a name followed by its arguments, with
    ``other_markers`` between the two.
    """

    opens: tuple[str, ...] = ()
    closes: str = ""
    separators: str = ""
    starts_bare: bool = False
    names_before: bool = False
    has_short_ids: bool = False
    other_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that may be a special token in a model's vocabulary."""
        return (*self.opens, *filter(None, (self.closes,)), *self.other_markers)


HERMES = CallFormat(opens=("<tool_call>",), closes="</tool_call>")
LLAMA3 = CallFormat(opens=("<|python_tag|>",), separators=";", starts_bare=True)
MISTRAL = CallFormat(
    opens=("[TOOL_CALLS]",),
    separators=",[]",
    names_before=True,
    has_short_ids=True,
    other_markers=("[CALL_ID]", "[ARGS]"),
)
# What a required call is made to look like, whatever the model's own format.
JSON_LIST = CallFormat(separators=",[]", starts_bare=True)


class _Mode(Enum):
    START = auto()
    TEXT = auto()
    BETWEEN = auto()
    CALL = auto()


class FormatParser:
    """Finds the calls of one format.

    What looks like a call and is none comes out as text. A call that is cut short keeps what was
    told of it.
    """

    def __init__(self, call_format: CallFormat) -> None:
        self._format = call_format
        self._buffer = ""
        self._mode = _Mode.START if call_format.starts_bare else _Mode.TEXT
        self._scanner = CallScanner()
        # What stands before a call that has not begun for certain, in case it is none.
        self._prefix = ""
        self._is_tentative = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        held, self._buffer = self._buffer, ""
        if self._mode is _Mode.CALL:
            held = "" if self._scanner.has_told else self._prefix + self._scanner.text
        elif self._mode is _Mode.BETWEEN:
            held = self._prefix + held if self._is_tentative else ""
        return [TextDelta(held)] if held else []

    def _advance(self, deltas: list[Delta]) -> bool:
        """Take one step through the buffer; False when it takes more text to go on."""
        if not self._buffer:
            return False
        if self._mode is _Mode.START:
            return self._start()
        if self._mode is _Mode.TEXT:
            return self._read_text(deltas)
        if self._mode is _Mode.BETWEEN:
            return self._read_between(deltas)
        return self._read_call(deltas)

    def _start(self) -> bool:
        first = self._buffer.lstrip()[:1]
        if not first:
            return False
        if first == "{" or (first == "[" and "[" in self._format.separators):
            self._prefix, self._is_tentative, self._mode = "", True, _Mode.BETWEEN
        else:
            self._mode = _Mode.TEXT
        return True

    def _read_text(self, deltas: list[Delta]) -> bool:
        found = find_first(self._buffer, self._format.opens)
        if found is None:
            num_held = num_to_hold(self._buffer, self._format.opens)
            shown = self._buffer[: len(self._buffer) - num_held]
            self._buffer = self._buffer[len(shown) :]
            _add_text(deltas, shown)
            return False
        place, marker = found
        _add_text(deltas, self._buffer[:place].rstrip())
        self._buffer = self._buffer[place + len(marker) :]
        self._prefix, self._is_tentative, self._mode = marker, True, _Mode.BETWEEN
        return True

    def _read_between(self, deltas: list[Delta]) -> bool:
        """Before, between and behind calls: nothing that would be shown."""
        self._skip(len(self._buffer) - len(self._buffer.lstrip()))
        if not self._buffer:
            return False
        markers = tuple(filter(None, (*self._format.opens, self._format.closes)))
        marker = next(filter(self._buffer.startswith, markers), None)
        if marker is not None:
            self._pass_marker(marker)
            return True
        if any(marker.startswith(self._buffer) for marker in markers):
            return False
        if self._buffer[0] in self._format.separators:
            self._skip(1)
            return True
        if self._buffer[0] == "{":
            self._begin_call(None)
            return True
        if self._format.names_before and self._is_tentative:
            return self._read_header(deltas)
        return self._return_to_text(deltas)

    def _skip(self, count: int) -> None:
        if self._is_tentative:
            self._prefix += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _pass_marker(self, marker: str) -> None:
        is_end = marker == self._format.closes
        if is_end and not self._is_tentative:
            self._buffer = self._buffer[len(marker) :]
            self._mode = _Mode.TEXT
            return
        self._is_tentative = True
        self._skip(len(marker))

    def _read_header(self, deltas: list[Delta]) -> bool:
        header = _NAME_BEFORE.match(self._buffer)
        if header is not None:
            self._skip(header.end() - 1)
            self._begin_call(header[1])
            return True
        if "{" in self._buffer or len(self._buffer) > _MAX_HEADER_CHARS:
            return self._return_to_text(deltas)
        return False

    def _return_to_text(self, deltas: list[Delta]) -> bool:
        _add_text(deltas, self._prefix)
        self._prefix, self._is_tentative, self._mode = "", False, _Mode.TEXT
        return True

    def _begin_call(self, name: str | None) -> None:
        self._scanner = CallScanner(name)
        self._mode = _Mode.CALL

    def _read_call(self, deltas: list[Delta]) -> bool:
        scanned, self._buffer = self._scanner.feed(self._buffer)
        if scanned.name is not None:
            deltas.append(ToolCallStart(self._num_calls, self._new_id(), scanned.name))
        if scanned.arguments:
            deltas.append(ToolCallArguments(self._num_calls, scanned.arguments))
        if self._scanner.is_broken:
            if self._scanner.has_told:
                self._num_calls += 1
                self._prefix = ""
            else:
                self._prefix += self._scanner.text
            return self._return_to_text(deltas)
        if not self._scanner.is_complete:
            return False
        self._num_calls += 1
        self._prefix, self._is_tentative, self._mode = "", False, _Mode.BETWEEN
        return True

    def _new_id(self) -> str:
        if self._format.has_short_ids:
            return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(_MISTRAL_ID_LENGTH))
        return f"call_{secrets.token_hex(12)}"


class NamedCallParser:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Delta]:
        if not text:
            return []
        deltas: list[Delta] = []
        if not self._has_begun:
            self._has_begun = True
            deltas.append(ToolCallStart(0, f"call_{secrets.token_hex(12)}", self._name))
        deltas.append(ToolCallArguments(0, text))
        return deltas

    def finish(self) -> list[Delta]:
        return []


def _add_text(deltas: list[Delta], text: str) -> None:
    if text:
        deltas.append(TextDelta(text))
