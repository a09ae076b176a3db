"""Adapters in host memory: bounded, least recently used first out, loaded once.

Knows digests, recency, pins and holds. Knows nothing of files or devices. Every method may be
called from any thread; none waits for a load except the callers of that same load.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from engine.errors import AdapterNotLoadedError, CapacityError
from engine.lora.adapter import AdapterInfo, LoRAAdapter


@dataclass(frozen=True, slots=True)
class HostResidency:
    """What the cache holds of one adapter."""

    info: AdapterInfo
    pinned: bool
    num_holds: int


@dataclass(slots=True)
class _Entry:
    adapter: LoRAAdapter
    pinned: bool = False
    num_holds: int = 0
    removed: bool = False

    @property
    def is_evictable(self) -> bool:
        return not self.pinned and self.num_holds == 0


class HostCache:
    """At most ``max_cpu_loras`` adapters by digest.

    A hold keeps an adapter for a running request; a pin keeps it until it is unpinned or removed.
    A removed adapter is gone for everyone at once, but keeps its place until its last hold ends.
    """

    def __init__(self, max_cpu_loras: int) -> None:
        self._max_cpu_loras = max_cpu_loras
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._loads: dict[str, Future[LoRAAdapter]] = {}
        self._lock = Lock()

    def get(self, digest: str) -> LoRAAdapter | None:
        """Return the adapter as the most recently used one, None when it is not resident."""
        with self._lock:
            entry = self._find(digest)
            if entry is None:
                return None
            self._entries.move_to_end(digest)
            return entry.adapter

    def put(self, adapter: LoRAAdapter) -> None:
        """Take the adapter in, evicting the least recently used one if there is no room."""
        with self._lock:
            self._put(adapter)

    def get_or_load(self, digest: str, load: Callable[[], LoRAAdapter]) -> LoRAAdapter:
        """Return the resident adapter or load it; simultaneous callers share one load.

        Raises what ``load`` raises, CapacityError when nothing can be evicted, and
        AdapterNotLoadedError when the adapter was removed meanwhile.
        """
        with self._lock:
            entry = self._find(digest)
            if entry is not None:
                self._entries.move_to_end(digest)
                return entry.adapter
            running = self._loads.get(digest)
            if running is None:
                self._find_room(digest)
                mine = self._loads[digest] = Future()
        if running is not None:
            return running.result()
        try:
            adapter = load()
            self._finish(digest, mine, adapter)
        except BaseException as error:
            with self._lock:
                self._forget_load(digest, mine)
            mine.set_exception(error)
            raise
        mine.set_result(adapter)
        return adapter

    def pin(self, digest: str) -> None:
        """Never evict the adapter until ``unpin`` or ``remove``."""
        with self._lock:
            self._resident(digest).pinned = True

    def unpin(self, digest: str) -> None:
        """Allow eviction again. An adapter that is not pinned stays as it is."""
        with self._lock:
            self._resident(digest).pinned = False

    def hold(self, digest: str) -> LoRAAdapter:
        """Keep the adapter until a ``release`` for each hold."""
        with self._lock:
            entry = self._resident(digest)
            entry.num_holds += 1
            self._entries.move_to_end(digest)
            return entry.adapter

    def release(self, digest: str) -> None:
        """End one hold; the last one frees an adapter that was removed meanwhile."""
        with self._lock:
            entry = self._entries.get(digest)
            assert entry is not None and entry.num_holds > 0, f"release without hold of {digest}"
            entry.num_holds -= 1
            if entry.removed and entry.num_holds == 0:
                del self._entries[digest]

    @contextmanager
    def holding(self, digest: str) -> Iterator[LoRAAdapter]:
        """Hold the adapter while the block runs."""
        adapter = self.hold(digest)
        try:
            yield adapter
        finally:
            self.release(digest)

    def remove(self, digest: str) -> bool:
        """Forget the adapter, pinned or not, and what is being loaded of it; False if unknown."""
        with self._lock:
            was_loading = self._loads.pop(digest, None) is not None
            entry = self._find(digest)
            if entry is None:
                return was_loading
            entry.removed = True
            entry.pinned = False
            if entry.num_holds == 0:
                del self._entries[digest]
            return True

    def resident(self) -> list[HostResidency]:
        """What is resident, least recently used first."""
        with self._lock:
            return [
                HostResidency(entry.adapter.info, entry.pinned, entry.num_holds)
                for entry in self._entries.values()
                if not entry.removed
            ]

    def _find(self, digest: str) -> _Entry | None:
        entry = self._entries.get(digest)
        return None if entry is None or entry.removed else entry

    def _resident(self, digest: str) -> _Entry:
        entry = self._find(digest)
        if entry is None:
            raise AdapterNotLoadedError(f"adapter with digest {digest} is not in host memory")
        return entry

    def _put(self, adapter: LoRAAdapter) -> None:
        entry = self._entries.get(adapter.digest)
        if entry is not None:
            # The digest fixes the bytes, so a removed entry that is still held can serve again.
            entry.removed = False
            self._entries.move_to_end(adapter.digest)
            return
        victim = self._find_room(adapter.digest)
        if victim is not None:
            del self._entries[victim]
        self._entries[adapter.digest] = _Entry(adapter)

    def _find_room(self, digest: str) -> str | None:
        """The adapter that must go for this one, None if there is room."""
        if digest in self._entries or len(self._entries) < self._max_cpu_loras:
            return None
        for candidate, entry in self._entries.items():
            if entry.is_evictable:
                return candidate
        raise CapacityError(
            f"all max_cpu_loras={self._max_cpu_loras} adapters in host memory are pinned or in use"
        )

    def _finish(self, digest: str, load: Future[LoRAAdapter], adapter: LoRAAdapter) -> None:
        assert adapter.digest == digest, "a load must return the adapter that was asked for"
        with self._lock:
            if self._loads.get(digest) is not load:
                raise AdapterNotLoadedError(
                    f"adapter with digest {digest} was removed while it was loaded"
                )
            self._put(adapter)
            self._forget_load(digest, load)

    def _forget_load(self, digest: str, load: Future[LoRAAdapter]) -> None:
        if self._loads.get(digest) is load:
            del self._loads[digest]
