"""Pushed adapters in S3 outlive the controller's disk and go when nothing means them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters import LoRARequest
from deployments.errors import JournalUnavailableError
from deployments.push_archive import S3PushArchive
from deployments.push_store import PushStore
from tests.resolvers.s3_server import (
    CREDENTIALS,
    Bucket,
    Fault,
    FaultyProxy,
    refuse,
    reset,
    s3_server,
)


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(s3_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_port).running() as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(s3_port, tmp_path.name.replace("_", "-").lower()[-60:].strip("-"))
    bucket.create()
    return bucket


@pytest.fixture
def archive(bucket: Bucket, proxy: FaultyProxy) -> S3PushArchive:
    return S3PushArchive(f"s3://{bucket.name}/state/model.pushed", endpoint_url=proxy.url)


async def push(store: PushStore, content: str) -> LoRARequest:
    with store.receive() as directory:
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_text(content)
        return await store.take_over("policy", directory.name, store.digest(directory))


def archived(bucket: Bucket) -> set[str]:
    listed = bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", ())
    return {entry["Key"].split("/")[2] for entry in listed}


async def test_a_controller_with_an_empty_disk_has_every_pushed_adapter(
    archive: S3PushArchive, tmp_path: Path
) -> None:
    pushed = await push(PushStore(tmp_path / "old", archive), "weights")
    assert pushed.digest is not None
    store = PushStore(tmp_path / "new", archive)
    assert store.find(pushed.digest) is None
    paths = await asyncio.gather(*(store.bring(pushed.digest or "") for _ in range(4)))
    assert len(set(paths)) == 1
    assert store.digest(paths[0]) == pushed.digest
    assert store.find(pushed.digest) == paths[0]
    for digest in ("a" * 64, "../x"):
        with pytest.raises(FileNotFoundError):
            await store.bring(digest)
    assert list((tmp_path / "new" / "incoming").iterdir()) == []


async def test_what_nothing_means_is_removed_whoever_put_it_there(
    archive: S3PushArchive, bucket: Bucket, tmp_path: Path
) -> None:
    first = await push(PushStore(tmp_path / "old", archive), "1")
    store = PushStore(tmp_path / "new", archive)
    second, third = await push(store, "2"), await push(store, "3")
    assert archived(bucket) == {first.digest, second.digest, third.digest}
    with store.hold(third.digest or ""):
        await store.remove_unused(lambda: {second.digest or ""})
    assert archived(bucket) == {second.digest, third.digest}


async def test_a_push_that_cannot_be_kept_is_refused_and_hiccups_are_not_seen(
    archive: S3PushArchive, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    store = PushStore(tmp_path, archive)
    proxy.faults += [
        Fault(before=reset, match="PUT"),
        Fault(change=refuse(503, "SlowDown"), match="PUT"),
    ]
    await push(store, "1")
    proxy.faults.append(Fault(instead=refuse(403, "AccessDenied"), match="PUT", times=20))
    with pytest.raises(JournalUnavailableError, match="cannot be kept"):
        await push(store, "2")
    assert len(archived(bucket)) == 1
