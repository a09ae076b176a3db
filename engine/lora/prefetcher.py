"""Brings the adapters of waiting requests to where slots take them, without stalling the batch.

That is host memory, and on a GPU the device's own.

Knows which digests are wanted, being loaded or ready. Knows nothing of slots or scheduling. Owned
by the engine's thread; only the loads themselves run elsewhere.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future

from adapters import LoRARequest
from engine.lora.adapter import LoRAAdapter
from engine.lora.host_cache import HostCache

Loader = Callable[[LoRARequest], LoRAAdapter]
Upload = Callable[[LoRAAdapter], LoRAAdapter]


class AdapterPrefetcher:
    """Loads what waiting requests need, at most ``max_ahead`` adapters ahead of the slots.

    It keeps each of them until it was copied to a slot or nobody waits for it any more, whatever
    the host cache evicts meanwhile: otherwise the adapters of a long queue would push each other
    out before any of them is used. So host memory is bounded by max_cpu_loras + max_ahead adapters.
    With ``upload`` it is the device's memory that holds the max_ahead adapters.
    """

    def __init__(
        self,
        cache: HostCache,
        load: Loader,
        executor: Executor,
        *,
        max_ahead: int,
        upload: Upload | None = None,
    ) -> None:
        self._cache = cache
        self._load = load
        self._upload = upload
        self._executor = executor
        self._max_ahead = max_ahead
        self._loads: dict[str, Future[LoRAAdapter]] = {}
        self._ready: dict[str, LoRAAdapter] = {}
        self._unwanted: set[str] = set()
        self.on_loaded: Callable[[], None] = lambda: None

    def is_ready(self, lora: LoRARequest) -> bool:
        """Say whether slots can take the weights now; if not, bring them if there is room."""
        digest = lora.digest
        assert digest is not None
        self._unwanted.discard(digest)
        if digest in self._ready:
            return True
        if digest in self._loads or len(self._ready) + len(self._loads) >= self._max_ahead:
            return False
        adapter = self._cache.get(digest)
        if adapter is not None and self._upload is None:
            self._ready[digest] = adapter
            return True
        future = self._executor.submit(self._bring, lora, adapter)
        self._loads[digest] = future
        future.add_done_callback(lambda _: self.on_loaded())
        return False

    def collect_failures(self) -> dict[str, Exception]:
        """Take in the loads that have ended and return what went wrong, by digest."""
        failures: dict[str, Exception] = {}
        for digest in [digest for digest, future in self._loads.items() if future.done()]:
            future = self._loads.pop(digest)
            error = future.exception()
            if digest in self._unwanted:
                self._unwanted.remove(digest)
            elif error is None:
                self._ready[digest] = future.result()
            elif isinstance(error, Exception):
                failures[digest] = error
            else:
                raise error
        return failures

    def take(self, digest: str) -> LoRAAdapter:
        """Hand over the weights that ``is_ready`` promised, to be copied to a slot."""
        return self._ready.pop(digest)

    def forget(self, digest: str) -> None:
        """Note that nobody waits for the adapter any more."""
        self._ready.pop(digest, None)
        if digest in self._loads:
            # It would keep its place for ever, and enough of them would keep everybody's.
            self._unwanted.add(digest)

    def _bring(self, lora: LoRARequest, adapter: LoRAAdapter | None) -> LoRAAdapter:
        """Load what is not loaded, and upload it; runs on the executor."""
        loaded = self._load(lora) if adapter is None else adapter
        return loaded if self._upload is None else self._upload(loaded)
