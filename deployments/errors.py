"""Everything the cluster side raises on purpose.

    ClusterError
    ├── AdapterNotFoundError            no adapter of that name, and no resolver knows one
    │   ├── GenerationNotFoundError     the name is known, the asked generation is not kept
    │   └── AliasNotFoundError          no alias of that name
    ├── AdapterAlreadyLoadedError       the name is taken and the caller did not ask to replace
    ├── AdapterRejectedError            a replica refused it; carries each replica's reason
    ├── AdapterCapacityError            no replica refused its bytes, but one has no room for it
    ├── AdapterSourceError              the path or URI holds no adapter
    │   └── InvalidAdapterSourceError   it holds something that cannot be one
    ├── AdapterInUseError               an alias stands for it
    ├── NameConflictError               the name belongs to the base model, an alias or a route
    ├── PathNotAllowedError             outside the directories that the operator allows
    ├── RuntimeUpdatingDisabledError    the operator switched loading at run time off
    ├── ResolverUnavailableError        a source failed: not the same as "not found"
    │   └── ResolverForbiddenError      a source refuses us: somebody must change the configuration
    ├── NoEarlierVersionError           nothing to roll back to
    ├── OperationNotFoundError          no operation of that id is remembered
    ├── OperationConflictError          the id belongs to another operation
    ├── JournalUnavailableError         the journal cannot be written, so nothing was changed
    │   └── JournalLostError            another controller has the journal now; this one stopped
    ├── OperationTimeoutError           an operation did not end in time; its outcome is in doubt
    ├── ReplicaUnavailableError         no replica can serve this now; try again
    ├── OverloadedError                 queues are full; try again
    └── LimitExceededError              a key or an adapter has had its share for now

Errors cross process borders, so each survives pickling with its message and its facts. How they
look over HTTP is decided by ``error_table.py`` alone.
"""

from collections.abc import Mapping
from types import MappingProxyType


class ClusterError(Exception):
    """Base of everything the cluster side raises on purpose.

    ``param`` names the request field at fault, None when the table's default applies. ``reasons``
    is what each replica said, where replicas had a say.
    """

    param: str | None = None
    reasons: Mapping[str, str] = MappingProxyType({})

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def __reduce__(self) -> tuple[object, ...]:
        # Exception's own pickling would call __init__ with the finished message.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(
    cls: type[ClusterError], args: tuple[object, ...], facts: Mapping[str, object]
) -> ClusterError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


class AdapterNotFoundError(ClusterError):
    """No adapter of that name is registered and no resolver knows one."""

    def __init__(self, name: str, *, param: str | None = None) -> None:
        super().__init__(f"The model `{name}` does not exist.")
        self.name = name
        self.param = param


class GenerationNotFoundError(AdapterNotFoundError):
    """The adapter exists, but the generation asked for is neither in service nor kept."""

    def __init__(self, name: str, generation: int, current: int) -> None:
        super().__init__(f"{name}@{generation}")
        self.args = (
            f"The model `{name}@{generation}` does not exist: generation {current} is in service.",
        )
        self.generation = generation
        self.current = current


class AliasNotFoundError(AdapterNotFoundError):
    """No alias of that name is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.args = (f"The alias `{name}` does not exist.",)


class AdapterInUseError(ClusterError):
    """An alias stands for the adapter."""

    def __init__(self, name: str, alias: str) -> None:
        super().__init__(f"the alias {alias!r} stands for {name!r}; move or delete the alias first")
        self.name = name
        self.alias = alias


class AdapterAlreadyLoadedError(ClusterError):
    """The name is in use and the caller did not ask to replace what it means."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            f"in place, set 'load_inplace' to True."
        )
        self.name = name


class AdapterRejectedError(ClusterError):
    """At least one replica refused the adapter, so nothing was changed anywhere.

    ``reasons`` maps replica ids to what each said.
    """

    def __init__(self, name: str, reasons: Mapping[str, str]) -> None:
        super().__init__(f"adapter {name!r} was rejected: {_list_reasons(reasons)}")
        self.name = name
        self.reasons = dict(reasons)


class AdapterCapacityError(ClusterError):
    """At least one replica has no room, because of what is pinned or in use there."""

    def __init__(self, name: str, reasons: Mapping[str, str]) -> None:
        super().__init__(
            f"there is no room for adapter {name!r}: {_list_reasons(reasons)}. Unpin or unload "
            f"another adapter, or raise max_loras or max_cpu_loras."
        )
        self.name = name
        self.reasons = dict(reasons)


