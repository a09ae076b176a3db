"""Which files make an adapter, what identifies them, and that what is hashed is what is read."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters import AdapterChangedError, adapter_digest, find_adapter_files, read_adapter
from adapters.digest import DigestBuilder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def digest(root: Path) -> str:
    return adapter_digest(find_adapter_files(root))


def test_the_digest_is_fixed_for_fixed_content(root: Path) -> None:
    """The value is stored in journals and object stores, so it must never change."""
    assert digest(root) == "3b6a4df6d118097ba82557e65af40b6a0b820fa2258e2d2a10ba534cf75b4850"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", b"{ }"),
        ("adapter_model.safetensors", b"weightS"),
        ("tokenizer.json", b""),
        ("chat_template.jinja", b"{{ x }}"),
    ],
)
def test_every_file_that_changes_answers_changes_the_digest(
    root: Path, name: str, content: bytes
) -> None:
    before = digest(root)
    (root / name).write_bytes(content)
    assert digest(root) != before


def test_files_that_do_not_change_answers_leave_the_digest(root: Path) -> None:
    before = digest(root)
    (root / "README.md").write_text("hello")
    (root / "checkpoint-1").mkdir()
    assert digest(root) == before


def test_moving_bytes_between_files_changes_the_digest(root: Path) -> None:
    before = digest(root)
    (root / "adapter_config.json").write_bytes(b"{}w")
    (root / "adapter_model.safetensors").write_bytes(b"eights")
    assert digest(root) != before


def test_reading_gives_the_bytes_and_the_same_digest(root: Path) -> None:
    (root / "tokenizer.json").write_bytes(b"x" * (3 << 20))
    content = read_adapter(find_adapter_files(root))
    assert content.config == b"{}"
    assert content.weights == {"adapter_model.safetensors": b"weights"}
    assert content.digest == digest(root)


def test_shards_belong_to_the_adapter_only_with_their_index(root: Path) -> None:
    (root / "adapter_model.safetensors").unlink()
    shards = [f"adapter_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for shard in shards:
        (root / shard).write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"no adapter_model\.safetensors"):
        find_adapter_files(root)
    index = "adapter_model.safetensors.index.json"
    (root / index).write_bytes(b"{}")
    files = find_adapter_files(root)
    assert [path.name for path in files.weights] == [index, *shards]
    assert files.size_bytes == 2 + 2 + 1 + 1


def test_safetensors_win_over_a_pickle(root: Path) -> None:
    (root / "adapter_model.bin").write_bytes(b"pickle")
    files = find_adapter_files(root)
    assert [path.name for path in files.weights] == ["adapter_model.safetensors"]
    (root / "adapter_model.safetensors").unlink()
    files = find_adapter_files(root)
    assert [path.name for path in files.weights] == ["adapter_model.bin"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_what_is_missing_is_named(root: Path, name: str) -> None:
    (root / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {name}"):
        find_adapter_files(root)


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
)
def test_a_link_that_leaves_the_directory_is_refused(
    root: Path, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_bytes(b"secret")
    (root / name).unlink(missing_ok=True)
    (root / name).symlink_to(outside)
    with pytest.raises(PermissionError, match="leaves the directory"):
        find_adapter_files(root)


def test_a_link_inside_the_directory_and_to_the_directory_is_followed(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = digest(root)
    (root / "adapter_model.safetensors").rename(root / "blob")
    (root / "adapter_model.safetensors").symlink_to("blob")
    link = tmp_path_factory.mktemp("elsewhere") / "adapter"
    link.symlink_to(root)
    assert digest(link) == before


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "adapter_model.safetensors", "adapter.yaml", "chat_template.jinja"],
)
@pytest.mark.parametrize(
    "put",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.name)],
    ids=["pipe", "directory", "link to itself"],
)
def test_only_regular_files_are_adapter_files(
    root: Path, name: str, put: Callable[[Path], None]
) -> None:
    (root / name).unlink(missing_ok=True)
    put(root / name)
    with pytest.raises(PermissionError, match=f"{name} in .* is not a regular file"):
        find_adapter_files(root)


@pytest.mark.parametrize("chunks", [[b"ab"], [b"abc", b"d"], []])
def test_content_of_another_size_than_announced_is_noticed(chunks: list[bytes]) -> None:
    with pytest.raises(AdapterChangedError, match=r"tokenizer\.json changed"):
        DigestBuilder().add(Path("tokenizer.json"), 3, chunks)


def test_chunks_do_not_matter_for_the_digest() -> None:
    def digest_of(chunks: Iterator[bytes]) -> str:
        builder = DigestBuilder()
        builder.add(Path("a"), 4, chunks)
        return builder.hexdigest()

    assert digest_of(iter([b"ab", b"cd"])) == digest_of(iter([b"abcd"]))
