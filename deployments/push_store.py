"""Adapters that were sent over HTTP, kept by content until no version means them.

    <root>/incoming/<id>/        being received; its receiver removes what is not taken over
    <root>/adapters/<digest>/    taken over by the controller

The ingress receives into its own node's directory; unless the controller sees the same one, the
files go on to it. Replicas fetch them from the controller (``push_fetcher.py``). An archive keeps
them where the controller's disk does not last. Knows files and digests; knows nothing of HTTP,
names or replicas.
"""

import asyncio
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.errors import AdapterSourceError, ReplicaUnavailableError

PUSH_SCHEME = "push"

_ID = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# What a receiver that died left behind goes after so long.
_ABANDONED_S = 3600.0


class PushArchive(Protocol):
    """Keeps pushed adapters beyond the controller's disk. Every method blocks."""

    def keep(self, digest: str, directory: Path) -> None:
        """Keep an adapter's files."""

    def restore(self, digest: str, directory: Path) -> None:
        """Bring an adapter's files back, or raise FileNotFoundError."""

    def remove_all_but(self, digests: Collection[str]) -> None:
        """Remove what nothing means any more."""


class PushStore:
    """Where pushed adapters are received and kept."""

    def __init__(self, root: Path, archive: PushArchive | None = None) -> None:
        self._incoming = root / "incoming"
        self._adapters = root / "adapters"
        self._archive = archive
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

    # -- at every node

    def find(self, digest: str) -> Path | None:
        """Where an adapter is, if the controller keeps it on this node's disk."""
        path = self._adapters / digest
        return path if _DIGEST.fullmatch(digest) and path.is_dir() else None

    # -- at the controller

    def has_upload(self, upload: str) -> bool:
        """Whether what an ingress receives is on this node's disk."""
        return _ID.fullmatch(upload) is not None and (self._incoming / upload).is_dir()

    def write_part(self, upload: str, name: str, offset: int, data: bytes) -> None:
        """Take in part of a file that an ingress on another node received."""
        if not _ID.fullmatch(upload) or not _FILE_NAME.fullmatch(name):
            raise AdapterSourceError(name, upload, "no such upload")
        path = self._incoming / upload / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # At its offset, since a part whose answer was lost comes again.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.seek(offset)
            file.write(data)

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
        """Keep received files under their digest, which the receiver has computed.

        To be called while the digest is held.
        """
        if not _ID.fullmatch(upload) or not _DIGEST.fullmatch(digest):
            raise AdapterSourceError(name, upload, "no such upload")
        async with self._lock:
            path = self._adapters / digest
            try:
                await asyncio.to_thread(_publish, self._incoming / upload, path)
            except FileNotFoundError as error:
                # A controller that ended had taken it over, and the next one saw no use for it.
                raise ReplicaUnavailableError(
                    f"the controller lost what was sent for {name!r}, send it again"
                ) from error
        if self._archive is not None:
            await asyncio.to_thread(self._archive.keep, digest, path)
        return LoRARequest(
            lora_name=name, lora_path=str(path), digest=digest, source_uri=push_uri(digest)
        )

    async def bring(self, digest: str) -> Path:
        """Have an adapter's files on this node's disk; raises FileNotFoundError."""
        async with self._lock:
            path = self.find(digest)
            if path is not None:
                return path
            if self._archive is None or not _DIGEST.fullmatch(digest):
                raise FileNotFoundError(f"no pushed adapter has the digest {digest}")
            path = self._adapters / digest
            with self.receive() as upload:
                await asyncio.to_thread(self._archive.restore, digest, upload)
                await asyncio.to_thread(_move, upload, path)
            return path

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
        if self._archive is not None:
            self._archive.remove_all_but(wanted)


def push_uri(digest: str) -> str:
    """The source of a pushed adapter."""
    return f"{PUSH_SCHEME}:{digest}"


def _publish(upload: Path, path: Path) -> None:
    if not path.is_dir():
        _move(upload, path)
    shutil.rmtree(upload, ignore_errors=True)


def _move(upload: Path, path: Path) -> None:
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
