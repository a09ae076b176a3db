"""The adapters of one engine: host cache, device slots, and who still uses which.

Knows digests and how many requests use each. Knows nothing of names' meaning or of scheduling.

``load`` and ``resident`` may be called from any thread; the rest belongs to the engine's.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from adapters import LoRARequest, adapter_digest, find_adapter_files
from engine.cache.block_table import KVCacheManager
from engine.config import LoRAConfig
from engine.errors import CapacityError, InvalidAdapterError
from engine.executor import ModelExecutor
from engine.lora.adapter import AdapterInfo, LoRAAdapter, load_adapter
from engine.lora.adapter_tokenizer import BaseTokenizer
from engine.lora.host_cache import HostCache
from engine.lora.prefetcher import AdapterPrefetcher
from engine.lora.slots import SlotManager
from engine.stats import LoRAResidency

# Adapters on a GPU that wait for a slot: while one is used, the next ones arrive.
_MAX_UPLOADED = 4


class AdapterSet:
    """Everything the engine knows of adapters.

    A removed adapter serves the requests that already name it and is freed with the last of them.
    """

    def __init__(
        self,
        model: ModelExecutor,
        config: LoRAConfig,
        kv: KVCacheManager,
        executor: Executor,
        tokenizer: BaseTokenizer,
    ) -> None:
        self._model = model
        self._config = config
        self._kv = kv
        self._tokenizer = tokenizer
        self._cache = HostCache(config.max_cpu_loras)
        self.slots = SlotManager(config.max_loras)
        # What is uploaded ahead takes the device's memory beside the slots.
        upload = model.upload
        max_ahead = config.max_loras if upload is None else min(config.max_loras, _MAX_UPLOADED)
        self.prefetcher = AdapterPrefetcher(
            self._cache, self._load, executor, max_ahead=max_ahead, upload=upload
        )
        self._num_users: Counter[str] = Counter()
        self._retired: set[str] = set()
        # Kept while the adapter is known at all: a slot may outlive the copy in host memory.
        self._invocations: dict[str, tuple[int, ...]] = {}

    def load(self, lora: LoRARequest) -> AdapterInfo:
        """Read, check and keep an adapter in host memory; blocks while reading.

        Raises AdapterError when it cannot be served exactly, CapacityError when host memory is full
        of pinned adapters.
        """
        return self._load(lora if lora.digest is not None else _with_digest(lora)).info

    def pin(self, digest: str, *, in_slot: bool = False) -> None:
        """Keep an adapter in host memory, and on request in its slot, until unpinned or removed.

        Raises AdapterNotLoadedError, and CapacityError when too few slots would stay free.
        """
        self._cache.pin(digest)
        if in_slot:
            try:
                self.slots.pin(digest)
            except CapacityError:
                self._cache.unpin(digest)
                raise

    def unpin(self, digest: str) -> None:
        """Let an adapter be evicted again."""
        self.slots.unpin(digest)
        self._cache.unpin(digest)

    def enter(self, lora: LoRARequest) -> None:
        """Note one more sequence that uses the adapter."""
        assert lora.digest is not None
        self._num_users[lora.digest] += 1

    def leave(self, lora: LoRARequest) -> None:
        """Note that one sequence has ended."""
        assert lora.digest is not None
        self._num_users[lora.digest] -= 1
        if not self._num_users[lora.digest]:
            del self._num_users[lora.digest]
            self.prefetcher.forget(lora.digest)
            if lora.digest in self._retired:
                self._free(lora.digest)

    def fill_slot(self, slot: int, digest: str) -> None:
        """Copy the adapter's weights to a slot that no running request uses."""
        self._model.write_slot(slot, self.prefetcher.take(digest))

    def start_in(self, prompt_token_ids: Sequence[int], lora: LoRARequest) -> int:
        """From which token on a loaded adapter is applied: its last invocation, else never."""
        assert lora.digest is not None
        invocation = self._invocations.get(lora.digest)
        if invocation is None:
            return 0
        return last_occurrence(invocation, prompt_token_ids)

    def remove(self, digest: str) -> None:
        """Forget an adapter, pinned or not, as soon as no request uses it."""
        if self._num_users[digest]:
            self._retired.add(digest)
        else:
            self._free(digest)

    def restore(self, digest: str) -> None:
        """Undo a removal that still waits for requests: the adapter is wanted again."""
        self._retired.discard(digest)

    def resident(self) -> list[LoRAResidency]:
        """List what is in host memory or in a slot, each adapter once."""
        in_slots = {item.digest: item for item in self.slots.resident()}
        found = []
        for entry in self._cache.resident():
            slot = in_slots.pop(entry.info.digest, None)
            found.append(
                LoRAResidency(
                    digest=entry.info.digest,
                    lora_name=entry.info.lora_name,
                    host=True,
                    slot=None if slot is None else slot.slot,
                    num_running=0 if slot is None else slot.num_refs,
                    pinned=entry.pinned,
                    size_bytes=entry.info.size_bytes,
                )
            )
        for slot in in_slots.values():
            found.append(
                LoRAResidency(
                    digest=slot.digest,
                    lora_name="",
                    host=False,
                    slot=slot.slot,
                    num_running=slot.num_refs,
                    pinned=slot.is_pinned,
                    size_bytes=0,
                )
            )
        return found

    def _load(self, lora: LoRARequest) -> LoRAAdapter:
        assert lora.digest is not None
        return self._cache.get_or_load(lora.digest, lambda: self._read(lora))

    def _read(self, lora: LoRARequest) -> LoRAAdapter:
        adapter = load_adapter(
            lora,
            self._model.targets,
            self._config,
            self._model.spec.dtype,
            base_weight=self._model.base_weight,
            tokenizer=self._tokenizer,
        )
        if adapter.invocation:
            self._invocations[adapter.digest] = adapter.invocation
        return adapter

    def _free(self, digest: str) -> None:
        self._retired.discard(digest)
        self._cache.remove(digest)
        self._invocations.pop(digest, None)
        self.prefetcher.forget(digest)
        self.slots.unpin(digest)
        slot = self.slots.evict(digest)
        if slot is not None:
            self._model.clear_slot(slot)
        self._kv.drop_adapter(digest)


def last_occurrence(wanted: Sequence[int], token_ids: Sequence[int]) -> int:
    """Where `wanted` last starts in `token_ids`; after every possible token when it does not."""
    wanted = list(wanted)
    for start in range(len(token_ids) - len(wanted), -1, -1):
        if list(token_ids[start : start + len(wanted)]) == wanted:
            return start
    return sys.maxsize


def _with_digest(lora: LoRARequest) -> LoRARequest:
    try:
        digest = adapter_digest(find_adapter_files(Path(lora.lora_path)))
    except OSError as error:
        raise InvalidAdapterError(f"adapter {lora.lora_name!r} cannot be read: {error}") from error
    return replace(lora, digest=digest)
