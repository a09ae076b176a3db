"""What a resolver is, and what it may say when it cannot answer.

    ResolverError
    ├── AdapterSourceInvalidError   the source has the name, but not as an adapter that can be used
    ├── SourceUnavailableError      the source did not answer; try again (``retry_after_s``)
    │   └── StoreFullError          this node has no room for the adapter
    ├── SourceForbiddenError        the source refuses us: credentials, permissions, no such bucket
    └── ResolverConfigError         the configuration of a resolver makes no sense

"Not mine" is None and "there is nothing" FileNotFoundError: neither is a failure of the source.
Messages are shown to callers, so they hold no secrets.
"""

from typing import Protocol, runtime_checkable

from adapters import LoRARequest


class ResolverError(Exception):
    """Base of everything a resolver raises on purpose."""


class AdapterSourceInvalidError(ResolverError):
    """The source has this name, but what it has cannot be an adapter: too large, incomplete."""


class SourceUnavailableError(ResolverError):
    """The source could not be asked, so it is unknown whether it has the adapter."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StoreFullError(SourceUnavailableError):
    """The node's store has no room: its disk is full, or all that it holds is in use."""


class SourceForbiddenError(ResolverError):
    """The source refuses to answer us, and will until somebody changes the configuration."""


class ResolverConfigError(ResolverError, ValueError):
    """A resolver cannot be built from what the configuration says."""


class Resolver(Protocol):
    """Finds adapters by name."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter in a local directory, or None for "not mine"."""


class SourceFetcher(Protocol):
    """Brings one kind of URI to a local directory."""

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Return a local directory holding what the URI names, with exactly these bytes if given.

        Raises FileNotFoundError when there is nothing, a ResolverError when that is unknown.
        """


@runtime_checkable
class UriResolver(Resolver, SourceFetcher, Protocol):
    """A resolver that also fetches URIs: what it found by name, and what operators name."""

    @property
    def scheme(self) -> str:
        """The scheme of its URIs."""

    def covers(self, uri: str) -> bool:
        """Whether a URI is for this resolver to fetch."""
