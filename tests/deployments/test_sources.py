"""Sources give exactly the bytes that were registered, and nothing from outside."""

from pathlib import Path

import pytest

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.errors import (
    AdapterSourceError,
    PathNotAllowedError,
    ResolverUnavailableError,
)
from deployments.sources import AdapterSources


def write_adapter(path: Path, content: str = "weights") -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(content)
    return adapter_digest(find_adapter_files(path))


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
        raise PermissionError("no credentials")

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        raise ConnectionError("down")


async def test_path_uri_and_relative_path_name_the_same_adapter(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "a b" / "sql")
    sources = AdapterSources("base", allowed_roots=[str(tmp_path)])
    path = tmp_path / "a b" / "sql"
    for source in (str(path), path.as_uri(), "a b/sql", f"{tmp_path}/a b/../a b/sql"):
        found = await sources.open("sql", source)
        assert (found.digest, found.lora_path, found.source_uri) == (
            digest,
            str(path),
            path.as_uri(),
        )


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("s3://bucket/team/sql", AdapterSourceError),
        ("s3://bucket/teams/sql", PathNotAllowedError),
        ("s3://bucket/team/../other/sql", PathNotAllowedError),
        ("s3://bucket/team/%2e%2e/other", PathNotAllowedError),
        ("s3://other/team/sql", PathNotAllowedError),
        ("x" * 10_000, PathNotAllowedError),
        ("\0", PathNotAllowedError),
    ],
)
async def test_only_allowed_places_are_looked_at(
    tmp_path: Path, source: str, error: type[Exception]
) -> None:
    sources = AdapterSources("base", allowed_roots=[str(tmp_path / "root"), "s3://bucket/team"])
    with pytest.raises(error):
        await sources.open("sql", source)


async def test_fetch_refuses_other_bytes(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "sql", "one")
    uri = (tmp_path / "sql").as_uri()
    sources = AdapterSources("base")
    assert (await sources.fetch("sql", uri, digest=digest)).digest == digest
    write_adapter(tmp_path / "sql", "two")
    with pytest.raises(AdapterSourceError, match="content changed"):
        await sources.fetch("sql", uri, digest=digest)


async def test_resolver_serves_the_uris_that_it_alone_understands(tmp_path: Path) -> None:
    digest = write_adapter(tmp_path / "sql")
    sources = AdapterSources("base", resolvers=[Bucket(tmp_path)])
    found = await sources.find("sql")
    assert found is not None
    assert (found.digest, found.source_uri) == (digest, "bucket://b/sql")
    again = await sources.fetch("sql", "bucket://b/sql", digest=digest)
    assert again.lora_path == found.lora_path
    write_adapter(tmp_path / "sql", "changed")
    with pytest.raises(AdapterSourceError):
        await sources.fetch("sql", "bucket://b/sql", digest=digest)


async def test_failing_source_ends_the_search(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    sources = AdapterSources("base", resolvers=[Broken(), Bucket(tmp_path)])
    with pytest.raises(ResolverUnavailableError, match="Broken: no credentials"):
        await sources.find("sql")


async def test_failing_fetch_is_not_a_missing_adapter() -> None:
    sources = AdapterSources("base", fetchers={"bucket": Broken()})
    with pytest.raises(ResolverUnavailableError, match="down"):
        await sources.fetch("sql", "bucket://b/sql", digest=None)


async def test_unknown_name_is_none(tmp_path: Path) -> None:
    assert await AdapterSources("base", resolvers=[Bucket(tmp_path)]).find("sql") is None
