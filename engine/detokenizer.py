"""Turns a growing list of tokens into text, piece by piece.

Knows one sequence's tokens and stop strings. Knows nothing of logits or of other sequences.
"""

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Enough context for a decoder that treats the first token specially, e.g. strips its space.
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Incremental text of one sequence: never ends inside a character, stops at stop strings.

    Text that may be the beginning of a stop string is held back until that is decided.

    ``shown`` are special tokens that are shown even where others are skipped. Of the tokens in
    ``glued``, one that follows another is written without the space that some decoders put there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown: Mapping[int, str] | None = None,
        glued: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._stream = self._new_stream(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._pending_ids: list[int] = []
        self._held_text = ""
        self._shown = shown or {}
        self._glued = glued or {}
        self._last_is_glued = False
        self.stop_reason: str | None = None

    def append(self, token_id: int) -> str:
        """Take one more token and return the text that is now certain, often empty."""
        if self._shown and token_id in self._shown:
            return self._show(self._shown[token_id])
        self._pending_ids.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001  the binding raises a bare Exception
            # The decoder rewrote text that it had given out; go on from here.
            piece = self._decode_pending()
            self._stream = self._new_stream(())
        if not piece:
            return ""
        self._pending_ids.clear()
        if self._glued:
            piece = self._glue(token_id, piece)
        return self._release(piece)

    def finish(self) -> str:
        """Return the text still held back: it can no longer grow into a stop string."""
        text = self._held_text
        self._held_text = ""
        if self.stop_reason is None and self._pending_ids:
            text += self._decode_pending()
            self._pending_ids.clear()
        return text

    def _show(self, text: str) -> str:
        """Write a token that the decoder would leave out, after what came before it."""
        before = self._decode_pending() if self._pending_ids else ""
        if before:
            self._pending_ids.clear()
            self._stream = self._new_stream(())
        return self._release(before + text)

    def _glue(self, token_id: int, piece: str) -> str:
        follows, self._last_is_glued = self._last_is_glued, token_id in self._glued
        return self._glued[token_id] if follows and self._last_is_glued else piece

    def _new_stream(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=list(context), skip_special_tokens=self._skip_special_tokens)

    def _decode_pending(self) -> str:
        return str(
            self._tokenizer.decode(self._pending_ids, skip_special_tokens=self._skip_special_tokens)
        )

    def _release(self, piece: str) -> str:
        if not self._stop:
            return piece
        text = self._held_text + piece
        found = [(place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            place, self.stop_reason = min(found, key=lambda match: match[0])
            self._held_text = ""
            return text[: place + len(self.stop_reason)] if self._include_stop else text[:place]
        num_held = max(_overlap(text, stop) for stop in self._stop)
        self._held_text = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
