"""The file of keys: who has which key, may use which adapters, and how much.

Knows the document's shape and rules. Knows nothing of requests. Whatever is wrong is said without
a word of the document's text, because that holds secrets.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deployments.access.key_holder import EVERYTHING, AdapterPatterns, KeyHolder, Limits

MIN_SECRET_CHARS = 16
_MAX_SHOWN_PROBLEMS = 5
# What every HTTP client sends as it is.
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FIELD = re.compile(r"[a-z_]{1,32}", re.ASCII)
_RESERVED_NAMES = frozenset({"admin-key", "anonymous", "api-key"})

Amount = Annotated[int, Field(ge=1, lt=1 << 53)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
# Secrets are never part of a repr, so they are not part of a traceback either.
Secrets = Annotated[tuple[str, ...], Field(min_length=1, max_length=16, repr=False)]


class KeysError(ValueError):
    """A document of keys cannot be used; the message holds none of its text."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class LimitsEntry(_Part):
    """How much in any minute, and at the same time; what is left out is not limited."""

    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrent_requests: Amount | None = None

    def share(self, num_ingresses: int) -> Limits:
        """One ingress' part, rounded down, so that all together never let in more."""
        shares = {}
        for name, amount in self.model_dump(exclude_none=True).items():
            if amount < num_ingresses:
                raise KeysError(
                    f"{name} {amount} cannot be divided among {num_ingresses} ingresses"
                )
            shares[name] = amount // num_ingresses
        return Limits(**shares)


class KeyEntry(_Part):
    """One holder of keys.

    ``secrets`` are several while keys are rotated. Each is the key itself, ``env:NAME`` for one in
    the environment, or ``sha256:HEX`` for its hash. ``adapters`` are shell patterns for names of
    adapters, aliases and the base model, in which ``*`` also stands for slashes.
    """

    name: Name
    secrets: Secrets
    role: Literal["user", "admin"] = "user"
    adapters: tuple[Pattern, ...] = ("*",)
    limits: LimitsEntry = LimitsEntry()


class AdapterLimitsEntry(_Part):
    """What each adapter whose name matches may take from all keys together."""

    adapters: Pattern
    limits: LimitsEntry


class KeysDocument(_Part):
    """All keys. Of ``adapter_limits``, the first that matches a name counts."""

    keys: Annotated[tuple[KeyEntry, ...], Field(min_length=1, max_length=10_000)]
    adapter_limits: Annotated[tuple[AdapterLimitsEntry, ...], Field(max_length=1000)] = ()

    @model_validator(mode="after")
    def _check_names(self) -> "KeysDocument":
        names = [entry.name for entry in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have one name")
        if taken := _RESERVED_NAMES.intersection(names):
            raise ValueError(f"the name {min(taken)!r} is taken")
        return self


@dataclass(frozen=True, slots=True)
class Keys:
    """A document as it is used: secrets by their hashes, limits as one ingress' share."""

    holders: Mapping[bytes, KeyHolder]
    adapter_limits: tuple[tuple[AdapterPatterns, Limits], ...] = ()


def parse_keys(
    text: str, *, num_ingresses: int = 1, environ: Mapping[str, str] = os.environ
) -> Keys:
    """Read and check a document; KeysError says what is wrong with it."""
    document = _validated(text)
    holders: dict[bytes, KeyHolder] = {}
    for entry in document.keys:
        holder = KeyHolder(
            name=entry.name,
            is_admin=entry.role == "admin",
            adapters=EVERYTHING if "*" in entry.adapters else AdapterPatterns(entry.adapters),
            limits=entry.limits.share(num_ingresses),
        )
        for secret in entry.secrets:
            digest = _secret_digest(secret, entry.name, environ)
            if holders.setdefault(digest, holder) is not holder:
                raise KeysError(f"{entry.name!r} and {holders[digest].name!r} share a secret")
    limits = tuple(
        (AdapterPatterns((entry.adapters,)), entry.limits.share(num_ingresses))
        for entry in document.adapter_limits
    )
    return Keys(holders, limits)


def _validated(text: str) -> KeysDocument:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise KeysError(f"it is not YAML{where}") from None
    try:
        return KeysDocument.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
        problems = [
            f"{'.'.join(map(_shown_location, item['loc'])) or 'document'}: {item['msg']}"
            for item in details[:_MAX_SHOWN_PROBLEMS]
        ]
        raise KeysError("; ".join(problems)) from None


def _shown_location(part: int | str) -> str:
    """A place in the document; of text that somebody wrote, only what looks like a field."""
    if isinstance(part, int):
        return str(part)
    return part if _FIELD.fullmatch(part) else "?"


def _secret_digest(secret: str, name: str, environ: Mapping[str, str]) -> bytes:
    kind, _, value = secret.partition(":")
    if kind == "sha256":
        if not _SHA256.fullmatch(value):
            raise KeysError(f"a secret of {name!r} is not sha256: and 64 lower-case hex digits")
        return bytes.fromhex(value)
    if kind == "env":
        secret = environ.get(value, "")
    if len(secret) < MIN_SECRET_CHARS or not _VISIBLE.fullmatch(secret):
        raise KeysError(
            f"a secret of {name!r} is not {MIN_SECRET_CHARS} or more visible ASCII characters"
        )
    return hashlib.sha256(secret.encode()).digest()
