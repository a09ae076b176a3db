"""How every deliberate error looks over HTTP: one table.

Status, OpenAI error type, the request field at fault, and when to try again. An error may name its
own ``param``; a type that is not in the table is looked up by its bases, and anything else is an
internal error whose message stays inside.
"""

import math
from dataclasses import dataclass, replace

from adapters import InvalidAdapterNameError
from deployments import errors
from engine import errors as engine_errors

_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """What an error becomes on the wire. ``reason`` names a refusal in metrics."""

    status: int
    type: str
    param: str | None = None
    retry_after_s: int | None = None
    reason: str | None = None


_INTERNAL = ErrorStatus(500, "InternalServerError")
_UNAVAILABLE = ErrorStatus(503, "ServiceUnavailableError", retry_after_s=_RETRY_AFTER_S)
_OVERLOADED = ErrorStatus(429, "RateLimitError", retry_after_s=_RETRY_AFTER_S, reason="queue_full")
_BAD_REQUEST = ErrorStatus(400, "BadRequestError")
_BAD_ADAPTER = ErrorStatus(400, "InvalidUserInput")

ERROR_TABLE: dict[type[Exception], ErrorStatus] = {
    InvalidAdapterNameError: ErrorStatus(400, "InvalidUserInput", "lora_name"),
    errors.ClusterError: _INTERNAL,
    errors.AdapterNotFoundError: ErrorStatus(404, "NotFoundError", "model"),
    errors.AdapterAlreadyLoadedError: ErrorStatus(400, "InvalidUserInput", "lora_name"),
    errors.AdapterRejectedError: ErrorStatus(400, "InvalidUserInput", "lora_path"),
    errors.AdapterCapacityError: ErrorStatus(507, "InsufficientStorageError"),
    errors.AdapterSourceError: ErrorStatus(404, "NotFoundError", "lora_path"),
    errors.InvalidAdapterSourceError: ErrorStatus(400, "InvalidUserInput", "lora_path"),
    errors.NameConflictError: ErrorStatus(400, "InvalidUserInput", "lora_name"),
    errors.PathNotAllowedError: ErrorStatus(403, "PermissionDeniedError", "lora_path"),
    errors.RuntimeUpdatingDisabledError: ErrorStatus(403, "PermissionDeniedError"),
    errors.ResolverUnavailableError: ErrorStatus(
        503, "ServiceUnavailableError", "model", _RETRY_AFTER_S
    ),
    # Nobody helps this by asking at once again.
    errors.ResolverForbiddenError: ErrorStatus(502, "BadGatewayError", "model", 60),
    errors.OperationTimeoutError: ErrorStatus(504, "TimeoutError"),
    errors.AdapterInUseError: ErrorStatus(409, "ConflictError", "lora_name"),
    errors.NoEarlierVersionError: ErrorStatus(409, "ConflictError", "generation"),
    errors.OperationNotFoundError: ErrorStatus(404, "NotFoundError", "operation_id"),
    errors.OperationConflictError: ErrorStatus(409, "ConflictError", "idempotency-key"),
    errors.JournalUnavailableError: _UNAVAILABLE,
    errors.ReplicaUnavailableError: _UNAVAILABLE,
    errors.OverloadedError: _OVERLOADED,
    errors.LimitExceededError: ErrorStatus(429, "RateLimitError", retry_after_s=_RETRY_AFTER_S),
    engine_errors.EngineError: _INTERNAL,
    engine_errors.InvalidRequestError: _BAD_REQUEST,
    engine_errors.PromptTooLongError: _BAD_REQUEST,
    engine_errors.AdapterError: _BAD_ADAPTER,
    engine_errors.InvalidAdapterError: _BAD_ADAPTER,
    engine_errors.UnsupportedAdapterError: _BAD_ADAPTER,
    # The replica registers an adapter before it admits a request for it, so this is a race lost
    # against an unload, and the next try gets the right answer.
    engine_errors.AdapterNotLoadedError: _UNAVAILABLE,
    engine_errors.CapacityError: _UNAVAILABLE,
    engine_errors.EngineDeadError: _UNAVAILABLE,
    engine_errors.QueueFullError: _OVERLOADED,
    # The caller's own limit has run out: no failure of the server, and nothing to try again.
    engine_errors.DeadlineExceededError: ErrorStatus(
        408, "TimeoutError", "timeout", reason="timeout"
    ),
    engine_errors.UnsupportedModelError: _INTERNAL,
}


def error_status(error: BaseException) -> ErrorStatus:
    """Look up an error by its type, else its nearest base, else as an internal error.

    An error may know better which field is at fault and when to try again.
    """
    status = next((ERROR_TABLE[cls] for cls in type(error).__mro__ if cls in ERROR_TABLE), None)
    if status is None:
        return _INTERNAL
    param = getattr(error, "param", None) or status.param
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        return replace(status, param=param)
    return replace(status, param=param, retry_after_s=max(1, math.ceil(retry_after_s)))
