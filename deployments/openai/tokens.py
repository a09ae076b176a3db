"""Token ids to the text and bytes that logprobs show."""

from collections.abc import Iterable, Sequence

from deployments.backend import Backend


class TokenTable:
    """Bytes of tokens, asked from the backend once each; at most the vocabulary is kept."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}

    async def load(self, token_ids: Iterable[int]) -> None:
        """Make sure that these tokens can be looked up."""
        missing: Sequence[int] = sorted({each for each in token_ids if each not in self._bytes})
        if missing:
            found = await self._backend.token_bytes(missing)
            self._bytes.update(zip(missing, found, strict=True))

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def text_of(self, token_id: int) -> str:
        """The token as text; one that is only part of a character as ``bytes:\\xe2\\x80``.

        OpenAI's spelling for such tokens. A replacement character would make different tokens
        look the same, and one of them would be lost from a table of top logprobs.
        """
        raw = self._bytes[token_id]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
