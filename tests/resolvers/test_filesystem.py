"""Directories are found by name under their roots, and only when nobody writes to them."""

import asyncio
import os
from pathlib import Path

import pytest

from adapters import InvalidAdapterNameError
from resolvers.base import AdapterSourceInvalidError, SourceUnavailableError
from resolvers.filesystem import FilesystemResolver
from tests.resolvers.adapter_files import write_adapter


def age(path: Path, seconds: float = 60) -> None:
    for file in path.iterdir():
        then = file.stat().st_mtime - seconds
        os.utime(file, (then, then))


async def test_roots_are_searched_in_order(tmp_path: Path) -> None:
    for root, name in (("one", "a"), ("two", "a"), ("two", "team/b")):
        write_adapter(tmp_path / root / name)
    roots = [str(tmp_path / root) for root in ("missing", "one", "two")]
    resolver = FilesystemResolver(roots, settle_s=0)
    found = {name: await resolver.resolve_lora("base", name) for name in ("a", "team/b", "team")}
    paths = {name: request and request.lora_path for name, request in found.items()}
    assert paths == {
        "a": str(tmp_path / "one/a"),
        "team/b": str(tmp_path / "two/team/b"),
        "team": None,
    }
    assert found["a"] is not None and found["a"].source_uri == (tmp_path / "one/a").as_uri()


async def test_link_that_leaves_the_root_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "outside")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "sql").symlink_to(tmp_path / "outside")
    resolver = FilesystemResolver([str(tmp_path / "root")])
    with pytest.raises(AdapterSourceInvalidError, match="leaves its root"):
        await resolver.resolve_lora("base", "sql")


async def test_file_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "root" / "sql")
    secret = tmp_path / "secret"
    (tmp_path / "root/sql/adapter_model.safetensors").rename(secret)
    (tmp_path / "root/sql/adapter_model.safetensors").symlink_to(secret)
    resolver = FilesystemResolver([str(tmp_path / "root")])
    with pytest.raises(AdapterSourceInvalidError, match="link that leaves the directory"):
        await resolver.resolve_lora("base", "sql")


@pytest.mark.parametrize("name", ["../sql", "/etc", "..", "a//b", ".hidden", "a\0b", ""])
async def test_name_outside_the_grammar_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidAdapterNameError):
        await FilesystemResolver([str(tmp_path)]).resolve_lora("base", name)


async def test_directory_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    (tmp_path / "sql/adapter_model.safetensors").unlink()
    with pytest.raises(AdapterSourceInvalidError, match=r"no adapter_model\.safetensors"):
        await FilesystemResolver([str(tmp_path)]).resolve_lora("base", "sql")


async def test_directory_at_rest_is_not_waited_for(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    age(tmp_path / "sql")
    assert await FilesystemResolver([str(tmp_path)], settle_s=30).resolve_lora("base", "sql")


async def test_fresh_directory_is_served_once_it_is_at_rest(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    resolver = FilesystemResolver([str(tmp_path)], settle_s=0.2)
    asked = asyncio.ensure_future(resolver.resolve_lora("base", "sql"))
    for turn in range(5):
        await asyncio.sleep(0.1)
        assert not asked.done(), "answered while it was being written"
        write_adapter(tmp_path / "sql", b"w" * turn)
    assert await asked is not None


async def test_directory_that_is_written_for_ever_is_unavailable(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    resolver = FilesystemResolver([str(tmp_path)], settle_s=0.05)
    asked = asyncio.ensure_future(resolver.resolve_lora("base", "sql"))
    turn = 0
    while not asked.done():
        turn += 1
        write_adapter(tmp_path / "sql", b"w" * turn)
        await asyncio.sleep(0.01)
    with pytest.raises(SourceUnavailableError, match="is being written"):
        await asked