def _list_reasons(reasons: Mapping[str, str]) -> str:
    """Each reason once, with the replicas that gave it."""
    by_reason: dict[str, list[str]] = {}
    for replica_id, reason in sorted(reasons.items()):
        by_reason.setdefault(reason, []).append(replica_id)
    return "; ".join(f"{reason} ({', '.join(ids)})" for reason, ids in sorted(by_reason.items()))


class AdapterSourceError(ClusterError):
    """The given path or URI holds no adapter."""

    def __init__(self, name: str, source: str, detail: str) -> None:
        super().__init__(f"no adapter {name!r} at {source!r}: {detail}")
        self.name = name
        self.source = source


class InvalidAdapterSourceError(AdapterSourceError):
    """What the source has under this name cannot be an adapter."""

    def __init__(self, name: str, source: str, detail: str) -> None:
        super().__init__(name, source, detail)
        self.args = (f"adapter {name!r} cannot be used: {detail}",)


class NameConflictError(ClusterError):
    """The name belongs to the base model, an alias or a route."""

    def __init__(
        self, name: str, why: str = "is the base model's name and cannot name an adapter."
    ) -> None:
        super().__init__(f"{name!r} {why}")
        self.name = name


class PathNotAllowedError(ClusterError):
    """The path lies outside the directories that the operator allows."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path!r} is not under a directory that adapters may be loaded from.")
        self.path = path


class RuntimeUpdatingDisabledError(ClusterError):
    """The operator switched loading and unloading at run time off."""

    def __init__(self) -> None:
        super().__init__(
            "Loading and unloading adapters at run time is disabled. Set "
            "LORAFLEET_ALLOW_RUNTIME_LORA_UPDATING=1 to enable it."
        )


class ResolverUnavailableError(ClusterError):
    """An adapter source failed, so it is unknown whether the adapter exists."""

    def __init__(self, name: str, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(f"cannot look up adapter {name!r}: {detail}")
        self.name = name
        self.retry_after_s = retry_after_s


class ResolverForbiddenError(ResolverUnavailableError):
    """An adapter source refuses to answer us: credentials, permissions, a wrong bucket."""


class JournalUnavailableError(ClusterError):
    """The journal cannot be written (disk full, say), so nothing was changed."""


class JournalLostError(JournalUnavailableError):
    """Another controller took the journal over. The one that says so has stopped for good."""


class OperationTimeoutError(ClusterError):
    """An operation did not finish in time. Asking again is safe: operations are idempotent."""

    def __init__(self, name: str, waited_s: float, waiting_for: str, *, op_id: str = "") -> None:
        told = f"; it can be asked about as operation {op_id}" if op_id else ""
        super().__init__(
            f"the operation on {name!r} did not finish in {waited_s:g} s ({waiting_for}){told}"
        )
        self.name = name
        self.op_id = op_id


class NoEarlierVersionError(ClusterError):
    """No earlier version of the name is kept that differs from the one in service."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no earlier version of {name!r} is kept that could be rolled back to")
        self.name = name


class OperationNotFoundError(ClusterError):
    """No operation of that id is remembered: if it ever ran, it was long ago or changed nothing."""

    def __init__(self, op_id: str) -> None:
        super().__init__(f"no operation {op_id!r} is known")
        self.op_id = op_id


class OperationConflictError(ClusterError):
    """The operation id was given to another operation before."""

    def __init__(self, op_id: str, description: str) -> None:
        super().__init__(f"the operation id {op_id!r} belongs to {description}; choose another")
        self.op_id = op_id


class ReplicaUnavailableError(ClusterError):
    """No replica can serve this at the moment; the request was not started."""


class OverloadedError(ClusterError):
    """Every queue is full; the request was not started."""


class LimitExceededError(ClusterError):
    """A key or an adapter has had its share for now; the request was not started.

    ``limit`` is the limit's name. ``headers`` tell the caller where all its limits stand.
    """

    def __init__(self, whose: str, limit: str, amount: int, retry_after_s: float) -> None:
        super().__init__(
            f"Rate limit reached for {whose}: {limit} {amount}. Try again in {retry_after_s:.3g} s."
        )
        self.whose = whose
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.headers: dict[str, str] = {}
