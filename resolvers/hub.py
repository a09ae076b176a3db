"""Adapters on the Hugging Face Hub, found by name or by ``hf://`` URI.

Only what an allow-list names is asked for, every answer is of one commit, and every file is
compared with the hash that the Hub lists for it. Tokens come from ``huggingface_hub``'s own chain:
environment, then log-in. Knows nothing of who asks.
"""

import asyncio
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from huggingface_hub import HfApi, get_token, hf_hub_url

from adapters import DigestBuilder, LoRARequest, validate_adapter_name
from resolvers.base import (
    AdapterSourceInvalidError,
    ResolverConfigError,
    SourceUnavailableError,
)
from resolvers.file_lock import LockTimeoutError
from resolvers.hub_failures import FAILURES, DamagedError, describe_failure, is_transient
from resolvers.remote_files import RemoteFile, choose_files
from resolvers.retries import retrying
from resolvers.store import AdapterStore

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

    from resolvers.staging import Staging

_CHUNK = 256 << 10
_MAX_DOWNLOADS = 8
_TIMEOUT = httpx.Timeout(15.0, connect=5.0)
_PLACE = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubFolder:
    """A folder of a repository, at a branch, tag or commit."""

    repository: str
    folder: str
    revision: str

    @classmethod
    def parse(cls, uri: str, revision: str) -> "HubFolder":
        """Read ``hf://organisation/repository/folder@revision``; the last two may be missing."""
        path, _, own_revision = uri.removeprefix("hf://").partition("@")
        segments = path.strip("/").split("/")
        repository = "/".join(segments[:2])
        if not uri.startswith("hf://") or len(segments) < 2 or not _PLACE.fullmatch(repository):
            raise ValueError(f"{uri!r} is not of the form hf://organisation/repository@revision")
        return cls(repository, "/".join(segments[2:]), own_revision or revision)

    @property
    def prefix(self) -> str:
        """What the names of its files start with."""
        return f"{self.folder}/" if self.folder else ""

    def __str__(self) -> str:
        return f"hf://{self.repository}/{self.prefix}".rstrip("/") + f"@{self.revision}"


