"""Downloads an adapter's objects in parallel ranges and hashes them in order, as they come.

Each range is asked for with the ETag that was listed, so all bytes are of one version of an
object. Knows nothing of what the files mean or of where adapters are kept.
"""

import hashlib
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError
from tenacity import Retrying

from adapters import DigestBuilder
from resolvers.base import SourceUnavailableError
from resolvers.s3_failures import ObjectChangedError, TruncatedError, is_change
from resolvers.staging import Staging

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

logger = logging.getLogger(__name__)

_CHUNK = 256 << 10
_PROGRESS_PERIOD_S = 5.0
_MD5 = re.compile(r'"([0-9a-f]{32})"')


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One object as listed."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class _Part:
    file: RemoteFile
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Received:
    data: bytearray
    etag_is_md5: bool


@dataclass(slots=True)
class _Progress:
    what: str
    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    reported: float = field(default_factory=time.monotonic)

    def add(self, size: int) -> None:
        self.done += size
        now = time.monotonic()
        if self.done == self.total or now - self.reported > _PROGRESS_PERIOD_S:
            self.reported = now
            rate = self.done / max(now - self.started, 1e-6) / 1e6
            logger.info("%s: %d of %d bytes, %.1f MB/s", self.what, self.done, self.total, rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """One adapter's download into a staging directory."""

    client: "S3Client"
    bucket: str
    prefix: str
    staging: Staging
    cancelled: threading.Event
    retrying: Retrying
    part_bytes: int
    concurrency: int

    def run(self, files: tuple[RemoteFile, ...]) -> str:
        """Write every file, which are sorted by name, and return the adapter's digest."""
        builder = DigestBuilder()
        what = f"s3://{self.bucket}/{self.prefix}"
        progress = _Progress(what, sum(file.size for file in files))
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="s3")
        try:
            received = self._receive(pool, [part for file in files for part in self._parts(file)])
            for file in files:
                chunks = self._checked(file, received, progress)
                builder.add(Path(file.name), file.size, chunks)
        finally:
            pool.shutdown(cancel_futures=True)
        return builder.hexdigest()

    def _parts(self, file: RemoteFile) -> Iterator[_Part]:
        for start in range(0, file.size, self.part_bytes):
            yield _Part(file, start, min(start + self.part_bytes, file.size))

    def _receive(self, pool: ThreadPoolExecutor, parts: list[_Part]) -> Iterator[_Received]:
        """Yield parts in order while the next ones are on their way."""
        waiting = iter(parts)
        # Parts in flight and a few that wait to be hashed: this bounds the memory.
        window = self.concurrency + 2
        running: deque[Future[_Received]] = deque(
            pool.submit(self._fetch, part) for part in islice(waiting, window)
        )
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(self._fetch, part) for part in islice(waiting, 1))

    def _checked(
        self, file: RemoteFile, received: Iterator[_Received], progress: _Progress
    ) -> Iterator[bytearray]:
        md5 = hashlib.md5(usedforsecurity=False)
        expected = _MD5.fullmatch(file.etag)
        is_checked = expected is not None
        for part in islice(received, len(range(0, file.size, self.part_bytes))):
            is_checked = is_checked and part.etag_is_md5
            if is_checked:
                md5.update(part.data)
            progress.add(len(part.data))
            yield part.data
        if expected is not None and is_checked and file.size and md5.hexdigest() != expected[1]:
            raise ObjectChangedError(f"the content of {file.name} is not what its ETag says")

    def _fetch(self, part: _Part) -> _Received:
        return self.retrying.copy()(self._fetch_once, part)

    def _fetch_once(self, part: _Part) -> _Received:
        self._check_cancelled()
        try:
            response = self.client.get_object(
                Bucket=self.bucket,
                Key=self.prefix + part.file.name,
                Range=f"bytes={part.start}-{part.end - 1}",
                IfMatch=part.file.etag,
            )
        except ClientError as error:
            if is_change(error):
                raise ObjectChangedError(f"{part.file.name} changed") from error
            raise
        if response["ETag"] != part.file.etag:
            response["Body"].close()
            raise ObjectChangedError(f"{part.file.name} changed")
        data = self._read(response, part.end - part.start)
        self.staging.write(part.file.name, part.start, data)
        return _Received(data, self._etag_is_md5(response))

    def _read(self, response: "GetObjectOutputTypeDef", size: int) -> bytearray:
        data = bytearray(size)
        received = 0
        body = response["Body"]
        try:
            with memoryview(data) as view:
                while received < size:
                    chunk = view[received : received + _CHUNK]
                    count = body.readinto(chunk)  # type: ignore[arg-type]
                    if not count:
                        break
                    self._check_cancelled()
                    received += count
            is_longer = bool(body.read(1))
        finally:
            body.close()
        if received != size or is_longer:
            raise TruncatedError(f"not {size} bytes, as asked for")
        return data

    def _etag_is_md5(self, response: "GetObjectOutputTypeDef") -> bool:
        """Encrypted objects and directory buckets have ETags that only look like an MD5."""
        encryption = response.get("ServerSideEncryption", "AES256")
        is_plain = encryption == "AES256" and "SSECustomerAlgorithm" not in response
        return is_plain and not self.bucket.endswith("--x-s3")

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise SourceUnavailableError("the download was cancelled")
