"""From what an operator or a resolver names to bytes in the node's store.

Knows which places adapters may come from, and that a digest fixes the bytes. Adapters are copied
into the store even from a local directory: what was registered is then still there when somebody
writes to that directory, and half a write is never served. Knows nothing of names in service,
replicas or the engine.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapters import AdapterChangedError, LoRARequest, find_adapter_files
from deployments.errors import (
    AdapterSourceError,
    ClusterError,
    InvalidAdapterSourceError,
    PathNotAllowedError,
    ResolverForbiddenError,
    ResolverUnavailableError,
)
from resolvers.base import (
    AdapterSourceInvalidError,
    Resolver,
    SourceFetcher,
    SourceForbiddenError,
    SourceUnavailableError,
)
from resolvers.chain import ResolverChain
from resolvers.store import AdapterStore

logger = logging.getLogger(__name__)

# The URI of what a resolver found without giving one: each node must ask its resolvers.
_BY_NAME = "resolver:"
# Between fetching and using, others may need the room.
_MAX_FETCHES = 3
_OPEN_TIMEOUT_S = 120.0


class LocalFetcher:
    """``file:`` URIs and paths: the directory itself."""

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Return the directory; whoever takes it into the store sees which bytes it holds."""
        path = _local_path(uri)
        return LoRARequest(lora_name=lora_name, lora_path=str(path), source_uri=path.as_uri())


