"""What went wrong with the Hub: whether it may pass by itself, and what to tell people.

Knows the exceptions of ``huggingface_hub`` and of HTTP. Messages name repository and revision,
never tokens or signed URLs.
"""

from json import JSONDecodeError

import httpx
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from resolvers.base import (
    AdapterSourceInvalidError,
    SourceForbiddenError,
    SourceUnavailableError,
)


class DamagedError(Exception):
    """A file did not arrive as it is listed."""


# The library has changed the package that it speaks HTTP with; its own error derives from it.
_LIBRARY_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_TROUBLE = (
    httpx.HTTPError,
    _LIBRARY_HTTP_ERROR,
    ConnectionError,
    TimeoutError,
    JSONDecodeError,
    DamagedError,
)
# All that ``describe_failure`` has words for.
FAILURES = (*_TROUBLE, HFValidationError)

_REFUSED = (401, 403)
_PASSING = (408, 429)
_TROUBLED = 500


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed in a moment."""
    status = _status(error)
    if status is not None:
        return status in _PASSING or status >= _TROUBLED
    return isinstance(error, _TROUBLE)


def describe_failure(error: Exception, where: str) -> Exception:
    """Translate what is left after all attempts; FileNotFoundError if there is nothing."""
    if isinstance(error, RevisionNotFoundError):
        return AdapterSourceInvalidError(f"{where}: the repository has no such revision")
    if isinstance(error, GatedRepoError | DisabledRepoError):
        return SourceForbiddenError(f"{where} is gated or disabled, and this token has no access")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return FileNotFoundError(f"{where} is not on the Hub, or not for this token")
    status = _status(error)
    if status in _REFUSED:
        return SourceForbiddenError(f"{where} refused the request: {status}")
    if isinstance(error, DamagedError):
        return SourceUnavailableError(f"{where} keeps arriving damaged: {error}")
    reason = type(error).__name__ if status is None else status
    return SourceUnavailableError(
        f"{where} cannot be reached: {reason}", retry_after_s=_retry_after_s(error)
    )


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _retry_after_s(error: Exception) -> float | None:
    value = getattr(getattr(error, "response", None), "headers", {}).get("retry-after", "")
    return float(value) if value.isdecimal() else None
