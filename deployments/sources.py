"""From what an operator or a resolver names to bytes in a local directory.

Knows which places adapters may come from, and that a digest fixes the bytes. Knows nothing of
names in service, replicas or the engine.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.errors import (
    AdapterSourceError,
    ClusterError,
    PathNotAllowedError,
    ResolverUnavailableError,
)


class Resolver(Protocol):
    """Finds an adapter by name."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return a local directory, or None for "not mine"."""


class SourceFetcher(Protocol):
    """Brings one kind of URI to a local directory."""

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Return a local directory holding what the URI names, with exactly these bytes if given.

        Raises FileNotFoundError when there is nothing, another error when that is unknown.
        """


class LocalFetcher:
    """``file:`` URIs and paths: the directory itself, digested."""

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Digest the directory's files; refuses other bytes than asked for."""
        path = _local_path(uri)
        found = await asyncio.to_thread(_digest_directory, path)
        if digest is not None and found != digest:
            raise AdapterSourceError(
                lora_name, uri, f"its content changed: sha256 {found}, registered was {digest}"
            )
        return LoRARequest(
            lora_name=lora_name, lora_path=str(path), digest=found, source_uri=path.as_uri()
        )


class AdapterSources:
    """Every place that adapters come from.

    ``resolvers`` are tried in order; one that fails ends the search, because the name may be its
    own and a later source would then put other bytes in service. ``allowed_roots`` are directories
    or URI prefixes; ``fetchers`` go by URI scheme beside the built-in ``file``.
    """

    def __init__(
        self,
        base_model: str,
        *,
        resolvers: Sequence[Resolver] = (),
        allowed_roots: Sequence[str] = (),
        fetchers: Mapping[str, SourceFetcher] | None = None,
    ) -> None:
        self._base_model = base_model
        self._resolvers = tuple(resolvers)
        self._fetchers: dict[str, SourceFetcher] = {"file": LocalFetcher(), **(fetchers or {})}
        self._roots = [Path(root).resolve() for root in allowed_roots if not _is_uri(root)]
        self._uri_roots = [root.rstrip("/") + "/" for root in allowed_roots if _is_uri(root)]

    async def find(self, name: str) -> LoRARequest | None:
        """Ask the resolvers for a name; None if none of them knows it."""
        for resolver in self._resolvers:
            try:
                found = await resolver.resolve_lora(self._base_model, name)
            except ClusterError:
                raise
            except Exception as error:
                detail = f"{type(resolver).__name__}: {error or type(error).__name__}"
                raise ResolverUnavailableError(name, detail) from error
            if found is not None:
                return await asyncio.to_thread(_completed, found)
        return None

    async def open(self, name: str, source: str) -> LoRARequest:
        """Take an operator's path or URI, if it lies under an allowed root."""
        uri = self._allowed_uri(source)
        return await self.fetch(name, uri, digest=None)

    async def fetch(self, name: str, source_uri: str, *, digest: str | None) -> LoRARequest:
        """Bring a registered source to this machine, with exactly the registered bytes."""
        fetcher = self._fetchers.get(urlsplit(source_uri).scheme)
        if fetcher is None:
            return await self._find_again(name, source_uri, digest)
        try:
            request = await fetcher.fetch(source_uri, name, digest)
        except ClusterError:
            raise
        except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError) as error:
            raise AdapterSourceError(name, source_uri, str(error)) from error
        except Exception as error:
            detail = str(error) or type(error).__name__
            raise ResolverUnavailableError(name, detail) from error
        return await asyncio.to_thread(_completed, request)

    async def _find_again(self, name: str, source_uri: str, digest: str | None) -> LoRARequest:
        """Ask the resolvers on this machine for a URI that only they understand."""
        request = await self.find(name)
        if request is None or (digest is not None and request.digest != digest):
            raise AdapterSourceError(name, source_uri, "no source here provides these bytes")
        return request

    def _allowed_uri(self, source: str) -> str:
        if _is_uri(source) and urlsplit(source).scheme != "file":
            segments = unquote(urlsplit(source).path).split("/")
            if ".." in segments or not any(source.startswith(root) for root in self._uri_roots):
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


def _completed(request: LoRARequest) -> LoRARequest:
    path = Path(request.lora_path).resolve()
    try:
        digest = request.digest or _digest_directory(path)
    except OSError as error:
        raise AdapterSourceError(request.lora_name, request.lora_path, str(error)) from error
    source_uri = request.source_uri or path.as_uri()
    return replace(request, lora_path=str(path), digest=digest, source_uri=source_uri)


def _is_uri(source: str) -> bool:
    return "://" in source


def _local_path(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


def _digest_directory(path: Path) -> str:
    return adapter_digest(find_adapter_files(path))