class AdapterSources:
    """Every place that adapters come from, and the store that they go to.

    ``resolver`` answers for names, usually a chain of several. ``allowed_roots`` are directories
    or URI prefixes; ``fetchers`` go by URI scheme beside the built-in ``file``.
    """

    def __init__(
        self,
        base_model: str,
        store: AdapterStore,
        *,
        resolver: Resolver | None = None,
        allowed_roots: Sequence[str] = (),
        fetchers: Mapping[str, SourceFetcher] | None = None,
        open_timeout_s: float = _OPEN_TIMEOUT_S,
    ) -> None:
        self._base_model = base_model
        self._open_timeout_s = open_timeout_s
        self._store = store
        self._resolver = resolver or ResolverChain(())
        self._fetchers: dict[str, SourceFetcher] = {"file": LocalFetcher(), **(fetchers or {})}
        self._roots = [Path(root).resolve() for root in allowed_roots if not _is_uri(root)]
        self._uri_roots = [root.rstrip("/") + "/" for root in allowed_roots if _is_uri(root)]

    async def find(self, name: str) -> LoRARequest | None:
        """Ask the resolvers for a name; None if none of them knows it."""
        with _failures_of(name, name):
            found = await self._resolver.resolve_lora(self._base_model, name)
            return None if found is None else await asyncio.to_thread(self._take, found)

    async def open(self, name: str, source: str) -> LoRARequest:
        """Take an operator's path or URI, if it lies under an allowed root."""
        uri = self._allowed_uri(source)
        try:
            # Others wait for the name meanwhile, and a file system may hang for good.
            async with asyncio.timeout(self._open_timeout_s):
                return await self.fetch(name, uri, digest=None)
        except TimeoutError as error:
            late = f"{source} did not answer within {self._open_timeout_s:g} s"
            raise ResolverUnavailableError(name, late) from error

    async def fetch(self, name: str, source_uri: str, *, digest: str | None) -> LoRARequest:
        """Bring a source to this node's store, with exactly the registered bytes if given."""
        path = None if digest is None else self._store.find(digest)
        if path is not None:
            return LoRARequest(
                lora_name=name, lora_path=str(path), digest=digest, source_uri=source_uri
            )
        fetcher = self._fetchers.get(urlsplit(source_uri).scheme)
        if fetcher is None:
            return await self._find_again(name, source_uri, digest)
        with _failures_of(name, source_uri):
            fetched = await fetcher.fetch(source_uri, name, digest)
            request = await asyncio.to_thread(self._take, fetched)
        if digest not in (None, request.digest):
            raise AdapterSourceError(
                name,
                source_uri,
                f"its content changed: sha256 {request.digest}, registered was {digest}",
            )
        return request

    @asynccontextmanager
    async def provide(self, name: str, source_uri: str, *, digest: str) -> AsyncIterator[Path]:
        """Keep a registered source's files in this node's store while the block runs."""
        for _ in range(_MAX_FETCHES):
            stored = self._store.hold(digest)
            if stored is not None:
                with stored:
                    yield stored.path
                return
            await self.fetch(name, source_uri, digest=digest)
        raise ResolverUnavailableError(name, "the adapter store is too small for what is in use")

    async def discard_damaged(self, digest: str) -> bool:
        """Take bytes out of the store that are not what their digest says any more."""
        return await asyncio.to_thread(self._store.discard_damaged, digest)

    async def _find_again(self, name: str, source_uri: str, digest: str | None) -> LoRARequest:
        """Ask the resolvers on this machine for a URI that only they understand."""
        request = await self.find(name)
        if request is None or (digest is not None and request.digest != digest):
            raise AdapterSourceError(name, source_uri, "no source here provides these bytes")
        return request

    def _take(self, request: LoRARequest) -> LoRARequest:
        """Have an adapter's files in the store, wherever its resolver put them."""
        if request.digest is not None and self._store.find(request.digest) is not None:
            digest, path = request.digest, self._store.path_of(request.digest)
        else:
            digest, path = self._store.add(find_adapter_files(Path(request.lora_path)))
        if request.digest not in (None, digest):
            raise AdapterSourceInvalidError(
                f"its files have digest {digest}, its resolver said {request.digest}"
            )
        source_uri = request.source_uri or _BY_NAME + request.lora_name
        return replace(request, lora_path=str(path), digest=digest, source_uri=source_uri)

    def _allowed_uri(self, source: str) -> str:
        if _is_uri(source) and urlsplit(source).scheme != "file":
            segments = unquote(urlsplit(source).path).split("/")
            if ".." in segments or not any(_is_under(source, root) for root in self._uri_roots):
                raise PathNotAllowedError(source)
            return source
        path = _local_path(source) if _is_uri(source) else Path(source)
        try:
            return self._allowed_directory(path).as_uri()
        except (ValueError, OSError) as error:  # no path at all: a null byte, too long
            raise PathNotAllowedError(source) from error

    def _allowed_directory(self, path: Path) -> Path:
        # Links are followed first: what counts is where the files are.
        candidates = [Path(os.path.realpath(root / path)) for root in (Path.cwd(), *self._roots)]
        allowed = [path for path in candidates if self._is_allowed(path)]
        if not allowed:
            raise PathNotAllowedError(str(path))
        return next((path for path in allowed if path.is_dir()), allowed[0])

    def _is_allowed(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)


@contextmanager
def _failures_of(name: str, source: str) -> Iterator[None]:
    """Translate what sources say; what they did not mean to say is only logged."""
    try:
        yield
    except ClusterError:
        raise
    except (SourceUnavailableError, AdapterChangedError) as error:
        retry_after_s = getattr(error, "retry_after_s", None)
        raise ResolverUnavailableError(name, str(error), retry_after_s=retry_after_s) from error
    except SourceForbiddenError as error:
        raise ResolverForbiddenError(name, str(error)) from error
    except AdapterSourceInvalidError as error:
        raise InvalidAdapterSourceError(name, source, str(error)) from error
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError) as error:
        raise AdapterSourceError(name, source, str(error)) from error
    except Exception as error:
        logger.exception("the source of adapter %s failed", name)
        raise ResolverUnavailableError(name, f"failed with {type(error).__name__}") from error


def _is_uri(source: str) -> bool:
    return "://" in source


def _is_under(uri: str, root: str) -> bool:
    # On the Hub, what follows the place is a revision of it; elsewhere "@" is a letter of the name.
    path = uri.partition("@")[0] if uri.startswith("hf://") else uri
    return f"{path}/".startswith(root)


def _local_path(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))
