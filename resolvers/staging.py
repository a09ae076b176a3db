"""A directory that is being written and becomes visible as a whole.

Knows files, syncing and renaming. Knows nothing of limits or of what the files mean.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from adapters import AdapterFiles, DigestBuilder
from resolvers.file_lock import lock_existing

_CHUNK = 4 << 20
_READ_CHUNK = 1 << 20


class Staging:
    """A locked directory in ``parent``; removed at the end unless it was published."""

    def __init__(self, parent: Path) -> None:
        self.path, self._lock_fd = _make_locked(parent)
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for fd in self._files.values():
            os.close(fd)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Create the files with their room on disk, so that a full disk is noticed now."""
        for name, size in sizes.items():
            if name not in self._files:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._files[name] = os.open(self.path / name, flags, 0o444)
            if size:
                os.posix_fallocate(self._files[name], 0, size)

    def write(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write part of a file; threads may write different parts at once."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._files[name], view, offset)
            view, offset = view[count:], offset + count

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """What is in part of a file by now, in chunks."""
        for offset in range(start, end, _READ_CHUNK):
            yield os.pread(self._files[name], min(_READ_CHUNK, end - offset), offset)

    def sync(self, name: str) -> None:
        """Bring what was written so far to the disk, so that little is left to do at the end."""
        os.fdatasync(self._files[name])

    def copy(self, files: AdapterFiles) -> str:
        """Copy an adapter's files and return the digest of what was copied."""
        builder = DigestBuilder()
        for path in files.all:
            with (files.root / path).open("rb", buffering=0) as source:
                size = os.fstat(source.fileno()).st_size
                builder.add(path, size, self._copied(path.as_posix(), source.fileno()))
        return builder.hexdigest()

    def publish(self, target: Path) -> None:
        """Make the directory appear at ``target``, where the same content may already be."""
        for fd in self._files.values():
            os.fsync(fd)
        _sync_directory(self.path)
        try:
            self.path.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync_directory(target.parent)

    def _copied(self, name: str, source: int) -> Iterator[bytes]:
        offset = 0
        while chunk := os.read(source, _CHUNK):
            self.write(name, offset, chunk)
            offset += len(chunk)
            yield chunk


def _make_locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(dir=parent))
        # Whoever cleans up may have taken it for a leftover in this instant.
        fd = lock_existing(path, shared=False, wait=True)
        if fd is not None:
            return path, fd


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
