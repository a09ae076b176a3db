"""Adapters as directories under given roots, found by their name."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from adapters import CONFIG_FILE, LoRARequest, find_adapter_files, validate_adapter_name
from resolvers.base import (
    AdapterSourceInvalidError,
    SourceForbiddenError,
    SourceUnavailableError,
)

# Attempts to see a directory at rest.
_MAX_LOOKS = 10

_State = tuple[tuple[str, int, int, int], ...]


class FilesystemResolver:
    """Looks for ``<root>/<name>/adapter_config.json``, root by root.

    A directory that was written to within the last ``settle_s`` seconds is looked at again until
    it is at rest, so that config and weights of two versions are not taken for one.
    """

    def __init__(self, directories: Sequence[str], *, settle_s: float = 0.5) -> None:
        self._roots = [Path(root) for root in directories]
        self._settle_s = settle_s

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the directory of that name, or None if no root has one."""
        validate_adapter_name(lora_name)
        path = await asyncio.to_thread(self._find, lora_name)
        if path is None:
            return None
        await self._wait_until_settled(path)
        return LoRARequest(lora_name=lora_name, lora_path=str(path), source_uri=path.as_uri())

    def _find(self, lora_name: str) -> Path | None:
        for root in self._roots:
            path = Path(os.path.realpath(root / lora_name))
            if not _exists(path / CONFIG_FILE):
                continue
            # A link may lead anywhere; only what lies under the root is the root's to give.
            if not path.is_relative_to(os.path.realpath(root)):
                raise AdapterSourceInvalidError(f"{lora_name!r} is a link that leaves its root")
            return path
        return None

    async def _wait_until_settled(self, path: Path) -> None:
        before = await asyncio.to_thread(_state, path)
        for _ in range(_MAX_LOOKS):
            if not self._is_recent(before):
                return
            await asyncio.sleep(self._settle_s)
            after = await asyncio.to_thread(_state, path)
            if after == before:
                return
            before = after
        raise SourceUnavailableError(
            f"{path.name} is being written", retry_after_s=max(1.0, self._settle_s)
        )

    def _is_recent(self, state: _State) -> bool:
        newest_s = max(modified_ns for _, _, modified_ns, _ in state) / 1e9
        return abs(time.time() - newest_s) < self._settle_s


def _exists(path: Path) -> bool:
    """Whether anything is there, of whatever kind."""
    try:
        path.lstat()
    except PermissionError as error:
        where = path.parent.name
        raise SourceForbiddenError(f"{where} cannot be read: {error.strerror}") from error
    except OSError:
        return False
    return True


def _state(path: Path) -> _State:
    """What changes when somebody writes to an adapter's directory."""
    try:
        files = find_adapter_files(path).all
        stats = [(str(file), (path / file).stat()) for file in files]
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise AdapterSourceInvalidError(str(error)) from error
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)
