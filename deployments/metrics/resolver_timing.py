"""Times resolvers and fetches, by the name of the backend, and leaves them as they are."""

import time
from collections.abc import Callable

from adapters import LoRARequest
from resolvers.base import (
    AdapterSourceInvalidError,
    Resolver,
    ResolverError,
    SourceFetcher,
    SourceForbiddenError,
    SourceUnavailableError,
)

# Backend, outcome, seconds.
ObserveResolver = Callable[[str, str, float], None]

_OUTCOMES = {
    SourceUnavailableError: "unavailable",
    SourceForbiddenError: "forbidden",
    AdapterSourceInvalidError: "invalid",
}


class TimedResolver:
    """Asks a resolver for names, and says how long it took."""

    def __init__(self, backend: str, resolver: Resolver, observe: ObserveResolver) -> None:
        self._backend = backend
        self._resolver = resolver
        self._observe = observe

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """As the resolver does."""
        began, outcome = time.monotonic(), "error"
        try:
            found = await self._resolver.resolve_lora(base_model_name, lora_name)
            outcome = "not_found" if found is None else "found"
            return found
        except ResolverError as error:
            outcome = _outcome(error)
            raise
        finally:
            self._observe(self._backend, outcome, time.monotonic() - began)


class TimedFetcher:
    """Fetches URIs, and says how long it took."""

    def __init__(self, backend: str, fetcher: SourceFetcher, observe: ObserveResolver) -> None:
        self._backend = backend
        self._fetcher = fetcher
        self._observe = observe

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """As the fetcher does."""
        began, outcome = time.monotonic(), "error"
        try:
            fetched = await self._fetcher.fetch(uri, lora_name, digest)
            outcome = "fetched"
            return fetched
        except FileNotFoundError:
            outcome = "not_found"
            raise
        except ResolverError as error:
            outcome = _outcome(error)
            raise
        finally:
            self._observe(self._backend, outcome, time.monotonic() - began)


def _outcome(error: ResolverError) -> str:
    kinds = (_OUTCOMES[kind] for kind in type(error).__mro__ if kind in _OUTCOMES)
    return next(kinds, "error")
