"""What went wrong with S3: whether it may pass by itself, and what to tell people.

Knows boto3's exceptions and the protocol's error codes. Messages name bucket and prefix, never
credentials, request ids or account numbers.
"""

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError

from resolvers.base import ResolverError, SourceForbiddenError, SourceUnavailableError

_THROTTLED = frozenset(
    {
        "RequestLimitExceeded",
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
_NO_ACCESS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.TokenRetrievalError,
    boto.NoRegionError,
    boto.ParamValidationError,
)
_TROUBLED = 500
# "Not there any more", "not that version any more", "not that long any more".
_CHANGED = frozenset({404, 412, 416})


class ObjectChangedError(Exception):
    """An object is not, or not any more, what was listed: the download must start again."""


class TruncatedError(Exception):
    """A body ended early, or is longer than asked for."""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    if isinstance(error, ClientError):
        return _status(error) >= _TROUBLED or _status(error) == 429 or _code(error) in _THROTTLED
    if isinstance(error, BotoCoreError):
        return not isinstance(error, _NO_ACCESS)
    return isinstance(error, TruncatedError)


def is_change(error: ClientError) -> bool:
    """Whether a listed object was replaced or removed meanwhile."""
    return _status(error) in _CHANGED and _code(error) != "NoSuchBucket"


def describe_failure(
    error: ClientError | BotoCoreError | TruncatedError | ResolverError, where: str
) -> ResolverError:
    """Translate what is left after all attempts."""
    if isinstance(error, ResolverError):
        return error
    if isinstance(error, _NO_ACCESS):
        return SourceForbiddenError(f"{where} cannot be asked: {_reason(error)}")
    if isinstance(error, ClientError) and not is_transient(error):
        return SourceForbiddenError(f"{where} refused the request: {_code(error)}")
    return SourceUnavailableError(f"{where} cannot be reached: {_reason(error)}")


def _reason(error: Exception) -> str:
    return _code(error) if isinstance(error, ClientError) else type(error).__name__


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", _status(error)))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", _TROUBLED))
