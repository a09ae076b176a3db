"""Reads an adapter's files once, so that what was hashed is what is parsed."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from adapters.digest import AdapterChangedError, AdapterFiles, DigestBuilder

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The bytes of config and weights, by file name, and the digest of all of the adapter."""

    digest: str
    config: bytes
    weights: dict[str, bytearray]


def read_adapter(files: AdapterFiles) -> AdapterContent:
    """Read every file once and hash what was read.

    The digest equals ``adapter_digest``. Raises OSError when a file cannot be read, its subclass
    AdapterChangedError when one changes meanwhile.
    """
    builder = DigestBuilder()
    kept = {files.config, *files.weights}
    content: dict[Path, bytearray] = {}
    for path in files.all:
        with (files.root / path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if path in kept:
                content[path] = _read_whole(file, size, path)
                builder.add(path, size, [content[path]])
            else:
                builder.add(path, size, _read_chunks(file))
    return AdapterContent(
        digest=builder.hexdigest(),
        config=bytes(content[files.config]),
        weights={path.name: content[path] for path in files.weights},
    )


def _read_whole(file: FileIO, size: int, path: Path) -> bytearray:
    data = bytearray(size)
    with memoryview(data) as view:
        position = 0
        while count := file.readinto(view[position:]):
            position += count
    if position != size or file.read(1):
        raise AdapterChangedError(f"{path} changed while it was read")
    return data


def _read_chunks(file: FileIO) -> Iterator[bytes]:
    return iter(partial(file.read, _CHUNK), b"")
