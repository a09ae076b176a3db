"""Text that may yet turn out to be the beginning of a marker."""

from collections.abc import Sequence


def num_to_hold(text: str, markers: Sequence[str]) -> int:
    """How many characters of the end cannot be passed on yet.

    Those are the beginning of a marker, and the whitespace before it or at the very end, which is
    dropped when a marker follows.
    """
    num_partial = max((_overlap(text, marker) for marker in markers), default=0)
    before = text[: len(text) - num_partial]
    return num_partial + len(before) - len(before.rstrip())


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The place of the marker that comes first, and the marker."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=None)


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
