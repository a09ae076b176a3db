"""The grammar of adapter names, enforced once at the edge.

A name becomes a directory name, an object-store key and a metric label, so it is kept to
characters that mean nothing special in any of them. No name can leave its root.
"""

import re

MAX_NAME_LENGTH = 128

# Segments of letters, digits, dot, dash and underscore, joined by single slashes ("team/sql").
# A segment starts with a letter or digit, so ".", ".." and hidden files are impossible.
# "@" is reserved for name@generation and ":" for base:adapter.
_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*", re.ASCII)


class InvalidAdapterNameError(ValueError):
    """The name does not follow the grammar."""

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 64 else name[:61] + "..."
        super().__init__(
            f"{shown!r} is not a valid adapter name: use letters, digits, '.', '_' and '-', "
            f"segments separated by '/', each starting with a letter or digit, "
            f"at most {MAX_NAME_LENGTH} characters in all"
        )
        self.name = name


def validate_adapter_name(name: str) -> str:
    """Return the name unchanged, or raise InvalidAdapterNameError."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise InvalidAdapterNameError(name)
    return name
