"""The adapters that one replica has checked and given to its engine, by digest.

Loads each at most once at a time and frees what nothing uses. Knows the engine and the sources;
knows nothing of names' meaning.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from adapters import LoRARequest
from deployments.cluster_protocol import Residency
from deployments.engine_port import AdapterEngine
from deployments.keyed_lock import KeyedLock
from deployments.model_profile import ModelProfile, read_profile
from deployments.sources import AdapterSources
from engine.errors import AdapterNotLoadedError, EngineError, InvalidAdapterError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """Bytes that the engine accepted, and where they are on this machine.

    ``profile`` is what the adapter says of how it wants to be talked to.
    """

    request: LoRARequest
    rank: int
    size_bytes: int
    profile: ModelProfile = field(default_factory=ModelProfile)


class ObserveLoad(Protocol):
    """Is told how long a load took, and whether it failed."""

    def __call__(self, seconds: float, *, failed: bool) -> None: ...


class LocalAdapters:
    """Brings adapters to the engine and takes them away again."""

    def __init__(
        self,
        engine: AdapterEngine,
        sources: AdapterSources,
        is_used: Callable[[str], bool],
        *,
        observe_load: ObserveLoad | None = None,
    ) -> None:
        self._engine = engine
        self._sources = sources
        self._is_used = is_used
        self._observe_load = observe_load
        self._loaded: dict[str, LoadedAdapter] = {}
        self._pinned: set[str] = set()
        self._digests = KeyedLock()

    def is_loaded(self, digest: str) -> bool:
        """Whether the engine knows these bytes."""
        return digest in self._loaded

    async def ensure(self, name: str, digest: str, source_uri: str) -> LoadedAdapter:
        """Have the engine know these bytes; raises what source or engine say against it."""
        loaded = self._loaded.get(digest)
        if loaded is not None:
            return loaded
        async with self._digests.hold(digest):
            if digest not in self._loaded:
                self._loaded[digest] = await self._load(name, digest, source_uri)
            return self._loaded[digest]

    @asynccontextmanager
    async def use(self, name: str, digest: str, source_uri: str) -> AsyncIterator[LoadedAdapter]:
        """Have the engine know these bytes, and be able to read them again, for a while."""
        loaded = await self.ensure(name, digest, source_uri)
        async with self._sources.provide(name, source_uri, digest=digest):
            yield loaded

    async def forget_unused(self, digest: str) -> None:
        """Take bytes from the engine if nothing uses them any more."""
        async with self._digests.hold(digest):
            if self._is_used(digest) or digest not in self._loaded:
                return
            del self._loaded[digest]
            self._pinned.discard(digest)
            await self._engine.remove_lora(digest)

    async def pin(self, digest: str) -> None:
        """Keep loaded bytes in memory, or raise CapacityError."""
        async with self._digests.hold(digest):
            if digest in self._loaded and digest not in self._pinned:
                await self._pin(digest)

    async def set_pins(self, wanted: Callable[[], set[str]]) -> None:
        """Pin what is wanted, as far as it is loaded, and nothing else.

        Each digest is looked at when its turn comes, since what is wanted may change meanwhile.
        """
        for digest in self._pinned ^ (wanted() & self._loaded.keys()):
            async with self._digests.hold(digest):
                if digest not in self._loaded:
                    continue
                try:
                    if digest in wanted() and digest not in self._pinned:
                        await self._pin(digest)
                    elif digest not in wanted() and digest in self._pinned:
                        await self._engine.unpin_lora(digest)
                        self._pinned.discard(digest)
                except EngineError as error:
                    logger.warning("cannot change the pin of adapter %s: %s", digest, error)

    async def _pin(self, digest: str) -> None:
        try:
            await self._engine.pin_lora(digest)
        except AdapterNotLoadedError:
            # It made room for others in the meantime.
            request = self._loaded[digest].request
            source_uri = request.source_uri or ""
            async with self._sources.provide(request.lora_name, source_uri, digest=digest):
                await self._engine.load_lora(request)
            await self._engine.pin_lora(digest)
        self._pinned.add(digest)

    def residency(self) -> tuple[Residency, ...]:
        """What the engine holds in memory."""
        return tuple(
            Residency(
                digest=held.digest, host=held.host, slot=held.slot, num_running=held.num_running
            )
            for held in self._engine.loras()
            if held.host or held.slot is not None
        )

    def load(self) -> tuple[int, int]:
        """How many requests run and wait."""
        stats = self._engine.stats()
        return stats.num_running, stats.num_waiting

    async def _load(self, name: str, digest: str, source_uri: str) -> LoadedAdapter:
        began, is_loaded = time.monotonic(), False
        try:
            loaded = await self._load_undamaged(name, digest, source_uri)
            is_loaded = True
            return loaded
        finally:
            if self._observe_load is not None:
                self._observe_load(time.monotonic() - began, failed=not is_loaded)

    async def _load_undamaged(self, name: str, digest: str, source_uri: str) -> LoadedAdapter:
        try:
            return await self._load_once(name, digest, source_uri)
        except InvalidAdapterError:
            if not await self._sources.discard_damaged(digest):
                raise
        return await self._load_once(name, digest, source_uri)

    async def _load_once(self, name: str, digest: str, source_uri: str) -> LoadedAdapter:
        async with self._sources.provide(name, source_uri, digest=digest) as path:
            request = LoRARequest(
                lora_name=name, lora_path=str(path), digest=digest, source_uri=source_uri
            )
            profile = await asyncio.to_thread(read_profile, path)
            info = await self._engine.load_lora(request)
            return LoadedAdapter(
                request=request,
                rank=info.rank,
                size_bytes=info.size_bytes,
                profile=profile,
            )
