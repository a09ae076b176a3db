"""Aliases: names that stand for adapters, and how requests are split among several.

Pure data and arithmetic. Knows nothing of replicas, the journal or HTTP.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

from adapters import InvalidAdapterNameError, validate_adapter_name
from deployments.errors import AdapterNotFoundError

MAX_TARGETS = 64

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """``adapter`` is a name or ``name@generation``; ``weight`` is relative to the others'."""

    adapter: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterAlias:
    """What an alias stands for from one commit to the next. Generations are those of adapters."""

    name: str
    targets: tuple[AliasTarget, ...]
    generation: int
    created_at: float = 0.0
    created_by: str = ""

    def choose(self, key: str) -> str:
        """The adapter for a request: always the same for the same key.

        The targets take consecutive shares of a fixed order of keys. As the first one's weight
        grows, keys move to it, and none that it has moves away.
        """
        total = sum(target.weight for target in self.targets)
        digest = blake2b(f"{self.name}\0{key}".encode(), digest_size=_HASH_BYTES).digest()
        left = int.from_bytes(digest) / (1 << 8 * _HASH_BYTES) * total
        for target in self.targets:
            left -= target.weight
            if left < 0:
                return target.adapter
        return self.targets[-1].adapter

    def to_json(self) -> str:
        """For the journal."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "AdapterAlias":
        """The inverse."""
        values = json.loads(text)
        values["targets"] = tuple(AliasTarget(**target) for target in values["targets"])
        return cls(**values)


def check_targets(targets: Sequence[AliasTarget]) -> None:
    """Raise ValueError unless an alias may stand for these."""
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise ValueError(f"an alias has 1 to {MAX_TARGETS} targets, got {len(targets)}")
    if len({target.adapter for target in targets}) < len(targets):
        raise ValueError("an alias has each target once")
    for target in targets:
        if not (math.isfinite(target.weight) and target.weight > 0):
            raise ValueError(f"the weight of {target.adapter!r} must be a positive number")


def split_adapter(adapter: str) -> tuple[str, int | None]:
    """Split ``name@generation``. What cannot be a name is the name of nothing."""
    name, at, generation = adapter.partition("@")
    try:
        validate_adapter_name(name)
    except InvalidAdapterNameError as error:
        raise AdapterNotFoundError(adapter) from error
    if not at:
        return name, None
    if not (generation.isascii() and generation.isdigit()):
        raise AdapterNotFoundError(adapter)
    return name, int(generation)
