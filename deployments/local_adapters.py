"""The adapters that one replica has checked and given to its engine, by digest.

Loads each at most once at a time and frees what nothing uses. Knows the engine and the sources;
knows nothing of names' meaning.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from adapters import LoRARequest
from deployments.cluster_protocol import Residency
from deployments.engine_port import AdapterEngine
from deployments.keyed_lock import KeyedLock
from deployments.sources import AdapterSources
from engine.errors import EngineError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """Bytes that the engine accepted, and where they are on this machine."""

    digest: str
    lora_path: str
    rank: int
    size_bytes: int


class LocalAdapters:
    """Brings adapters to the engine and takes them away again."""

    def __init__(
        self, engine: AdapterEngine, sources: AdapterSources, is_used: Callable[[str], bool]
    ) -> None:
        self._engine = engine
        self._sources = sources
        self._is_used = is_used
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

    async def forget_unused(self, digest: str) -> None:
        """Take bytes from the engine if nothing uses them any more."""
        async with self._digests.hold(digest):
            if self._is_used(digest) or digest not in self._loaded:
                return
            del self._loaded[digest]
            if digest in self._pinned:
                self._pinned.discard(digest)
                self._engine.unpin_lora(digest)
            await self._engine.remove_lora(digest)

    def pin(self, digest: str) -> None:
        """Keep loaded bytes in memory, or raise CapacityError."""
        if digest not in self._pinned:
            self._engine.pin_lora(digest)
            self._pinned.add(digest)

    def set_pins(self, digests: Iterable[str]) -> None:
        """Pin exactly these, as far as they are loaded."""
        wanted = {digest for digest in digests if digest in self._loaded}
        for digest in self._pinned - wanted:
            self._engine.unpin_lora(digest)
            self._pinned.discard(digest)
        for digest in wanted - self._pinned:
            try:
                self.pin(digest)
            except EngineError as error:
                logger.warning("cannot pin adapter %s: %s", digest, error)

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
        found = await self._sources.fetch(name, source_uri, digest=digest)
        request = LoRARequest(
            lora_name=name, lora_path=found.lora_path, digest=digest, source_uri=source_uri
        )
        info = await self._engine.load_lora(request)
        return LoadedAdapter(
            digest=digest, lora_path=found.lora_path, rank=info.rank, size_bytes=info.size_bytes
        )
