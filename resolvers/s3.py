"""Adapters in S3 and what speaks its protocol, found by name or by ``s3://`` URI.

Knows how to list, download and verify objects, and which failures pass by themselves. Credentials
come from boto3's own chain: environment, profile, instance role. Knows nothing of who asks.
"""

import asyncio
import functools
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tenacity import Retrying

from adapters import LoRARequest, validate_adapter_name
from resolvers.base import (
    AdapterSourceInvalidError,
    ResolverConfigError,
    ResolverError,
    SourceUnavailableError,
)
from resolvers.file_lock import LockTimeoutError
from resolvers.remote_files import RemoteFile, choose_files
from resolvers.retries import retrying
from resolvers.s3_download import Download
from resolvers.s3_failures import ObjectChangedError, TruncatedError, describe_failure, is_transient
from resolvers.store import AdapterStore

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)

NAME_FIELD = "{lora_name}"

_MAX_LISTED = 1000
_MAX_PAGES = 5
_MAX_CHANGES = 3
_MAX_DOWNLOADS = 16
_session_lock = threading.Lock()
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class S3Prefix:
    """A "directory" of a bucket; ``key`` ends with a slash unless it is empty."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, uri: str) -> "S3Prefix":
        """Read ``s3://bucket/some/prefix``; nothing in it is unescaped, as in other S3 tools."""
        bucket = urlsplit(uri).netloc
        if not uri.startswith("s3://") or not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{uri!r} is not of the form s3://bucket/prefix")
        key = uri.removeprefix(f"s3://{bucket}").strip("/")
        return cls(bucket, f"{key}/" if key else "")

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


