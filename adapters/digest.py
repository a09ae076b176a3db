"""Which files make an adapter, and the SHA-256 that identifies their content."""

import hashlib
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
WEIGHTS_INDEX_FILE = "adapter_model.safetensors.index.json"
PICKLE_WEIGHTS_FILE = "adapter_model.bin"

# Files beside config and weights that change how the adapter answers.
OPTIONAL_FILES = (
    "adapter.yaml",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of one adapter directory that affect what it serves, relative, sorted."""

    root: Path
    config: Path
    weights: tuple[Path, ...]
    extra: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        return tuple(sorted((self.config, *self.weights, *self.extra)))

    @property
    def size_bytes(self) -> int:
        return sum((self.root / path).stat().st_size for path in self.all)


def find_adapter_files(root: Path) -> AdapterFiles:
    """List the files of an adapter directory.

    Raises FileNotFoundError naming what is missing, PermissionError for what is not a regular file
    inside of ``root``: a pipe, a directory, a link that leads out of it or nowhere.
    """
    config = _contained(root, Path(CONFIG_FILE))
    weights = _weight_files(root)
    extra = tuple(Path(name) for name in OPTIONAL_FILES if os.path.lexists(root / name))
    for path in (*weights, *extra):
        _contained(root, path)
    return AdapterFiles(root=root, config=config, weights=weights, extra=extra)


def weight_file_names(names: Collection[str]) -> tuple[str, ...]:
    """Choose an adapter's weight files among the names beside its config; () if none is one."""
    if WEIGHTS_FILE in names:
        return (WEIGHTS_FILE,)
    if WEIGHTS_INDEX_FILE in names:
        return (WEIGHTS_INDEX_FILE, *sorted(filter(_is_shard, names)))
    return (PICKLE_WEIGHTS_FILE,) if PICKLE_WEIGHTS_FILE in names else ()


class AdapterChangedError(OSError):
    """A file changed while it was read."""


class DigestBuilder:
    """SHA-256 over names, sizes and content of files, to be added in sorted order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256(b"lorafleet-adapter-v1\0")

    def add(self, path: Path, size: int, chunks: Iterable[bytes | bytearray]) -> None:
        """Add one file. Raises AdapterChangedError when the chunks do not add up to ``size``."""
        name = path.as_posix().encode()
        self._digest.update(len(name).to_bytes(4, "big") + name)
        self._digest.update(size.to_bytes(8, "big"))
        for chunk in chunks:
            self._digest.update(chunk)
            size -= len(chunk)
        if size != 0:
            raise AdapterChangedError(f"{path} changed while it was read")

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def adapter_digest(files: AdapterFiles) -> str:
    """SHA-256, hex, over names, sizes and content of the adapter's files in sorted order."""
    builder = DigestBuilder()
    for path in files.all:
        with (files.root / path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            builder.add(path, size, iter(partial(file.read, _CHUNK), b""))
    return builder.hexdigest()


def _weight_files(root: Path) -> tuple[Path, ...]:
    names = weight_file_names([path.name for path in root.glob("adapter_model*")])
    if not names:
        raise FileNotFoundError(f"no {WEIGHTS_FILE} in {root}")
    return tuple(map(Path, names))


def _is_shard(name: str) -> bool:
    return fnmatchcase(name, "adapter_model-*-of-*.safetensors")


def _contained(root: Path, path: Path) -> Path:
    full = root / path
    try:
        full.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"no {path} in {root}") from None
    # Unlike Path.resolve, it does not mind links in a circle.
    if not Path(os.path.realpath(full)).is_relative_to(os.path.realpath(root)):
        raise PermissionError(f"{path} in {root} is a link that leaves the directory")
    if not full.is_file():
        raise PermissionError(f"{path} in {root} is not a regular file")
    return path
