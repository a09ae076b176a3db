"""Builds resolvers by name: built in, installed as entry points, or given as a dotted path.

Knows how plug-ins are found and in which order they are asked. Knows nothing of what they do.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from typing import Any

from resolvers.base import Resolver, ResolverConfigError
from resolvers.chain import DEFAULT_TIMEOUT_S, Link
from resolvers.store import AdapterStore

ENTRY_POINTS = "lorafleet.resolvers"

BUILT_IN = {
    "filesystem": "resolvers.filesystem:FilesystemResolver",
    "s3": "resolvers.s3:S3Resolver",
    "hub": "resolvers.hub:HubResolver",
}
# What the same sources are called where people come from.
ALIASES = {
    "lora_filesystem_resolver": "filesystem",
    "lora_s3_resolver": "s3",
    "lora_hf_hub_resolver": "hub",
}

# Whole adapters travel within these; others only look up.
_DOWNLOAD_TIMEOUT_S = {"s3": 120.0, "hub": 120.0}

# Keys of a resolver's entry in the configuration that are not its own.
_NAME = "name"
_TIMEOUT = "timeout_s"
# A constructor that has this parameter is given the node's store.
_STORE = "store"


def order_entries(
    entries: Sequence[Mapping[str, Any]], order: Sequence[str] | None
) -> list[Mapping[str, Any]]:
    """Keep only the resolvers named in ``order``, in that order; all, as they are, if None."""
    if order is None:
        return list(entries)
    wanted = [canonical_name(name) for name in order]
    return [
        entry for name in wanted for entry in entries if canonical_name(entry.get(_NAME)) == name
    ]


def places(entry: Mapping[str, Any]) -> list[str]:
    """Directories and URI prefixes where a built-in resolver looks for adapters."""
    uri = str(entry.get("uri", "")).partition("{")[0]
    repositories = [f"hf://{place}" for place in entry.get("allowed", ())]
    return [*entry.get("directories", ()), *([uri] if uri else []), *repositories]


def check_entry(entry: Mapping[str, Any]) -> None:
    """Raise ResolverConfigError unless a resolver can be built from this."""
    _bind(entry, store=None)
    _timeout_s(entry)


def build_link(entry: Mapping[str, Any], store: AdapterStore) -> Link:
    """Build one resolver from its entry in the configuration."""
    factory, options = _bind(entry, store)
    try:
        resolver = factory(**options)
    except (TypeError, ValueError) as error:
        raise ResolverConfigError(f"resolver {entry[_NAME]!r}: {error}") from error
    return Link(canonical_name(entry[_NAME]), resolver, _timeout_s(entry))


def canonical_name(name: object) -> str:
    """The name that a resolver goes by, whatever the configuration calls it."""
    if not isinstance(name, str) or not name:
        raise ResolverConfigError(f"a resolver needs a name, got {name!r}")
    return ALIASES.get(name, name)


def _bind(
    entry: Mapping[str, Any], store: AdapterStore | None
) -> tuple[Callable[..., Resolver], dict[str, Any]]:
    factory = find_factory(canonical_name(entry.get(_NAME)))
    options = {key: value for key, value in entry.items() if key not in (_NAME, _TIMEOUT)}
    signature = inspect.signature(factory)
    if _STORE in options:
        raise ResolverConfigError(f"resolver {entry[_NAME]!r}: {_STORE!r} cannot be configured")
    if _STORE in signature.parameters:
        options[_STORE] = store
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ResolverConfigError(f"resolver {entry[_NAME]!r}: {error}") from error
    return factory, options


def find_factory(name: str) -> Callable[..., Resolver]:
    """Return the class behind a name: built in, an entry point, or ``package.module.Class``."""
    if name in BUILT_IN:
        return _import(name, BUILT_IN[name])
    for entry_point in metadata.entry_points(group=ENTRY_POINTS, name=name):
        return _import(name, entry_point.value)
    if "." in name or ":" in name:
        module, _, attribute = name.replace(":", ".").rpartition(".")
        return _import(name, f"{module}:{attribute}")
    installed = sorted(point.name for point in metadata.entry_points(group=ENTRY_POINTS))
    known = ", ".join((*BUILT_IN, *installed))
    raise ResolverConfigError(f"no resolver is called {name!r}; there are {known}")


def _import(name: str, target: str) -> Callable[..., Resolver]:
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ResolverConfigError(f"resolver {name!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise ResolverConfigError(f"resolver {name!r}: {target} is not a class")
    return factory  # type: ignore[no-any-return]


def _timeout_s(entry: Mapping[str, Any]) -> float:
    default = _DOWNLOAD_TIMEOUT_S.get(canonical_name(entry.get(_NAME)), DEFAULT_TIMEOUT_S)
    timeout_s = entry.get(_TIMEOUT, default)
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ResolverConfigError(f"resolver {entry[_NAME]!r}: timeout_s must be positive")
    return float(timeout_s)
