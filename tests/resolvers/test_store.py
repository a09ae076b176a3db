"""The node's store holds complete adapters only, within its bounds, whatever happens to it."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from adapters import AdapterChangedError, find_adapter_files
from resolvers.base import AdapterSourceInvalidError, SourceUnavailableError, StoreFullError
from resolvers.file_lock import exclusive_file
from resolvers.staging import Staging
from resolvers.store import AdapterStore
from tests.resolvers.adapter_files import assert_whole, digest_of, write_adapter

KB = 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def add(store: AdapterStore, tmp_path: Path, name: str, size: int = KB) -> str:
    write_adapter(tmp_path / name, name.encode().ljust(size - 2, b"."))
    return store.add(find_adapter_files(tmp_path / name))[0]


def test_stored_adapter_is_independent_of_where_it_came_from(root: Path, tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "sql")
    stored, path = AdapterStore(root).add(find_adapter_files(tmp_path / "sql"))
    write_adapter(tmp_path / "sql", b"changed")
    assert stored == digest == digest_of(path) == path.name
    assert_whole(root)


def test_same_content_is_stored_once(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root)
    for name in ("a", "b"):
        write_adapter(tmp_path / name, b"same")
    first = store.add(find_adapter_files(tmp_path / "a"))
    assert store.add(find_adapter_files(tmp_path / "b")) == first
    assert len(list((root / "adapters").iterdir())) == 1


def test_two_writers_of_the_same_content_end_with_one_adapter(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root)
    digest = write_adapter(tmp_path / "sql")
    files = find_adapter_files(tmp_path / "sql")
    sizes = {path.name: (tmp_path / "sql" / path).stat().st_size for path in files.all}
    with store.stage(sizes) as one, store.stage(sizes) as two:
        for staging in (one, two):
            assert staging.copy(files) == digest
        store.commit(one, digest)
        store.commit(two, digest)
    assert_whole(root)
    assert store.find(digest) is not None


def test_changed_file_is_not_stored(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "sql")
    copy = Staging.copy

    def change_then_copy(self: Staging, files: Any) -> str:
        (tmp_path / "sql" / "adapter_config.json").write_text("[]")
        return copy(self, files)

    monkeypatch.setattr(Staging, "copy", change_then_copy)
    with pytest.raises(AdapterChangedError):
        AdapterStore(root).add(find_adapter_files(tmp_path / "sql"))
    assert_whole(root)
    assert list((root / "adapters").iterdir()) == []


def test_least_recently_used_leaves_first(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root, max_bytes=3 * KB)
    digests = [add(store, tmp_path, name) for name in ("a", "b", "c")]
    for age, digest in enumerate(digests):
        os.utime(root / "adapters" / digest, (1000 + age, 1000 + age))
    assert store.find(digests[0]) is not None  # used again just now
    add(store, tmp_path, "d")
    assert [store.find(digest) is not None for digest in digests] == [True, False, True]
    assert store.size_bytes() <= store.max_bytes
    assert_whole(root)


def test_adapter_in_use_stays_and_a_store_full_of_them_says_so(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root, max_bytes=2 * KB)
    held = store.hold(add(store, tmp_path, "a"))
    assert held is not None
    other = AdapterStore(root, max_bytes=2 * KB)  # as another process would see it
    with held:
        add(other, tmp_path, "b")
        add(other, tmp_path, "c")
        assert held.path.is_dir()
        with pytest.raises(StoreFullError, match="everything in it is in use"):
            add(other, tmp_path, "large", 2 * KB)
        assert_whole(root)
    add(other, tmp_path, "large", 2 * KB)
    assert not held.path.exists()


def test_adapter_larger_than_the_store_evicts_nothing(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root, max_bytes=2 * KB)
    digest = add(store, tmp_path, "a")
    with pytest.raises(
        AdapterSourceInvalidError, match="3000 bytes, more than an adapter may take: 2000"
    ):
        add(store, tmp_path, "huge", 3 * KB)
    assert store.find(digest) is not None


def test_half_written_adapters_count_as_occupied(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root, max_bytes=2 * KB)
    with store.stage({"adapter_model.safetensors": 1500}), pytest.raises(StoreFullError):
        add(store, tmp_path, "a")
    add(store, tmp_path, "a")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_evicts_then_fails_clearly_and_damages_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = AdapterStore(root)
    add(store, tmp_path, "a")
    held = store.hold(add(store, tmp_path, "b"))
    assert held is not None

    def no_space(fd: int, offset: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, held:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(StoreFullError, match="the disk is full"):
            add(store, tmp_path, "c")
        assert [path.name for path in (root / "adapters").iterdir()] == [held.path.name]
    assert_whole(root)
    add(store, tmp_path, "c")


def test_damaged_adapter_is_taken_out(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root)
    digest = add(store, tmp_path, "a")
    assert not store.discard_damaged(digest)
    weights = root / "adapters" / digest / "adapter_model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(b"bit rot")
    assert store.discard_damaged(digest)
    assert store.find(digest) is None
    assert not store.discard_damaged(digest)


def test_source_state_leads_to_its_content_while_that_is_here(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root, max_bytes=KB)
    digest = write_adapter(tmp_path / "sql")
    with store.stage({"adapter_config.json": 2, "adapter_model.safetensors": 7}) as staging:
        staging.copy(find_adapter_files(tmp_path / "sql"))
        store.commit(staging, digest, source_state="s3://bucket/sql etag")
    assert store.digest_of("s3://bucket/sql etag") == digest
    assert store.digest_of("s3://bucket/sql other") is None
    add(store, tmp_path, "large", KB)
    assert store.digest_of("s3://bucket/sql etag") is None
    assert list((root / "sources").iterdir()) != []
    AdapterStore(root)
    assert list((root / "sources").iterdir()) == []


def test_only_one_fetches_a_source_and_others_stop_waiting(root: Path) -> None:
    store = AdapterStore(root)
    cancelled = threading.Event()
    with store.source_lock("s3://bucket/a", timeout_s=1):
        with store.source_lock("s3://bucket/b", timeout_s=0):
            pass
        with pytest.raises(TimeoutError), store.source_lock("s3://bucket/a", timeout_s=0):
            pass
        cancelled.set()
        waiting = store.source_lock("s3://bucket/a", cancelled=cancelled, timeout_s=60)
        with pytest.raises(TimeoutError), waiting:
            pass
    assert_whole(root)


HOLDER = """
import sys, time
from pathlib import Path
from resolvers.store import AdapterStore
store = AdapterStore(Path(sys.argv[1]))
held = store.hold(sys.argv[2])
with store.source_lock("source", timeout_s=1), store.stage({"adapter_model.safetensors": 500}):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_killed_process_leaves_no_lock_and_nothing_half_written(root: Path, tmp_path: Path) -> None:
    store = AdapterStore(root, max_bytes=2 * KB)
    digest = add(store, tmp_path, "a")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root), digest], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        store.remove_leftovers()
        assert len(list((root / "staging").iterdir())) == 1  # it lives
        with pytest.raises(StoreFullError):
            add(store, tmp_path, "b", 2 * KB)
        with pytest.raises(TimeoutError), store.source_lock("source", timeout_s=0):
            pass
        process.send_signal(signal.SIGKILL)
    store.remove_leftovers()
    with store.source_lock("source", timeout_s=0):
        pass
    add(store, tmp_path, "b", 2 * KB)
    assert_whole(root)


def test_busy_store_is_a_temporary_failure(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resolvers.store._STORE_LOCK_TIMEOUT_S", 0.0)
    store = AdapterStore(root)
    lock = root / "locks" / "store"
    with (
        exclusive_file(lock, cancelled=threading.Event(), timeout_s=0),
        pytest.raises(SourceUnavailableError, match="busy"),
    ):
        add(store, tmp_path, "a")
    add(store, tmp_path, "a")
