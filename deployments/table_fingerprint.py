"""A number that two tables of names share if they say the same.

Independent of order. Knows what names mean, nothing of who compares.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias

_BYTES = 8


def fingerprint(
    adapters: Mapping[str, AdapterVersion],
    kept: Mapping[str, Sequence[AdapterVersion]],
    aliases: Iterable[AdapterAlias],
) -> int:
    """Fingerprint of a table: of each name the version, the earlier ones, and the aliases."""
    total = 0
    for name, version in adapters.items():
        earlier = "".join(_text(each) for each in kept.get(name, ()))
        total ^= _number(f"{name}{_text(version)}{version.pinned}{earlier}")
    for alias in aliases:
        total ^= _number(alias.to_json())
    return total


def _text(version: AdapterVersion) -> str:
    return f"@{version.generation}:{version.digest}"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=_BYTES).digest())
