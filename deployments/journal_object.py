"""One object in S3, or what speaks its protocol, that is only ever written conditionally.

Knows boto3 and what its failures say about a write: that it happened, that it did not, that
somebody else's did, or that nobody can tell. Every method is one request and blocks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
)

from resolvers.s3_failures import is_transient

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 10.0
_WRITER = "lorafleet-writer"
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_CONFLICTS = frozenset({"409", "ConditionalRequestConflict", "OperationAborted"})
_CHANGED = frozenset({"412", "PreconditionFailed"})
# The request never left this machine.
_NOT_SENT = (EndpointConnectionError, ConnectTimeoutError)


class ObjectError(Exception):
    """A request failed. ``is_certain`` says that nothing was written, ``may_pass`` to try again."""

    def __init__(self, message: str, *, is_certain: bool, may_pass: bool) -> None:
        super().__init__(message)
        self.is_certain = is_certain
        self.may_pass = may_pass


class ObjectChangedError(Exception):
    """The object is not what the condition asked for: somebody else wrote it."""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """What is there: ``etag`` is the condition of the next write, ``writer`` who wrote it."""

    etag: str
    writer: str


class JournalObject:
    """The object ``uri`` (``s3://bucket/key``), with boto3's own chain of credentials."""

    def __init__(self, uri: str, *, endpoint_url: str | None = None) -> None:
        parts = urlsplit(uri)
        self.uri = uri
        self._place: Any = {"Bucket": parts.netloc, "Key": parts.path.lstrip("/")}
        # Whoever repeats a write must know whether it may have happened, so boto3 repeats none.
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
            retries={"total_max_attempts": 1},
        )
        session = boto3.session.Session()
        self._client: S3Client = session.client("s3", endpoint_url=endpoint_url, config=config)

    def read(self) -> tuple[ObjectState, bytes] | None:
        """The object, or None if there is none."""
        try:
            found = self._client.get_object(**self._place)
            return _state(found), found["Body"].read()
        except (ClientError, BotoCoreError) as error:
            if _code(error) in _MISSING:
                return None
            raise self._failure(error) from error

    def head(self) -> ObjectState | None:
        """What the object is, without its content."""
        try:
            return _state(self._client.head_object(**self._place))
        except (ClientError, BotoCoreError) as error:
            if _code(error) in _MISSING:
                return None
            raise self._failure(error) from error

    def write(self, body: bytes, writer: str, *, replaces: str | None) -> ObjectState:
        """Write the object if it still has this etag; None if there is still no object.

        Raises ObjectChangedError if it has another.
        """
        condition: Any = {"IfNoneMatch": "*"} if replaces is None else {"IfMatch": replaces}
        try:
            written = self._client.put_object(
                **self._place, **condition, Body=body, Metadata={_WRITER: writer}
            )
        except (ClientError, BotoCoreError) as error:
            if _code(error) in _CHANGED or (replaces is not None and _code(error) in _MISSING):
                raise ObjectChangedError(self.uri) from error
            raise self._failure(error) from error
        return ObjectState(written["ETag"], writer)

    def _failure(self, error: ClientError | BotoCoreError) -> ObjectError:
        may_pass = is_transient(error) or _code(error) in _CONFLICTS
        is_refused = isinstance(error, ClientError) and not is_transient(error)
        is_certain = is_refused or isinstance(error, _NOT_SENT) or not may_pass
        reason = _code(error) or type(error).__name__
        return ObjectError(f"{self.uri}: {reason}", is_certain=is_certain, may_pass=may_pass)


def _state(response: Any) -> ObjectState:
    return ObjectState(response["ETag"], response.get("Metadata", {}).get(_WRITER, ""))


def _code(error: ClientError | BotoCoreError) -> str:
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""
