"""Pushed adapters beside a journal in S3: ``<uri>/<digest>/<file>``.

Knows boto3. Every method blocks.
"""

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from deployments.errors import JournalUnavailableError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_DELETED_AT_ONCE = 1000


class S3PushArchive:
    """Everything below ``uri`` (``s3://bucket/prefix``)."""

    def __init__(self, uri: str, *, endpoint_url: str | None = None) -> None:
        parts = urlsplit(uri)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/") + "/"
        config = Config(
            connect_timeout=2, retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"}
        )
        session = boto3.session.Session()
        self._client: S3Client = session.client("s3", endpoint_url=endpoint_url, config=config)

    def keep(self, digest: str, directory: Path) -> None:
        """Keep an adapter's files; the config last, so that what has one is complete."""
        try:
            for path in sorted(directory.iterdir(), key=lambda path: path.suffix == ".json"):
                self._client.upload_file(str(path), self._bucket, self._key(digest, path.name))
        except (ClientError, BotoCoreError, boto3.exceptions.Boto3Error) as error:
            raise JournalUnavailableError(f"the pushed files cannot be kept: {error}") from error

    def restore(self, digest: str, directory: Path) -> None:
        """Bring an adapter's files back, or raise FileNotFoundError."""
        prefix = self._key(digest, "")
        try:
            keys = list(self._keys(prefix))
            for key in keys:
                target = directory / key.removeprefix(prefix)
                self._client.download_file(self._bucket, key, str(target))
        except (ClientError, BotoCoreError, boto3.exceptions.Boto3Error) as error:
            raise JournalUnavailableError(f"the pushed files cannot be read: {error}") from error
        if not keys:
            raise FileNotFoundError(f"no pushed adapter has the digest {digest}")

    def remove_all_but(self, digests: Collection[str]) -> None:
        """Remove what nothing means any more. What cannot be removed now is at the next call."""
        try:
            old: list[Any] = [
                {"Key": key}
                for key in self._keys(self._prefix)
                if key.removeprefix(self._prefix).partition("/")[0] not in digests
            ]
            for start in range(0, len(old), _DELETED_AT_ONCE):
                batch = old[start : start + _DELETED_AT_ONCE]
                self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": batch})
        except (ClientError, BotoCoreError):
            logger.warning("cannot remove old pushed adapters", exc_info=True)

    def _key(self, digest: str, name: str) -> str:
        return f"{self._prefix}{digest}/{name}"

    def _keys(self, prefix: str) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        for page in pages:
            for entry in page.get("Contents", ()):
                yield entry["Key"]
