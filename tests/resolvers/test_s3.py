"""Adapters come from S3 complete and as they are there, or not at all, with the reason."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters import DigestBuilder, LoRARequest
from resolvers.base import (
    AdapterSourceInvalidError,
    ResolverConfigError,
    ResolverError,
    SourceForbiddenError,
    SourceUnavailableError,
)
from resolvers.s3 import S3Resolver
from resolvers.store import AdapterStore
from tests.resolvers.adapter_files import assert_whole, digest_of
from tests.resolvers.s3_server import Answer, Bucket, Fault, FaultyProxy, refuse, reset

PART = 64 << 10
WEIGHTS = random.Random(0).randbytes(2 * PART + 123)
GET_WEIGHTS = "adapter_model.safetensors"
LIST = "list-type=2"


def expected_digest(weights: bytes = WEIGHTS, config: bytes = b"{}") -> str:
    builder = DigestBuilder()
    builder.add(Path("adapter_config.json"), len(config), [config])
    builder.add(Path("adapter_model.safetensors"), len(weights), [weights])
    return builder.hexdigest()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make(bucket: Bucket, proxy: FaultyProxy, root: Path) -> Callable[..., S3Resolver]:
    def make(uri: str = "", max_adapter_bytes: int = 1 << 30, **options: Any) -> S3Resolver:
        download = {"part_bytes": PART, "attempts": 3, "read_timeout_s": 0.4}
        return S3Resolver(
            AdapterStore(root, max_adapter_bytes=max_adapter_bytes),
            uri or f"s3://{bucket.name}/team",
            endpoint_url=proxy.url,
            region_name="us-east-1",
            download=download,
            **options,
        )

    return make


async def resolve(resolver: S3Resolver, name: str = "sql") -> LoRARequest | None:
    return await resolver.resolve_lora("base", name)


async def test_adapter_is_downloaded_by_name(
    make: Callable[..., S3Resolver], bucket: Bucket, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bucket.put_adapter("team/sql", WEIGHTS)
    found = await resolve(make())
    assert found is not None
    assert found.digest == expected_digest() == digest_of(Path(found.lora_path))
    assert found.source_uri == f"s3://{bucket.name}/team/sql/"
    assert f"{len(WEIGHTS) + 2} of {len(WEIGHTS) + 2} bytes" in caplog.text
    assert_whole(root)


async def test_only_what_an_adapter_needs_is_downloaded(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy
) -> None:
    others = {"optimizer.pt": b"o", "README.md": b"r", "checkpoint-1/adapter_model.bin": b"c"}
    bucket.put_adapter("team/sql", WEIGHTS, **others, **{"chat_template.jinja": b"t"})
    found = await resolve(make())
    assert found is not None
    assert set(os.listdir(found.lora_path)) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
    }
    assert all(proxy.count(name) == 0 for name in others)


async def test_name_may_be_anywhere_in_the_uri(
    make: Callable[..., S3Resolver], bucket: Bucket
) -> None:
    bucket.put_adapter("by-team/sql/v1/final")
    resolver = make(f"s3://{bucket.name}/by-team/{{lora_name}}/final")
    assert await resolve(resolver, "sql/v1") is not None
    assert await resolve(resolver, "sql") is None


async def test_unknown_name_is_none_after_one_request(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy, root: Path
) -> None:
    bucket.put_adapter("team/sql-2")
    assert await resolve(make(), "sql") is None
    assert len(proxy.seen) == 1
    assert_whole(root)


async def test_unchanged_objects_are_not_downloaded_again(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    first = await resolve(make())
    requests = proxy.count(GET_WEIGHTS)
    assert await resolve(make()) == first
    assert proxy.count(GET_WEIGHTS) == requests
    bucket.put_adapter("team/sql", b"new")
    second = await resolve(make())
    assert second is not None and second.digest == expected_digest(b"new")


async def test_concurrent_downloads_of_one_adapter_are_one(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy, root: Path
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    found = await asyncio.gather(*(resolve(make()) for _ in range(5)))
    assert {request and request.digest for request in found} == {expected_digest()}
    assert proxy.count(GET_WEIGHTS) == 3
    assert_whole(root)


async def test_registered_bytes_or_none(
    make: Callable[..., S3Resolver], bucket: Bucket, root: Path
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    uri = f"s3://{bucket.name}/team/sql"
    assert (await make().fetch(uri, "sql", expected_digest())).digest == expected_digest()
    bucket.put_adapter("team/sql", b"new")
    with pytest.raises(AdapterSourceInvalidError, match="changed: its content is sha256"):
        await make().fetch(uri, "sql", expected_digest())
    with pytest.raises(FileNotFoundError, match="no adapter_config"):
        await make().fetch(f"s3://{bucket.name}/team", "sql", None)
    assert_whole(root)


def flip(answer: Answer) -> Answer:
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 1
    return Answer(answer.status, answer.headers, bytes(body))


PASSING = {
    "delayed": Fault(before=lambda: time.sleep(0.2), times=3),
    "stalled": Fault(before=lambda: time.sleep(0.8), match=GET_WEIGHTS),
    "listing stalled": Fault(before=lambda: time.sleep(0.8), match=LIST),
    "reset before the answer": Fault(before=reset, match=GET_WEIGHTS, times=2),
    "listing reset": Fault(before=reset, match=LIST, times=2),
    "listing truncated": Fault(keep=100, match=LIST),
    "500 then fine": Fault(change=refuse(500, "InternalError"), times=2),
    "503 then fine": Fault(change=refuse(503, "SlowDown"), match=GET_WEIGHTS, times=2),
    "429 then fine": Fault(change=refuse(429, "TooManyRequests"), times=2),
    "empty 502 then fine": Fault(change=lambda a: Answer(502, {}, b""), match=GET_WEIGHTS),
    "bit flipped": Fault(change=flip, match=GET_WEIGHTS),
    "404 of a listed object, then fine": Fault(change=refuse(404, "NoSuchKey"), match=GET_WEIGHTS),
    "other ETag": Fault(
        change=lambda a: Answer(a.status, {**a.headers, "ETag": '"other"'}, a.body),
        match=GET_WEIGHTS,
    ),
    "range ignored": Fault(
        change=lambda a: Answer(200, a.headers, WEIGHTS), match=GET_WEIGHTS, times=1
    ),
    **{
        f"truncated after {keep}": Fault(keep=keep, match=GET_WEIGHTS, times=2)
        for keep in (0, 1, *(random.Random(1).sample(range(PART), 2)), PART - 1)
    },
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
async def test_what_passes_by_itself_is_not_noticed(
    make: Callable[..., S3Resolver],
    bucket: Bucket,
    proxy: FaultyProxy,
    root: Path,
    fault: Fault,
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    proxy.faults.append(fault)
    found = await resolve(make())
    assert proxy.faults == []
    assert found is not None and found.digest == expected_digest()
    assert_whole(root)


LASTING: dict[str, tuple[Fault, type[ResolverError], str]] = {
    "403 to list": (
        Fault(change=refuse(403, "AccessDenied"), match=LIST, times=99),
        SourceForbiddenError,
        "refused the request: AccessDenied",
    ),
    "403 to read": (
        Fault(change=refuse(403, "AccessDenied"), match=GET_WEIGHTS, times=99),
        SourceForbiddenError,
        "refused the request: AccessDenied",
    ),
    "wrong key": (
        Fault(change=refuse(403, "InvalidAccessKeyId"), times=99),
        SourceForbiddenError,
        "refused the request: InvalidAccessKeyId",
    ),
    "no such bucket": (
        Fault(change=refuse(404, "NoSuchBucket"), times=99),
        SourceForbiddenError,
        "refused the request: NoSuchBucket",
    ),
    "500": (
        Fault(change=refuse(500, "InternalError"), times=99),
        SourceUnavailableError,
        "cannot be reached: InternalError",
    ),
    "503": (
        Fault(change=refuse(503, "SlowDown"), match=GET_WEIGHTS, times=99),
        SourceUnavailableError,
        "cannot be reached: SlowDown",
    ),
    "reset": (Fault(before=reset, times=99), SourceUnavailableError, "cannot be reached"),
    "truncated": (
        Fault(keep=1000, match=GET_WEIGHTS, times=99),
        SourceUnavailableError,
        "cannot be reached",
    ),
    "stalled": (
        Fault(before=lambda: time.sleep(0.8), match=LIST, times=99),
        SourceUnavailableError,
        "cannot be reached: ReadTimeoutError",
    ),
    "always other bytes": (
        Fault(change=flip, match=GET_WEIGHTS, times=99),
        SourceUnavailableError,
        "keeps changing or arriving damaged",
    ),
}


@pytest.mark.parametrize(("fault", "error", "message"), LASTING.values(), ids=LASTING.keys())
async def test_what_lasts_is_told_without_secrets_and_leaves_the_store_whole(
    make: Callable[..., S3Resolver],
    bucket: Bucket,
    proxy: FaultyProxy,
    root: Path,
    fault: Fault,
    error: type[ResolverError],
    message: str,
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    proxy.faults.append(fault)
    with pytest.raises(error, match=message) as caught:
        await resolve(make())
    assert "secret" not in str(caught.value)
    assert str(caught.value).startswith(f"s3://{bucket.name}/team/sql/")
    assert_whole(root)
    assert list((root / "adapters").iterdir()) == []
    proxy.faults.clear()
    assert await resolve(make()) is not None


async def test_object_that_changes_meanwhile_is_served_as_it_is_afterwards(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy, root: Path
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    new = bytes(reversed(WEIGHTS))
    change = Fault(before=lambda: bucket.put_adapter("team/sql", new), match=GET_WEIGHTS)
    proxy.faults.append(change)
    found = await resolve(make())
    assert found is not None and found.digest == expected_digest(new)
    assert_whole(root)


async def test_config_and_weights_are_of_one_version(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy
) -> None:
    """Only the small file changes, after it was read: no request for the large one can tell."""
    bucket.put_adapter("team/sql", WEIGHTS)
    put = bucket.client.put_object
    key = "team/sql/adapter_config.json"
    change = Fault(
        before=lambda: put(Bucket=bucket.name, Key=key, Body=b"[]"), match=GET_WEIGHTS, times=1
    )
    proxy.faults.append(change)
    found = await resolve(make())
    assert found is not None
    assert found.digest == expected_digest(config=b"[]")


async def test_object_that_never_stops_changing_is_unavailable(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy, root: Path
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    turns = iter(range(99))
    change = Fault(
        before=lambda: bucket.put_adapter("team/sql", WEIGHTS[next(turns) :]),
        match=GET_WEIGHTS,
        times=99,
    )
    proxy.faults.append(change)
    with pytest.raises(SourceUnavailableError, match="keeps changing"):
        await resolve(make())
    assert_whole(root)


async def test_cancelled_download_stops_and_leaves_nothing(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy, root: Path
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    proxy.chunk_delay_s = 0.2
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await resolve(make())
    for _ in range(100):  # the thread notices between two chunks
        if os.listdir(root / "staging") + os.listdir(root / "locks") == []:
            break
        await asyncio.sleep(0.05)
    assert_whole(root)


async def test_sizes_are_bounded_before_anything_is_downloaded(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy
) -> None:
    bucket.put_adapter("team/sql", WEIGHTS)
    with pytest.raises(AdapterSourceInvalidError, match="more than an adapter may take: 1000"):
        await resolve(make(max_adapter_bytes=1000))
    bucket.put_adapter("team/large-config", b"w", config=b" " * (5 << 20))
    with pytest.raises(AdapterSourceInvalidError, match=r"adapter_config.json .* takes 5242880"):
        await resolve(make(), "large-config")
    bucket.client.put_object(Bucket=bucket.name, Key="team/part/adapter_config.json", Body=b"{}")
    with pytest.raises(AdapterSourceInvalidError, match=r"no adapter_model\.safetensors"):
        await resolve(make(), "part")
    assert proxy.count("adapter_config.json") == proxy.count(GET_WEIGHTS) == 0


async def test_anonymous_requests_are_not_signed(
    make: Callable[..., S3Resolver], bucket: Bucket, proxy: FaultyProxy
) -> None:
    bucket.put_adapter("team/sql")
    assert await resolve(make()) is not None
    assert all("Authorization" in headers for _, headers in proxy.seen)
    proxy.seen.clear()
    bucket.put_adapter("team/sql", b"new")
    assert await resolve(make(anonymous=True)) is not None
    assert proxy.seen and not any("Authorization" in headers for _, headers in proxy.seen)


async def test_missing_profile_is_told(make: Callable[..., S3Resolver], bucket: Bucket) -> None:
    with pytest.raises(SourceForbiddenError, match="cannot be asked: ProfileNotFound"):
        await resolve(make(profile_name="no-such-profile"))


@pytest.mark.parametrize("uri", ["", "bucket/prefix", "s3:///prefix", "https://b/p", "s3://B_/p"])
def test_nonsense_uri_is_refused_at_start(root: Path, uri: str) -> None:
    with pytest.raises(ResolverConfigError, match="not of the form s3://bucket/prefix"):
        S3Resolver(AdapterStore(root), uri)
