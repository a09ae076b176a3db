"""Directories are found by name under their roots, and only when nobody writes to them."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapters import InvalidAdapterNameError
from resolvers import filesystem
from resolvers.base import (
    AdapterSourceInvalidError,
    SourceForbiddenError,
    SourceUnavailableError,
)
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


async def test_links_in_a_circle_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "sql").symlink_to("sql")
    assert await FilesystemResolver([str(tmp_path)]).resolve_lora("base", "sql") is None


async def test_pipe_in_place_of_the_configuration_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path / "sql")
    (tmp_path / "sql/adapter_config.json").unlink()
    os.mkfifo(tmp_path / "sql/adapter_config.json")
    with pytest.raises(AdapterSourceInvalidError, match="is not a regular file"):
        await FilesystemResolver([str(tmp_path)]).resolve_lora("base", "sql")


async def test_directory_that_may_not_be_read_is_not_taken_for_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    write_adapter(tmp_path / "sql")
    monkeypatch.setattr(Path, "lstat", refuse)
    with pytest.raises(SourceForbiddenError, match="sql cannot be read: Permission denied"):
        await FilesystemResolver([str(tmp_path)]).resolve_lora("base", "sql")


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


@pytest.fixture
def write_before_looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Have somebody write before each of the first looks at a directory; the list counts them."""
    look = filesystem._state

    def arrange(num_writes: int) -> list[int]:
        looks: list[int] = []

        def write_and_look(path: Path) -> object:
            looks.append(len(looks))
            if len(looks) <= num_writes:
                write_adapter(path, b"w" * len(looks))
            return look(path)

        monkeypatch.setattr(filesystem, "_state", write_and_look)
        return looks

    return arrange


async def test_fresh_directory_is_served_once_it_is_at_rest(
    tmp_path: Path, write_before_looks: Callable[[int], list[int]]
) -> None:
    write_adapter(tmp_path / "sql")
    looks = write_before_looks(4)
    # Long enough that no machine takes the last write for an old one.
    resolver = FilesystemResolver([str(tmp_path)], settle_s=60)
    with no_pauses():
        assert await resolver.resolve_lora("base", "sql") is not None
    assert len(looks) == 5, "one look more than writes"


async def test_directory_that_is_written_for_ever_is_unavailable(
    tmp_path: Path, write_before_looks: Callable[[int], list[int]]
) -> None:
    write_adapter(tmp_path / "sql")
    write_before_looks(1000)
    resolver = FilesystemResolver([str(tmp_path)], settle_s=60)
    with no_pauses(), pytest.raises(SourceUnavailableError, match="is being written"):
        await resolver.resolve_lora("base", "sql")


@contextmanager
def no_pauses() -> Iterator[None]:
    async def pass_at_once(seconds: float) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filesystem.asyncio, "sleep", pass_at_once)
        yield
