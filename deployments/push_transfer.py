"""How pushed files travel through Ray: to the controller in parts, from it as shared objects.

Each part that replicas read is put into Ray's object store once and goes to each node once, from
whichever node has it already. Knows Ray; knows nothing of names.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import ray

from deployments.controller_client import ControllerClient
from deployments.keyed_lock import KeyedLock
from deployments.push_fetcher import PushedFile
from deployments.push_store import PushStore

_PART_BYTES = 8 << 20
# All replicas ask within seconds of each other; one that comes later has the parts put again.
_SHARED_S = 30.0
# A trainer that pushes all the time must not fill the object store meanwhile.
_MAX_SHARED = 4


class PushSharing:
    """The controller's side: files as objects that every replica reads."""

    def __init__(self, pushes: PushStore) -> None:
        self._pushes = pushes
        self._shared: dict[str, Sequence[PushedFile]] = {}
        self._digests = KeyedLock()

    async def share(self, digest: str) -> Sequence[PushedFile]:
        """An adapter's files; raises FileNotFoundError."""
        async with self._digests.hold(digest):
            files = self._shared.get(digest)
            if files is None:
                path = await self._pushes.bring(digest)
                files = self._shared[digest] = await asyncio.to_thread(_put_files, path)
                while len(self._shared) > _MAX_SHARED:
                    # Whoever is reading it keeps its parts.
                    del self._shared[next(iter(self._shared))]
                asyncio.get_running_loop().call_later(_SHARED_S, self._shared.pop, digest, None)
            return files


async def send_upload(directory: Path, controller: ControllerClient) -> None:
    """Have the controller get received files, unless it sees this directory."""
    if await controller.has_upload(directory.name):
        return
    for path in await asyncio.to_thread(lambda: sorted(directory.iterdir())):
        with path.open("rb") as file:
            offset = 0
            while data := await asyncio.to_thread(file.read, _PART_BYTES):
                await controller.write_part(directory.name, path.name, offset, data)
                offset += len(data)


def _put_files(path: Path) -> Sequence[PushedFile]:
    return tuple(
        PushedFile(name=file.name, size_bytes=file.stat().st_size, parts=_put_parts(file))
        for file in sorted(path.iterdir())
    )


def _put_parts(path: Path) -> Sequence[ray.ObjectRef[bytes]]:
    parts = []
    with path.open("rb") as file:
        while data := file.read(_PART_BYTES):
            parts.append(ray.put(data))
    return tuple(parts)
