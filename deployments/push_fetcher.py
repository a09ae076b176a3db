"""A replica's source of pushed adapters: the controller, unless its directory is on this disk.

Knows parts of files and the node's store. Knows nothing of how parts travel.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.push_store import PUSH_SCHEME, PushStore
from resolvers.base import AdapterSourceInvalidError, SourceUnavailableError
from resolvers.file_lock import LockTimeoutError
from resolvers.store import AdapterStore

_LOCK_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedFile:
    """One file of a pushed adapter, whose parts come when they are awaited."""

    name: str
    size_bytes: int
    parts: Sequence[Awaitable[bytes]]


# Raises FileNotFoundError.
ReadPushed = Callable[[str], Awaitable[Sequence[PushedFile]]]


class PushFetcher:
    """Brings ``push:`` URIs to the node's store; ``read`` asks the controller for the files."""

    def __init__(self, store: AdapterStore, local: PushStore, read: ReadPushed) -> None:
        self._store = store
        self._local = local
        self._read = read

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Bring an adapter here, once for all processes of the node."""
        wanted = uri.removeprefix(f"{PUSH_SCHEME}:")
        local = self._local.find(wanted)
        if local is not None:
            # Digest left out: whoever takes it into the store sees which bytes it holds.
            return LoRARequest(lora_name=lora_name, lora_path=str(local), source_uri=uri)
        cancelled = threading.Event()
        async with AsyncExitStack() as stack:
            stack.callback(cancelled.set)
            lock = self._store.source_lock(uri, cancelled=cancelled, timeout_s=_LOCK_TIMEOUT_S)
            try:
                await asyncio.to_thread(stack.enter_context, lock)
            except LockTimeoutError as error:
                raise SourceUnavailableError("another process is fetching it still") from error
            path = self._store.find(wanted) or await self._copy(wanted)
        return LoRARequest(lora_name=lora_name, lora_path=str(path), digest=wanted, source_uri=uri)

    async def _copy(self, digest: str) -> Path:
        files = await self._read(digest)
        with self._store.stage({file.name: file.size_bytes for file in files}) as staging:
            for file in files:
                offset = 0
                for part in file.parts:
                    data = await part
                    await asyncio.to_thread(staging.write, file.name, offset, data)
                    offset += len(data)
            copied = await asyncio.to_thread(
                lambda: adapter_digest(find_adapter_files(staging.path))
            )
            if copied != digest:
                raise AdapterSourceInvalidError(f"its files have digest {copied}, not {digest}")
            return await asyncio.to_thread(self._store.commit, staging, digest)
