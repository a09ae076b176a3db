"""The node's store of adapters: complete, by content, shared by every process of the node.

    <root>/adapters/<digest>/    complete adapters; the name is the SHA-256 of what is in it
    <root>/staging/<id>/         being written; renamed into adapters/ when synced and verified
    <root>/sources/<key>         the digest that a source's state once had
    <root>/locks/                one file for each source that is being fetched

A process that uses an adapter holds a shared lock on its directory, one that writes holds an
exclusive lock on its staging directory. Locks end with their process: after kill -9 at any point,
what is in adapters/ is complete and what is left in staging/ is unlocked and removed at the next
start. Knows nothing of where adapters come from.
"""

import errno
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from adapters import AdapterChangedError, AdapterFiles, adapter_digest, find_adapter_files
from resolvers.base import AdapterSourceInvalidError, SourceUnavailableError, StoreFullError
from resolvers.file_lock import LockTimeoutError, exclusive_file, lock_existing
from resolvers.staging import Staging

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 32 << 30
DEFAULT_MAX_ADAPTER_BYTES = 4 << 30

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_STORE_LOCK = "store"
_STORE_LOCK_TIMEOUT_S = 60.0
_FETCH_TIMEOUT_S = 600.0
_NEVER = threading.Event()


class StoredAdapter:
    """An adapter in the store that stays there until this is released."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let the adapter go."""
        os.close(self._fd)


