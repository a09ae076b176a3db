"""Whoever calls, once the key is known: a name, a role, adapters and limits."""

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one ingress lets in; None is without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


UNLIMITED = Limits()


class AdapterPatterns:
    """A set of names, given by shell patterns in which ``*`` also stands for slashes."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._expressions = [re.compile(fnmatch.translate(pattern)) for pattern in patterns]

    def match(self, name: str) -> bool:
        return any(expression.match(name) for expression in self._expressions)


EVERYTHING = AdapterPatterns(("*",))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyHolder:
    """One holder. ``name`` goes to logs and the journal; keys themselves are not kept here."""

    name: str
    is_admin: bool = False
    adapters: AdapterPatterns = EVERYTHING
    limits: Limits = UNLIMITED


ANONYMOUS = KeyHolder(name="anonymous")
