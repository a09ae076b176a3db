"""Reads one tool call's JSON as it arrives.

Knows ``{"name": ..., "arguments": {...}}`` in any order of its keys, and arguments alone. Knows
nothing of what surrounds a call.
"""

import json
from dataclasses import dataclass

_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_NAME_CHARS = 256


class _NotACallError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Scanned:
    """What a piece of text told: the call's name, once, and more of its arguments."""

    name: str | None = None
    arguments: str = ""


class CallScanner:
    """One JSON object that is a call, or with ``name`` the arguments of the call by that name.

    ``text`` is all that was taken in, ``is_complete`` whether the object has ended, ``is_broken``
    whether it is no call, or no JSON, from the last character on.
    """

    def __init__(self, name: str | None = None) -> None:
        self.text = ""
        self.is_complete = False
        self.is_broken = False
        self._given_name = name
        self._name = name
        self._is_name_told = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._expects = "key"
        self._key = ""
        self._start: int | None = None if name is None else 0
        # Where the arguments begin and end, and how much of them was told.
        self._arguments: tuple[int, int | None] | None = None if name is None else (0, None)
        self._num_told = 0

    @property
    def has_told(self) -> bool:
        """Whether anything was told that cannot be taken back."""
        return self._is_name_told

    def feed(self, text: str) -> tuple[Scanned, str]:
        """Take in more text; returns what it told and what lies behind the object's end."""
        first = len(self.text)
        self.text += text
        for place in range(first, len(self.text)):
            try:
                self._take(self.text[place], place)
            except _NotACallError:
                self.is_broken = True
            if self.is_complete or self.is_broken:
                rest, self.text = self.text[place + 1 :], self.text[: place + 1]
                return self._tell(), rest
        return self._tell(), ""

    def _take(self, character: str, place: int) -> None:
        if self._in_string:
            self._take_in_string(character, place)
        elif character == '"':
            self._open_string(place)
        elif character in "{[":
            self._open(character, place)
        elif character in "}]":
            self._close(place)
        elif self._depth == 1 and self._given_name is None:
            self._take_between(character, place)
        elif self._depth == 0 and not character.isspace():
            raise _NotACallError

    def _open_string(self, place: int) -> None:
        if self._given_name is None and self._depth <= 1:
            if self._depth == 0 or self._expects not in ("key", "value"):
                raise _NotACallError
            self._start = place
        self._in_string = True

    def _take_in_string(self, character: str, place: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._given_name is None:
                self._end_string(place + 1)

    def _open(self, character: str, place: int) -> None:
        if self._depth == 0 and character != "{":
            raise _NotACallError
        if self._depth == 1 and self._given_name is None:
            if self._expects != "value":
                raise _NotACallError
            self._begin_value(place)
        self._depth += 1

    def _close(self, place: int) -> None:
        if self._depth == 0:
            raise _NotACallError
        if self._depth == 1 and self._expects == "value":
            self._end_value(place)
        self._depth -= 1
        if self._depth == 1:
            self._end_value(place + 1)
        elif self._depth == 0:
            self._complete(place + 1)

    def _take_between(self, character: str, place: int) -> None:
        """Colons, commas, and values that are neither strings nor have parts."""
        if character.isspace():
            return
        if character == ":" and self._expects == "colon":
            self._expects, self._start = "value", None
        elif character == "," and self._expects in ("value", "comma"):
            if self._expects == "value":
                self._end_value(place)
            self._expects = "key"
        elif self._expects == "value":
            self._begin_value(place)
        else:
            raise _NotACallError

    def _end_string(self, stop: int) -> None:
        if self._expects == "key":
            assert self._start is not None
            self._key = _parsed_string(self.text[self._start : stop])
            self._expects = "colon"
        elif self._expects == "value":
            self._end_value(stop)

    def _begin_value(self, place: int) -> None:
        if self._start is None:
            self._start = place
            is_first = self._arguments is None
            if is_first and self._key in _ARGUMENT_KEYS and self.text[place] == "{":
                self._arguments = (place, None)

    def _end_value(self, stop: int) -> None:
        if self._given_name is not None:
            return
        if self._start is None:
            raise _NotACallError
        value = self.text[self._start : stop]
        if self._key == "name" and self._name is None:
            self._name = _parsed_string(value)
        elif self._key in _ARGUMENT_KEYS and self._arguments in (None, (self._start, None)):
            self._arguments = (self._start, stop)
        self._expects = "comma"

    def _complete(self, stop: int) -> None:
        if self._name is None:
            raise _NotACallError
        if self._given_name is not None:
            self._arguments = (0, stop)
        self.is_complete = True

    def _tell(self) -> Scanned:
        if self._name is None:
            return Scanned()
        name = None if self._is_name_told else self._name
        self._is_name_told = True
        return Scanned(name, self._new_arguments())

    def _new_arguments(self) -> str:
        if self._arguments is None:
            # A call without arguments has the empty ones.
            return "{}" if self.is_complete else ""
        start, stop = self._arguments
        whole = self.text[start:stop].strip() if stop else self.text[start:]
        if not whole.startswith("{"):
            whole = _as_object(whole) if stop and not self._num_told else ""
        told, self._num_told = self._num_told, max(self._num_told, len(whole))
        return whole[told:]


def _parsed_string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        raise _NotACallError from None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME_CHARS:
        raise _NotACallError
    return value


def _as_object(value: str) -> str:
    """Arguments that came as a string hold the JSON; null means none."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    if parsed is None:
        return "{}"
    return parsed if isinstance(parsed, str) else value