class AdapterStore:
    """Adapters by digest in at most ``max_bytes``; the least recently used leave first.

    One adapter takes at most ``max_adapter_bytes``, checked before anything of it is read.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES,
    ) -> None:
        self.max_bytes = max_bytes
        self.max_adapter_bytes = min(max_adapter_bytes, max_bytes)
        self._adapters = root / "adapters"
        self._staging = root / "staging"
        self._sources = root / "sources"
        self._locks = root / "locks"
        for directory in (self._adapters, self._staging, self._sources, self._locks):
            directory.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what processes that no longer live left half written."""
        for path in (*self._staging.iterdir(), *self._locks.iterdir()):
            _remove_unlocked(path)
        for path in self._sources.iterdir():
            if not self.path_of(_read_text(path)).is_dir():
                path.unlink(missing_ok=True)

    # -- reading

    def hold(self, digest: str) -> StoredAdapter | None:
        """Take an adapter into use; None if the store does not have it."""
        path = self.path_of(digest)
        fd = lock_existing(path, shared=True, wait=True)
        if fd is None:
            return None
        with suppress(OSError):
            os.utime(fd)
        return StoredAdapter(path, fd)

    def find(self, digest: str) -> Path | None:
        """Where an adapter is, if the store has it."""
        with self.hold(digest) or nullcontext() as stored:
            return None if stored is None else stored.path

    def digest_of(self, source_state: str) -> str | None:
        """The digest that a source's state had when it was fetched, if that is still here."""
        digest = _read_text(self._source(source_state))
        return digest if digest and self.find(digest) is not None else None

    def discard_damaged(self, digest: str) -> bool:
        """Take an adapter out whose files are not what its name says any more."""
        with self.hold(digest) or nullcontext() as stored:
            if stored is None:
                return False
            with suppress(OSError):
                if adapter_digest(find_adapter_files(stored.path)) == digest:
                    return False
        logger.error("the store's copy of adapter %s is damaged and was removed", digest)
        return self._evict(self.path_of(digest))

    # -- writing

    def source_lock(
        self, source: str, *, cancelled: threading.Event = _NEVER, timeout_s: float
    ) -> AbstractContextManager[None]:
        """Be the only process of this node that fetches a source."""
        path = self._locks / f"source-{_key(source)}"
        return exclusive_file(path, cancelled=cancelled, timeout_s=timeout_s)

    def get_or_fetch(
        self, source_state: str, fetch: Callable[[], str], *, cancelled: threading.Event
    ) -> tuple[str, Path]:
        """Digest and place of what a source has in this state.

        Unless it is here, ``fetch`` commits it and returns its digest, once for all of this node
        who want it.
        """
        with self.source_lock(source_state, cancelled=cancelled, timeout_s=_FETCH_TIMEOUT_S):
            digest = self.digest_of(source_state) or fetch()
            path = self.find(digest)
            if path is None:
                raise SourceUnavailableError("the adapter store is full of others' downloads")
            return digest, path

    @contextmanager
    def stage(self, sizes: Mapping[str, int]) -> Iterator[Staging]:
        """Make room for files of these sizes and give a place to write them."""
        try:
            with self._no_space_is_store_full(), Staging(self._staging) as staging:
                self._allocate(staging, sizes)
                yield staging
        except LockTimeoutError as error:
            raise SourceUnavailableError("the adapter store is busy") from error

    def commit(self, staging: Staging, digest: str, *, source_state: str | None = None) -> Path:
        """Make staged files, whose digest this is, an adapter of the store."""
        path = self.path_of(digest)
        with self._no_space_is_store_full():
            staging.publish(path)
            if source_state is not None:
                self._remember(source_state, digest)
        return path

    def add(self, files: AdapterFiles) -> tuple[str, Path]:
        """Copy an adapter's directory into the store, if it is not there; returns its digest."""
        self._check_size(files.size_bytes)
        digest = adapter_digest(files)
        if (path := self.find(digest)) is not None:
            return digest, path
        sizes = {name.as_posix(): (files.root / name).stat().st_size for name in files.all}
        with self.stage(sizes) as staging:
            if staging.copy(files) != digest:
                raise AdapterChangedError(f"{files.root} changed while it was read")
            return digest, self.commit(staging, digest)

    # -- room

    def size_bytes(self) -> int:
        """What complete and half-written adapters occupy together."""
        places = (*self._adapters.iterdir(), *self._staging.iterdir())
        return sum(_directory_size(path) for path in places)

    def _allocate(self, staging: Staging, sizes: Mapping[str, int]) -> None:
        needed = sum(sizes.values())
        self._check_size(needed)
        # One process at a time, so that two do not take the same room.
        with exclusive_file(
            self._locks / _STORE_LOCK, cancelled=_NEVER, timeout_s=_STORE_LOCK_TIMEOUT_S
        ):
            excess = self.size_bytes() + needed - self.max_bytes
            while excess > 0:
                excess -= self._evict_oldest(f"{needed} bytes are needed")
            while not _fits(staging, sizes):
                self._evict_oldest("the disk is full")

    def _check_size(self, size: int) -> None:
        if size > self.max_adapter_bytes:
            raise AdapterSourceInvalidError(
                f"its files take {size} bytes, more than an adapter may take: "
                f"{self.max_adapter_bytes}"
            )

    def _evict_oldest(self, why: str) -> int:
        """Remove the adapter that was not used for longest; returns its size."""
        for path in sorted(self._adapters.iterdir(), key=_last_used):
            size = _directory_size(path)
            if self._evict(path):
                logger.info("removed adapter %s from the store: %s", path.name, why)
                return size
        raise StoreFullError(f"no room in the adapter store: {why} and everything in it is in use")

    def _evict(self, path: Path) -> bool:
        fd = lock_existing(path, shared=False, wait=False)
        if fd is None:
            return False
        # Moved first: an adapter is there as a whole or not at all.
        grave = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            path.rename(grave)
        finally:
            os.close(fd)
        shutil.rmtree(grave, ignore_errors=True)
        return True

    @contextmanager
    def _no_space_is_store_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise StoreFullError("no room in the adapter store: the disk is full") from error

    # -- names

    def _remember(self, source_state: str, digest: str) -> None:
        with tempfile.NamedTemporaryFile("w", dir=self._locks, delete=False) as file:
            file.write(digest)
        os.replace(file.name, self._source(source_state))

    def path_of(self, digest: str) -> Path:
        """Where an adapter is when the store has it."""
        return self._adapters / (digest or "-")

    def _source(self, source_state: str) -> Path:
        return self._sources / _key(source_state)


def _fits(staging: Staging, sizes: Mapping[str, int]) -> bool:
    try:
        staging.allocate(sizes)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        return False
    return True


def _remove_unlocked(path: Path) -> None:
    fd = lock_existing(path, shared=False, wait=False)
    if fd is not None:
        if path.is_dir():
            logger.info("removing unfinished %s", path.name)
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        os.close(fd)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _last_used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _directory_size(path: Path) -> int:
    # Another process may remove it meanwhile.
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0