class S3Resolver:
    """Looks for ``<uri>/<name>/adapter_config.json``, where ``{lora_name}`` in ``uri`` is the name.

    It also fetches any ``s3://`` URI with the same credentials. ``anonymous`` sends no credentials
    at all. ``download`` holds fields of ``DownloadOptions``.
    """

    scheme = "s3"

    def __init__(
        self,
        store: AdapterStore,
        uri: str,
        *,
        endpoint_url: str | None = None,
        region_name: str | None = None,
        profile_name: str | None = None,
        anonymous: bool = False,
        download: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = _template(uri)
        self._store = store
        self._options = DownloadOptions(**(download or {}))
        self._profile_name = profile_name
        self._client_options: dict[str, Any] = {
            "endpoint_url": endpoint_url,
            "region_name": region_name,
            "config": self._options.client_config(anonymous=anonymous),
        }
        self._client: S3Client | None = None
        # Of its own, so that slow downloads keep nobody else from a thread.
        self._threads = ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="s3-adapter")

    def covers(self, uri: str) -> bool:
        """Whether a URI lies where this resolver looks for adapters."""
        return uri.startswith(self._template.partition(NAME_FIELD)[0])

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Download the adapter of that name, or return None if the bucket has none."""
        validate_adapter_name(lora_name)
        uri = self._template.replace(NAME_FIELD, lora_name)
        try:
            return await self.fetch(uri, lora_name, None)
        except FileNotFoundError:
            return None

    async def fetch(self, uri: str, lora_name: str, digest: str | None) -> LoRARequest:
        """Bring an adapter to the node's store, with exactly these bytes if a digest is given."""
        prefix = S3Prefix.parse(uri)
        cancelled = threading.Event()
        try:
            found, path = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._fetch, prefix, digest, cancelled
            )
        finally:
            # A thread cannot be cancelled, but it looks at this between two chunks.
            cancelled.set()
        return LoRARequest(
            lora_name=lora_name, lora_path=path, digest=found, source_uri=str(prefix)
        )

    def _fetch(
        self, prefix: S3Prefix, digest: str | None, cancelled: threading.Event
    ) -> tuple[str, str]:
        with _failures_of(prefix):
            for _ in range(_MAX_CHANGES):
                try:
                    found, path = self._fetch_once(prefix, cancelled)
                except ObjectChangedError as error:
                    logger.info("%s: %s, starting again", prefix, error)
                    continue
                if digest not in (None, found):
                    raise AdapterSourceInvalidError(
                        f"{prefix} changed: its content is sha256 {found}, registered was {digest}"
                    )
                return found, path
            raise SourceUnavailableError(f"{prefix} keeps changing or arriving damaged")

    def _fetch_once(self, prefix: S3Prefix, cancelled: threading.Event) -> tuple[str, str]:
        files = self._list(prefix, cancelled)
        state = repr((self._client_options["endpoint_url"], str(prefix), files))
        digest, path = self._store.get_or_fetch(
            state, lambda: self._download(prefix, files, state, cancelled), cancelled=cancelled
        )
        return digest, str(path)

    def _download(
        self,
        prefix: S3Prefix,
        files: tuple[RemoteFile, ...],
        state: str,
        cancelled: threading.Event,
    ) -> str:
        with self._store.stage({file.name: file.size for file in files}) as staging:
            digest = Download(
                client=self._connect(),
                bucket=prefix.bucket,
                prefix=prefix.key,
                staging=staging,
                cancelled=cancelled,
                retrying=self._retrying(cancelled),
                part_bytes=self._options.part_bytes,
                concurrency=self._options.concurrency,
            ).run(files)
            # Objects change one by one, so an unchanged listing is what tells that they belong
            # together.
            if self._list(prefix, cancelled) != files:
                raise ObjectChangedError("its files changed")
            self._store.commit(staging, digest, source_state=state)
        return digest

    # -- listing

    def _list(self, prefix: S3Prefix, cancelled: threading.Event) -> tuple[RemoteFile, ...]:
        """The files that make the adapter, sorted by name; FileNotFoundError if it is not there."""
        return choose_files(self._objects(prefix, cancelled), str(prefix))

    def _objects(self, prefix: S3Prefix, cancelled: threading.Event) -> Iterator[RemoteFile]:
        options: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = self._retrying(cancelled)(
                self._connect().list_objects_v2,
                Bucket=prefix.bucket,
                Prefix=prefix.key,
                Delimiter="/",
                MaxKeys=_MAX_LISTED,
                **options,
            )
            for item in page.get("Contents", ()):
                yield RemoteFile(item["Key"].removeprefix(prefix.key), item["Size"], item["ETag"])
            if not page.get("IsTruncated"):
                return
            options = {"ContinuationToken": page["NextContinuationToken"]}
        raise AdapterSourceInvalidError(f"{prefix} holds too many objects to be an adapter")

    # -- connection

    def _connect(self) -> "S3Client":
        with _session_lock:  # sessions are not made for threads, clients are
            if self._client is None:
                session = _session(self._profile_name)
                self._client = session.client("s3", **self._client_options)
            return self._client

    def _retrying(self, cancelled: threading.Event) -> Retrying:
        return retrying(self._options.attempts, is_transient, cancelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadOptions:
    """How hard to try and how fast. Times in seconds."""

    attempts: int = 6
    concurrency: int = 8
    part_bytes: int = 8 << 20
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 15.0

    def client_config(self, *, anonymous: bool) -> Config:
        """boto3's settings; it does not retry, because bodies must be retried here anyway."""
        return Config(
            connect_timeout=self.connect_timeout_s,
            read_timeout=self.read_timeout_s,
            max_pool_connections=8 * self.concurrency,
            retries={"total_max_attempts": 1},
            signature_version=UNSIGNED if anonymous else None,
        )


@functools.cache
def _session(profile_name: str | None) -> boto3.Session:
    """One for all resolvers: it takes a third of a second to read what boto3 knows of S3."""
    return boto3.Session(profile_name=profile_name)


def _template(uri: str) -> str:
    template = uri if NAME_FIELD in uri else f"{uri.rstrip('/')}/{NAME_FIELD}/"
    try:
        S3Prefix.parse(template.replace(NAME_FIELD, "name"))
    except ValueError as error:
        raise ResolverConfigError(str(error)) from error
    return template


@contextmanager
def _failures_of(prefix: S3Prefix) -> Iterator[None]:
    """Say what went wrong in words of ours: boto3's may hold keys of the account."""
    try:
        yield
    except LockTimeoutError as error:
        raise SourceUnavailableError(f"{prefix} is still being downloaded") from error
    except (ClientError, BotoCoreError, TruncatedError, ResolverError) as error:
        failure = describe_failure(error, str(prefix))
        raise failure if failure is not error else error from error.__cause__
