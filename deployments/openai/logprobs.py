"""Log probabilities in the three shapes that clients know: completions, chat, prompt."""

import codecs
from collections.abc import Sequence
from typing import Any

from deployments.openai.tokens import TokenTable
from engine.outputs import PositionLogprobs, RequestOutput, TokenLogprob

# JSON has no infinity; clients of OpenAI and vLLM know this value for "impossible".
_MIN_LOGPROB = -9999.0

Positions = Sequence[PositionLogprobs | None]


class TokenSpeller:
    """How tokens are written: as text, or as ``token_id:123`` when the client asks so.

    Tokens are noted as outputs come, then looked up together, since looking up may mean asking
    another process.
    """

    def __init__(self, table: TokenTable, *, as_ids: bool) -> None:
        self._table = table
        self._as_ids = as_ids
        self._noted: set[int] = set()

    def note(self, output: RequestOutput) -> None:
        """Remember every token that the output's log probabilities mention."""
        for position in (*(output.prompt_logprobs or ()), *(output.logprobs or ())):
            if position is not None:
                self._noted.add(position.chosen.token_id)
                self._noted.update(item.token_id for item in position.top)

    async def load_noted(self) -> None:
        """Look up what was noted; needed before any of it is spelled."""
        if self._noted:
            noted, self._noted = self._noted, set()
            await self._table.load(noted)

    def spell(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._table.text_of(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        return self._table.bytes_of(token_id)

    def text_of(self, token_id: int) -> str:
        return self._table.text_of(token_id)


class CompletionLogprobs:
    """Completions' logprobs of one choice, piece by piece.

    Offsets count characters of the choice's text. A token that ends inside a character counts as
    nothing until the character is whole.
    """

    def __init__(self, speller: TokenSpeller) -> None:
        self._speller = speller
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def format(self, token_ids: Sequence[int], positions: Positions) -> dict[str, Any]:
        """Format the next tokens; a position is None for the first token of a prompt."""
        spell = self._speller.spell
        return {
            "text_offset": [self._advance(token_id) for token_id in token_ids],
            "token_logprobs": [
                None if position is None else _finite(position.chosen) for position in positions
            ],
            "tokens": [spell(token_id) for token_id in token_ids],
            "top_logprobs": [self._top(position) for position in positions],
        }

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._speller.bytes_of(token_id)))
        return offset

    def _top(self, position: PositionLogprobs | None) -> dict[str, float] | None:
        """The k most likely tokens, and the chosen one if it is not among them."""
        if position is None:
            return None
        spell = self._speller.spell
        top = {spell(item.token_id): _finite(item) for item in position.top}
        top.setdefault(spell(position.chosen.token_id), _finite(position.chosen))
        return top


def chat_logprobs(positions: Sequence[PositionLogprobs], speller: TokenSpeller) -> dict[str, Any]:
    """Chat's logprobs of some tokens."""
    return {
        "content": [
            {
                **_chat_token(position.chosen, speller),
                "top_logprobs": [_chat_token(item, speller) for item in position.top],
            }
            for position in positions
        ]
    }


def _chat_token(item: TokenLogprob, speller: TokenSpeller) -> dict[str, Any]:
    return {
        "token": speller.spell(item.token_id),
        "logprob": _finite(item),
        "bytes": list(speller.bytes_of(item.token_id)),
    }


def prompt_logprobs(positions: Positions, speller: TokenSpeller) -> list[dict[str, Any] | None]:
    """vLLM's prompt logprobs: for each token a table by token id, null for the first."""
    return [
        None
        if position is None
        else {
            str(item.token_id): {
                "logprob": _finite(item),
                "rank": item.rank,
                "decoded_token": speller.text_of(item.token_id),
            }
            for item in (position.chosen, *position.top)
        }
        for position in positions
    ]


def _finite(item: TokenLogprob) -> float:
    return max(item.logprob, _MIN_LOGPROB)