class HubResolver:
    """Takes a name as ``organisation/repository``, perhaps with a folder in it.

    ``allowed`` lists organisations and single repositories; of other names the Hub never hears.
    ``revisions`` pins repositories to a branch, tag or commit, ``revision`` all others.
    ``anonymous`` sends no token.
    """

    scheme = "hf"

    def __init__(
        self,
        store: AdapterStore,
        allowed: Sequence[str],
        *,
        revision: str = "main",
        revisions: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        anonymous: bool = False,
        attempts: int = 4,
    ) -> None:
        if isinstance(allowed, str) or not all(map(_PLACE.fullmatch, allowed)):
            raise ResolverConfigError(f"allowed must list organisations, got {allowed!r}")
        self._store = store
        self._allowed = frozenset(allowed)
        self._revision = revision
        self._revisions = dict(revisions or {})
        self._endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None
        self._is_anonymous = anonymous
        self._attempts = attempts
        # Of its own, so that slow downloads keep nobody else from a thread.
        self._threads = ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="hub-adapter")

    def covers(self, uri: str) -> bool:
        """Whether a URI names something that the allow-list has."""
        try:
            return self._is_allowed(HubFolder.parse(uri, self._revision).repository)
        except ValueError:
            return False

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Download the adapter of that name, or return None if it is not there or not allowed."""
        validate_adapter_name(lora_name)
        uri = f"hf://{lora_name}"
        if not self.covers(uri):
            return None
        try:
            return await self.fetch(uri, lora_name, None)
        except FileNotFoundError:
            return None

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Bring an adapter to the node's store, with exactly these bytes if a digest is given."""
        if not self.covers(uri):
            raise FileNotFoundError(f"{uri} is not on the list of what may be loaded from the Hub")
        folder = HubFolder.parse(uri, self._revision)
        if "@" not in uri:
            pinned = self._revisions.get(folder.repository, self._revision)
            folder = replace(folder, revision=pinned)
        cancelled = threading.Event()
        try:
            commit, found, path = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._fetch, folder, cancelled
            )
        finally:
            # A thread cannot be cancelled, but it looks at this between two chunks.
            cancelled.set()
        if digest not in (None, found):
            raise AdapterSourceInvalidError(
                f"{folder} changed: its content is sha256 {found}, registered was {digest}"
            )
        return LoRARequest(
            lora_name=lora_name,
            lora_path=str(path),
            digest=found,
            source_uri=str(replace(folder, revision=commit)),
        )

    def _is_allowed(self, repository: str) -> bool:
        return not self._allowed.isdisjoint({repository, repository.partition("/")[0]})

    def _fetch(self, folder: HubFolder, cancelled: threading.Event) -> tuple[str, str, Path]:
        with _failures_of(folder):
            commit, files = retrying(self._attempts, is_transient, cancelled)(self._list, folder)
            at_commit = replace(folder, revision=commit)
            digest, path = self._store.get_or_fetch(
                repr((self._endpoint, str(at_commit))),
                lambda: self._download(at_commit, files, cancelled),
                cancelled=cancelled,
            )
            return commit, digest, path

    def _list(self, folder: HubFolder) -> tuple[str, tuple[RemoteFile, ...]]:
        """The commit behind a revision, and the adapter's files in it."""
        token = False if self._is_anonymous else None
        info = HfApi(endpoint=self._endpoint, token=token).model_info(
            folder.repository, revision=folder.revision, files_metadata=True, timeout=15.0
        )
        if info.id != folder.repository:
            # Whoever owns the new place need not be on the list.
            raise AdapterSourceInvalidError(f"{folder} has moved to {info.id}")
        if info.sha is None:
            raise SourceUnavailableError(f"{folder}: the Hub names no commit")
        listed = (
            _remote_file(sibling, folder.prefix)
            for sibling in info.siblings or ()
            if sibling.rfilename.startswith(folder.prefix)
        )
        return info.sha, choose_files(listed, str(folder))

    def _download(
        self, folder: HubFolder, files: tuple[RemoteFile, ...], cancelled: threading.Event
    ) -> str:
        builder = DigestBuilder()
        with (
            self._store.stage({file.name: file.size for file in files}) as staging,
            self._client() as client,
        ):
            download = _Download(self._endpoint, folder, client, staging, cancelled)
            for file in files:
                retrying(self._attempts, is_transient, cancelled)(download.write, file)
                builder.add(Path(file.name), file.size, staging.read(file.name, 0, file.size))
                staging.sync(file.name)
            digest = builder.hexdigest()
            state = repr((self._endpoint, str(folder)))
            self._store.commit(staging, digest, source_state=state)
        return digest

    def _client(self) -> httpx.Client:
        # Files are on other hosts; a token is not sent on to them.
        token = None if self._is_anonymous else get_token()
        headers = {"accept-encoding": "identity"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT)


@dataclass(frozen=True, slots=True)
class _Download:
    endpoint: str | None
    folder: HubFolder
    client: httpx.Client
    staging: "Staging"
    cancelled: threading.Event

    def write(self, file: RemoteFile) -> None:
        """Write one file to its place, and compare it with what is listed."""
        url = hf_hub_url(
            self.folder.repository,
            self.folder.prefix + file.name,
            revision=self.folder.revision,
            endpoint=self.endpoint,
        )
        kind, _, expected = file.etag.partition(":")
        content = hashlib.new(kind, usedforsecurity=False)
        if kind == "sha1":  # the name that git gives to a file
            content.update(b"blob %d\0" % file.size)
        position = 0
        with self.client.stream("GET", url) as response:
            response.raise_for_status()
            for chunk in response.iter_raw(_CHUNK):
                if self.cancelled.is_set():
                    raise SourceUnavailableError("the download was cancelled")
                if position + len(chunk) > file.size:
                    raise DamagedError(f"{file.name} is longer than listed")
                self.staging.write(file.name, position, chunk)
                content.update(chunk)
                position += len(chunk)
        if content.hexdigest() != expected:
            raise DamagedError(f"{file.name} is not what is listed")


def _remote_file(sibling: "RepoSibling", prefix: str) -> RemoteFile:
    name = sibling.rfilename.removeprefix(prefix)
    if sibling.lfs is not None:
        return RemoteFile(name, sibling.lfs.size, f"sha256:{sibling.lfs.sha256}")
    if sibling.size is None or sibling.blob_id is None:
        raise SourceUnavailableError(f"the Hub does not tell the size of {sibling.rfilename}")
    return RemoteFile(name, sibling.size, f"sha1:{sibling.blob_id}")


@contextmanager
def _failures_of(folder: HubFolder) -> Iterator[None]:
    """Say what went wrong in words of ours: the library's hold URLs and request ids."""
    try:
        yield
    except LockTimeoutError as error:
        raise SourceUnavailableError(f"{folder} is still being downloaded") from error
    except FAILURES as error:
        raise describe_failure(error, str(folder)) from error
