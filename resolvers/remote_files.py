"""Files as a source lists them, and which of them make an adapter.

Knows names and sizes. Knows nothing of how they are listed or brought here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from adapters import CONFIG_FILE, OPTIONAL_FILES, WEIGHTS_FILE, weight_file_names
from resolvers.base import AdapterSourceInvalidError

_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file as listed; ``etag`` changes with its content."""

    name: str
    size: int
    etag: str


def choose_files(listed: Iterable[RemoteFile], where: str) -> tuple[RemoteFile, ...]:
    """The files that make the adapter, sorted by name; FileNotFoundError if it is not there."""
    found = {file.name: file for file in listed}
    if CONFIG_FILE not in found:
        raise FileNotFoundError(f"no {CONFIG_FILE} in {where}")
    weights = weight_file_names(found)
    if not weights:
        raise AdapterSourceInvalidError(f"no {WEIGHTS_FILE} in {where}")
    config = found[CONFIG_FILE]
    if config.size > _MAX_CONFIG_BYTES:
        raise AdapterSourceInvalidError(
            f"{CONFIG_FILE} in {where} takes {config.size} bytes, the limit is {_MAX_CONFIG_BYTES}"
        )
    extra = [name for name in OPTIONAL_FILES if name in found]
    return tuple(found[name] for name in sorted((CONFIG_FILE, *weights, *extra)))
