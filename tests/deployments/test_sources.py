"""Sources give exactly the bytes that were registered, and nothing from outside."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.errors import (
    AdapterSourceError,
    InvalidAdapterSourceError,
    PathNotAllowedError,
    ResolverForbiddenError,
    ResolverUnavailableError,
)
from deployments.sources import AdapterSources
from resolvers.base import Resolver, SourceForbiddenError, SourceUnavailableError
from resolvers.chain import Link, ResolverChain
from resolvers.store import AdapterStore

ROOTS = ["s3://bucket/team", "hf://acme", "hf://other/sql"]


def write_adapter(path: Path, content: str = "weights") -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(content)
    return digest_of(path)


def digest_of(path: Path) -> str:
    return adapter_digest(find_adapter_files(path))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., AdapterSources]:
    def make(*resolvers: Resolver, **options: Any) -> AdapterSources:
        links = [Link(type(resolver).__name__, resolver) for resolver in resolvers]
        store = AdapterStore(tmp_path / "store", max_adapter_bytes=1000)
        return AdapterSources("base", store, resolver=ResolverChain(links), **options)

    return make


class Bucket:
    """A source that alone understands its URIs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        path = self.root / lora_name
        if not path.is_dir():
            return None
        return LoRARequest(
            lora_name=lora_name, lora_path=str(path), source_uri=f"bucket://b/{lora_name}"
        )


class Broken:
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        raise SourceForbiddenError("no credentials")

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        raise SourceUnavailableError("down")


async def test_path_uri_and_relative_path_name_the_same_adapter(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    digest = write_adapter(tmp_path / "a b" / "sql")
    sources = make(allowed_roots=[str(tmp_path)])
    path = tmp_path / "a b" / "sql"
    for source in (str(path), path.as_uri(), "a b/sql", f"{tmp_path}/a b/../a b/sql"):
        found = await sources.open("sql", source)
        assert (found.digest, found.source_uri) == (digest, path.as_uri())
        assert digest_of(Path(found.lora_path)) == digest


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("s3://bucket/team/sql", AdapterSourceError),
        ("s3://bucket/teams/sql", PathNotAllowedError),
        ("s3://bucket/team/../other/sql", PathNotAllowedError),
        ("s3://bucket/team/%2e%2e/other", PathNotAllowedError),
        ("s3://other/team/sql", PathNotAllowedError),
        ("s3://bucket/team@2/sql", PathNotAllowedError),
        ("hf://acme/sql@main", AdapterSourceError),
        ("hf://other/sql@refs/pr/1", AdapterSourceError),
        ("hf://other/sql2", PathNotAllowedError),
        ("hf://other/sql@../../x", PathNotAllowedError),
        ("hf://acme-corp/sql", PathNotAllowedError),
        ("x" * 10_000, PathNotAllowedError),
        ("\0", PathNotAllowedError),
    ],
)
async def test_only_allowed_places_are_looked_at(
    make: Callable[..., AdapterSources], tmp_path: Path, source: str, error: type[Exception]
) -> None:
    sources = make(allowed_roots=[str(tmp_path / "root"), *ROOTS])
    with pytest.raises(error):
        await sources.open("sql", source)


async def test_registered_bytes_outlive_their_source(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    digest = write_adapter(tmp_path / "sql", "one")
    uri = (tmp_path / "sql").as_uri()
    first = await make().fetch("sql", uri, digest=digest)
    write_adapter(tmp_path / "sql", "two")
    assert await make().fetch("sql", uri, digest=digest) == first
    assert digest_of(Path(first.lora_path)) == digest


async def test_fetch_refuses_other_bytes(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "sql")
    with pytest.raises(AdapterSourceError, match="content changed"):
        await make().fetch("sql", (tmp_path / "sql").as_uri(), digest="0" * 64)


async def test_provided_files_are_fetched_and_held(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    digest = write_adapter(tmp_path / "sql")
    uri = (tmp_path / "sql").as_uri()
    for _ in range(2):
        async with make().provide("sql", uri, digest=digest) as path:
            assert digest_of(path) == digest


async def test_too_large_adapter_is_refused_before_it_is_read(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "sql")
    os.truncate(tmp_path / "sql" / "adapter_model.safetensors", 1 << 40)
    sources = make(Bucket(tmp_path))
    with pytest.raises(InvalidAdapterSourceError, match="more than an adapter may take: 1000"):
        await sources.find("sql")


async def test_resolver_without_uris_is_asked_by_every_node(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    class Plain(Bucket):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            found = await super().resolve_lora(base_model_name, lora_name)
            return None if found is None else replace(found, source_uri=None)

    digest = write_adapter(tmp_path / "sql")
    found = await make(Plain(tmp_path)).find("sql")
    assert found is not None and found.source_uri == "resolver:sql"
    other_node = AdapterSources("base", AdapterStore(tmp_path / "other"), resolver=Plain(tmp_path))
    fetched = await other_node.fetch("sql", "resolver:sql", digest=digest)
    assert digest_of(Path(fetched.lora_path)) == digest


async def test_resolver_that_names_another_digest_is_refused(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    class Lies(Bucket):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            found = await super().resolve_lora(base_model_name, lora_name)
            return None if found is None else replace(found, digest="0" * 64)

    write_adapter(tmp_path / "sql")
    with pytest.raises(InvalidAdapterSourceError, match="its resolver said 0000"):
        await make(Lies(tmp_path)).find("sql")


async def test_resolver_serves_the_uris_that_it_alone_understands(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    digest = write_adapter(tmp_path / "sql")
    sources = make(Bucket(tmp_path))
    found = await sources.find("sql")
    assert found is not None
    assert (found.digest, found.source_uri) == (digest, "bucket://b/sql")
    again = await sources.fetch("sql", "bucket://b/sql", digest=digest)
    assert again.lora_path == found.lora_path
    with pytest.raises(AdapterSourceError, match="no source here provides these bytes"):
        await sources.fetch("sql", "bucket://b/sql", digest="0" * 64)


async def test_failing_source_does_not_hide_the_next(
    make: Callable[..., AdapterSources], tmp_path: Path
) -> None:
    digest = write_adapter(tmp_path / "sql")
    sources = make(Broken(), Bucket(tmp_path))
    found = await sources.find("sql")
    assert found is not None and found.digest == digest
    with pytest.raises(ResolverForbiddenError, match="no credentials"):
        await sources.find("unknown")


async def test_failing_fetch_is_not_a_missing_adapter(make: Callable[..., AdapterSources]) -> None:
    sources = make(fetchers={"bucket": Broken()})
    with pytest.raises(ResolverUnavailableError, match="down"):
        await sources.fetch("sql", "bucket://b/sql", digest=None)


async def test_a_source_that_hangs_is_given_up(make: Callable[..., AdapterSources]) -> None:
    class Hanging:
        async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
            await asyncio.Event().wait()
            raise AssertionError

    sources = make(
        fetchers={"bucket": Hanging()}, allowed_roots=["bucket://b"], open_timeout_s=0.01
    )
    with pytest.raises(ResolverUnavailableError, match=r"did not answer within 0\.01 s"):
        await sources.open("sql", "bucket://b/sql")


async def test_unknown_name_is_none(make: Callable[..., AdapterSources], tmp_path: Path) -> None:
    assert await make(Bucket(tmp_path)).find("sql") is None
