"""Tells whether an adapter's tokenizer reads text as the base model's does.

Trainers save the tokenizer beside the adapter, nearly always the base model's own. One with tokens
of its own would turn prompts into other ids than those that are served, so it is refused. Knows
tokenizer files. Knows nothing of weights.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.errors import InvalidAdapterError, UnsupportedAdapterError

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
ADDED_TOKENS_FILE = "added_tokens.json"

_MAX_FILE_BYTES = 128 << 20
# How batches are cut and filled, and the format's number: nothing of how a text is read.
_NOT_READING = ("padding", "truncation", "version")
# Adapters of one trainer share a tokenizer, so few are ever compared.
_MAX_REMEMBERED = 64

_Parts = dict[str, Any]


class BaseTokenizer:
    """The base model's tokenizer, to compare adapters' with.

    ``directory`` is the base model's: transformers may load its file as something that it would
    not save again, and adapters come with either.
    """

    def __init__(self, tokenizer: Tokenizer, directory: Path) -> None:
        self._tokenizer = tokenizer
        self._file = directory / TOKENIZER_FILE
        self._remembered: dict[tuple[bytes, str | None], str | None] = {}

    def check(self, directory: Path) -> None:
        """Raise AdapterError unless an adapter's tokenizer files say what the base model's do."""
        pad_token = _pad_token(_read_json(directory / TOKENIZER_CONFIG_FILE))
        text = _read(directory / TOKENIZER_FILE)
        difference = None if text is None else self._find_difference(text, pad_token)
        added = _read_json(directory / ADDED_TOKENS_FILE).items()
        difference = difference or self._unknown_token(added, pad_token)
        if difference is not None:
            raise UnsupportedAdapterError(
                f"its tokenizer is not the base model's: {difference}; a tokenizer of an adapter's "
                "own is not served, so take its files away if prompts are to be read as the base "
                "model reads them"
            )

    @functools.cached_property
    def _accepted(self) -> list[_Parts]:
        text = _read(self._file)
        files = [] if text is None else [Tokenizer.from_str(text)]
        return [_reading(tokenizer) for tokenizer in (self._tokenizer, *files)]

    def _find_difference(self, text: str, pad_token: str | None) -> str | None:
        key = (hashlib.sha256(text.encode()).digest(), pad_token)
        if key not in self._remembered:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = self._difference(text, pad_token)
        return self._remembered[key]

    def _difference(self, text: str, pad_token: str | None) -> str | None:
        try:
            other = _reading(Tokenizer.from_str(text))
        # The binding raises a bare Exception for whatever is wrong.
        except Exception as error:  # noqa: BLE001
            raise InvalidAdapterError(f"{TOKENIZER_FILE} cannot be read: {error}") from None
        differences = [_differing_parts(parts, other, pad_token) for parts in self._accepted]
        if not all(differences):
            return None
        added = ((token["content"], token["id"]) for token in other["added_tokens"])
        return self._unknown_token(added, pad_token) or f"its {', '.join(differences[0])} differ"

    def _unknown_token(
        self, tokens: Iterable[tuple[str, object]], pad_token: str | None
    ) -> str | None:
        for token, token_id in tokens:
            ours = self._tokenizer.token_to_id(token)
            if ours != token_id and token != pad_token:
                there = "the base model has none" if ours is None else f"{ours} in the base model's"
                return f"token {token!a} has id {token_id!a}, {there}"
        return None


def _reading(tokenizer: Tokenizer) -> _Parts:
    """All that decides how a text is read and written, spelled as this library spells it."""
    parts: _Parts = json.loads(tokenizer.to_str())
    return {name: value for name, value in parts.items() if name not in _NOT_READING}


def _differing_parts(ours: _Parts, theirs: _Parts, pad_token: str | None) -> list[str]:
    """A token that only fills batches up is in no prompt, so it makes no difference."""
    sides = [
        {**parts, "added_tokens": [t for t in parts["added_tokens"] if t["content"] != pad_token]}
        for parts in (ours, theirs)
    ]
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if sides[0].get(name) != sides[1].get(name)]


def _pad_token(config: Mapping[str, Any]) -> str | None:
    token = config.get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> _Parts:
    text = _read(path)
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidAdapterError(f"{path.name} must hold a JSON object")
    return fields


def _read(path: Path) -> str | None:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidAdapterError(f"{path.name} is larger than {_MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise InvalidAdapterError(f"{path.name} is not UTF-8") from None
