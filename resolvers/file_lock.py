"""Locks between processes that end with their owner, however it ends.

``flock`` on an open file or directory: the kernel gives the lock back with the last descriptor, so
a killed process leaves none behind. (The ``filelock`` package has no shared locks and cannot lock
a directory.) Knows nothing of what is locked.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05


class LockTimeoutError(TimeoutError):
    """Somebody else kept the lock for too long, or waiting was cancelled."""


def lock_existing(path: Path, *, shared: bool, wait: bool) -> int | None:
    """Lock what is at ``path`` and return its descriptor; closing that gives the lock back.

    None if there is nothing, if it was moved away meanwhile, or if it is locked and ``wait`` is
    off.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(fd, mode)
        if _is_at(fd, path):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@contextmanager
def exclusive_file(path: Path, *, cancelled: threading.Event, timeout_s: float) -> Iterator[None]:
    """Keep others out while the block runs; the lock's file is removed afterwards."""
    deadline = time.monotonic() + timeout_s
    while True:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if (fd := lock_existing(path, shared=False, wait=False)) is not None:
            break
        if cancelled.wait(_POLL_S) or time.monotonic() > deadline:
            raise LockTimeoutError(f"{path.name} is locked by another process")
    try:
        yield
    finally:
        # Removed while locked: whoever waits on this file finds it gone and opens the next.
        path.unlink(missing_ok=True)
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
