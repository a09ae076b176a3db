"""Downloads an adapter's objects in parallel ranges and hashes them in order, as they come.

Each range is asked for with the ETag that was listed, so all bytes are of one version of an
object. Ranges go to their place in the staged file at once; what is hashed is read back from
there, and synced while the next ranges are on their way. Knows nothing of what the files mean or of
where adapters are kept.
"""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from botocore.exceptions import ClientError
from tenacity import Retrying

from adapters import DigestBuilder
from resolvers.base import SourceUnavailableError
from resolvers.remote_files import RemoteFile
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
class _Part:
    file: RemoteFile
    start: int
    end: int


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
            parts = [part for file in files for part in self._parts(file)]
            received = self._receive(pool, parts)
            for file in files:
                builder.add(Path(file.name), file.size, self._checked(file, received, progress))
        finally:
            pool.shutdown(cancel_futures=True)
        return builder.hexdigest()

    def _parts(self, file: RemoteFile) -> Iterator[_Part]:
        for start in range(0, file.size, self.part_bytes):
            yield _Part(file, start, min(start + self.part_bytes, file.size))

    def _receive(
        self, pool: ThreadPoolExecutor, parts: list[_Part]
    ) -> Iterator[tuple[_Part, bool]]:
        """Yield parts in order, each when it is there, and whether its ETag is an MD5."""
        futures = [pool.submit(self._fetch, part) for part in parts]
        for part, future in zip(parts, futures, strict=True):
            yield part, future.result()

    def _checked(
        self, file: RemoteFile, received: Iterator[tuple[_Part, bool]], progress: _Progress
    ) -> Iterator[bytes]:
        md5 = hashlib.md5(usedforsecurity=False)
        expected = _MD5.fullmatch(file.etag)
        is_checked = expected is not None
        for part, etag_is_md5 in islice(received, len(range(0, file.size, self.part_bytes))):
            is_checked = is_checked and etag_is_md5
            for chunk in self.staging.read(file.name, part.start, part.end):
                if is_checked:
                    md5.update(chunk)
                yield chunk
            self.staging.sync(file.name)
            progress.add(part.end - part.start)
        if expected is not None and is_checked and file.size and md5.hexdigest() != expected[1]:
            raise ObjectChangedError(f"the content of {file.name} is not what its ETag says")

    def _fetch(self, part: _Part) -> bool:
        return self.retrying.copy()(self._fetch_once, part)

    def _fetch_once(self, part: _Part) -> bool:
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
        self._write(response, part)
        return self._etag_is_md5(response)

    def _write(self, response: "GetObjectOutputTypeDef", part: _Part) -> None:
        position = part.start
        body = response["Body"]
        try:
            while chunk := body.read(min(_CHUNK, part.end - position)):
                self._check_cancelled()
                self.staging.write(part.file.name, position, chunk)
                position += len(chunk)
            is_longer = bool(body.read(1))
        finally:
            body.close()
        if position != part.end or is_longer:
            raise TruncatedError(f"not {part.end - part.start} bytes, as asked for")

    def _etag_is_md5(self, response: "GetObjectOutputTypeDef") -> bool:
        """Encrypted objects and directory buckets have ETags that only look like an MD5."""
        encryption = response.get("ServerSideEncryption", "AES256")
        is_plain = encryption == "AES256" and "SSECustomerAlgorithm" not in response
        return is_plain and not self.bucket.endswith("--x-s3")

    def _check_cancelled(self) -> None:
        if self.cancelled.is_set():
            raise SourceUnavailableError("the download was cancelled")
