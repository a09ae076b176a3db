"""Each token's own bytes, which may be a part of a character.

Knows the two ways in which vocabularies spell bytes: byte-level (every byte has a printable
stand-in) and SentencePiece (a mark for the space, ``<0xNN>`` for bytes without a token).
"""

import json
import re
from typing import Any

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Maps token ids to bytes. Unknown ids have none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._is_byte_level = '"ByteLevel"' in _decoder_json(tokenizer)
        self._byte_of = _byte_level_alphabet()

    def __getitem__(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return b"".join(self._bytes_of(character) for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes.fromhex(byte[1])
        return str(token).replace(_SPACE_MARK, " ").encode()

    def _bytes_of(self, character: str) -> bytes:
        byte = self._byte_of.get(character)
        return character.encode() if byte is None else bytes((byte,))


def _decoder_json(tokenizer: Any) -> str:
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps(parts["decoder"])


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins: Latin-1's visible characters are themselves, others follow 255."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet
