"""Adapters that were sent over HTTP, kept by content until no version means them.

    <root>/incoming/<id>/        being received; its receiver removes what is not taken over
    <root>/adapters/<digest>/    taken over by the controller

Every node must see the same directory: it is the source from which each node's store fetches.
Knows files and digests; knows nothing of HTTP, names or replicas.
"""

import asyncio
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.errors import AdapterSourceError

_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What a receiver that died left behind goes after so long.
_ABANDONED_S = 3600.0


class PushStore:
    """Where pushed adapters are received and kept."""

    def __init__(self, root: Path) -> None:
        self._incoming = root / "incoming"
        self._adapters = root / "adapters"
        self._held: Counter[str] = Counter()
        self._lock = asyncio.Lock()

    # -- at the ingress

    @contextmanager
    def receive(self) -> Iterator[Path]:
        """A directory to write an adapter's files to; what is left of it is removed at the end."""
        path = self._incoming / uuid.uuid4().hex
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def digest(path: Path) -> str:
        """The digest of received files."""
        return adapter_digest(find_adapter_files(path))

    # -- at the controller

    @contextmanager
    def hold(self, digest: str) -> Iterator[None]:
        """Keep an adapter that no version means yet."""
        self._held[digest] += 1
        try:
            yield
        finally:
            self._held[digest] -= 1
            if not self._held[digest]:
                del self._held[digest]

    async def take_over(self, name: str, upload: str, digest: str) -> LoRARequest:
        """Keep received files under their digest, which the receiver has computed."""
        if not _ID.fullmatch(upload) or not _DIGEST.fullmatch(digest):
            raise AdapterSourceError(name, upload, "no such upload")
        async with self._lock:
            path = self._adapters / digest
            try:
                await asyncio.to_thread(_publish, self._incoming / upload, path)
            except FileNotFoundError as error:
                raise AdapterSourceError(
                    name, upload, "the upload is not on the controller's node; see push_dir"
                ) from error
        return LoRARequest(
            lora_name=name, lora_path=str(path), digest=digest, source_uri=path.resolve().as_uri()
        )

    async def remove_unused(self, used: Callable[[], set[str]]) -> None:
        """Remove adapters that nothing means any more, and uploads whose receiver died."""
        async with self._lock:
            wanted = used() | self._held.keys()
            await asyncio.to_thread(self._remove, wanted)

    def _remove(self, wanted: set[str]) -> None:
        for path in _entries(self._adapters):
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)
        limit = time.time() - _ABANDONED_S
        for path in _entries(self._incoming):
            if path.stat().st_mtime < limit:
                shutil.rmtree(path, ignore_errors=True)


def _publish(upload: Path, path: Path) -> None:
    if path.is_dir():
        return
    for entry in upload.iterdir():
        _sync(entry)
    _sync(upload)
    path.parent.mkdir(parents=True, exist_ok=True)
    upload.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []
