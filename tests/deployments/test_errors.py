"""Errors keep their facts between processes and have one look over HTTP."""

import pickle

import pytest

from adapters import InvalidAdapterNameError
from deployments import errors
from deployments.cluster_protocol import LeaseLostError
from deployments.error_table import ERROR_TABLE, error_status
from engine import errors as engine_errors

EXAMPLES = [
    errors.AdapterNotFoundError("sql", param="lora_name"),
    errors.GenerationNotFoundError("sql", 3, 7),
    errors.AdapterAlreadyLoadedError("sql"),
    errors.AdapterRejectedError("sql", {"r1": "rank 9", "r2": "rank 9", "r3": "DoRA"}),
    errors.AdapterSourceError("sql", "/a", "missing"),
    errors.NameConflictError("base"),
    errors.PathNotAllowedError("/etc"),
    errors.RuntimeUpdatingDisabledError(),
    errors.ResolverUnavailableError("sql", "bucket is down"),
    errors.JournalUnavailableError("disk full"),
    errors.OperationTimeoutError("sql", 3.0, "r1"),
    errors.ReplicaUnavailableError("gone"),
    errors.OverloadedError("full"),
    LeaseLostError("r1"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: errors.ClusterError) -> None:
    error.param = "model"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error) == error.message
    assert vars(copy) == vars(error)


def subclasses(cls: type[Exception]) -> set[type[Exception]]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_error_has_a_status() -> None:
    for cls in subclasses(errors.ClusterError) | subclasses(engine_errors.EngineError):
        assert any(base in ERROR_TABLE for base in cls.__mro__), cls


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (errors.AdapterNotFoundError("sql"), 404, "model"),
        (errors.AdapterNotFoundError("sql", param="lora_name"), 404, "lora_name"),
        (errors.GenerationNotFoundError("sql", 1, 2), 404, "model"),
        (errors.AdapterAlreadyLoadedError("sql"), 400, "lora_name"),
        (errors.PathNotAllowedError("/etc"), 403, "lora_path"),
        (errors.ReplicaUnavailableError("gone"), 503, None),
        (errors.OverloadedError("full"), 429, None),
        (engine_errors.PromptTooLongError(9, 8), 400, "input_tokens"),
        (engine_errors.QueueFullError("full"), 429, None),
        (engine_errors.EngineDeadError("dead"), 503, None),
        (InvalidAdapterNameError("../a"), 400, "lora_name"),
        (RuntimeError("secret"), 500, None),
    ],
)
def test_status_and_param(error: Exception, status: int, param: str | None) -> None:
    found = error_status(error)
    assert (found.status, found.param) == (status, param)
    assert (found.retry_after_s is not None) == (status in (429, 503))


def test_rejection_names_each_reason_once_with_its_replicas() -> None:
    error = errors.AdapterRejectedError("sql", {"r1": "rank 9", "r2": "rank 9", "r3": "DoRA"})
    assert str(error) == "adapter 'sql' was rejected: DoRA (r3); rank 9 (r1, r2)"
