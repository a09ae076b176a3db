"""The seam between HTTP and the cluster.

The ingress formats and authenticates; a ``Backend`` does the rest. The Ray implementation is
``ray_backend.py``; tests use one in their own process. Errors are those of ``errors.py`` and of
``engine.errors``, raised as themselves (never wrapped), before the first item of a stream wherever
the cause is known by then.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias, AliasTarget
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    TokenizeRequest,
    TokenizeResult,
)
from deployments.operations import OperationQuery, OperationStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelInfo:
    """The base model as users see it. ``id`` is its public name, ``root`` where it came from."""

    id: str
    root: str
    max_model_len: int
    vocab_size: int
    created: int


class AdapterState(StrEnum):
    """Where a name stands. All but PREPARING can be asked for."""

    PREPARING = "preparing"
    READY = "ready"
    REPLACING = "replacing"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaResidency:
    """What one replica holds of one adapter. Registered but not resident is normal."""

    replica_id: str
    generation: int
    host: bool
    slot: int | None
    num_running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """One adapter: its version, its state, and each live replica's residency.

    ``kept`` are earlier versions, latest first, that can still be asked for by generation.
    """

    version: AdapterVersion
    state: AdapterState
    replicas: tuple[ReplicaResidency, ...]
    kept: tuple[AdapterVersion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One replica as the controller sees it."""

    replica_id: str
    node: str
    table_version: int
    lease_left_s: float
    num_running: int
    num_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMetrics:
    """Snapshots of the controller's metrics and each replica's; see ``metrics.snapshot``."""

    controller: bytes = b""
    replicas: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAdapter:
    """Register an adapter under a name on every replica.

    ``source`` is an absolute path or a URI that a resolver understands; None lets the resolvers
    find the name. ``upload`` names received files instead, whose digest is ``digest``.
    ``load_inplace`` allows replacing what the name means now. ``requested_by`` and
    ``requested_from`` go to the journal for audits. Whoever repeats a call whose answer was lost
    gives it the same ``op_id``; empty means a new one.
    """

    name: str
    source: str | None = None
    upload: str = ""
    digest: str = ""
    load_inplace: bool = False
    pin: bool = False
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushAdapter:
    """Register files that were received in a directory of ``Backend.receive_adapter``.

    Whatever the name means now is replaced.
    """

    name: str
    directory: Path
    pin: bool = False
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadAdapter:
    """Forget a name on every replica. Requests in flight finish on what they started with.

    ``force`` aborts them instead. ``timeout_s`` bounds the wait for the replicas' agreement.
    """

    name: str
    force: bool = False
    timeout_s: float | None = None
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterQuery:
    """Which adapters to list, by name. ``after`` is the last name of the page before."""

    prefix: str = ""
    state: AdapterState | None = None
    pinned: bool | None = None
    after: str = ""
    limit: int | None = None

    def selects(self, status: "AdapterStatus") -> bool:
        """Whether an adapter is among those asked for, on whatever page."""
        version = status.version
        return (
            version.name.startswith(self.prefix)
            and version.name > self.after
            and self.state in (None, status.state)
            and self.pinned in (None, version.pinned)
        )


ALL_ADAPTERS = AdapterQuery()


@dataclass(frozen=True, slots=True, kw_only=True)
class PinAdapter:
    """Keep an adapter's weights in memory on every replica, or let them go."""

    name: str
    pinned: bool
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBackAdapter:
    """Put an earlier version's bytes in service again, as a new generation.

    ``generation`` None means the last one whose bytes differ from those in service.
    """

    name: str
    generation: int | None = None
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAlias:
    """Have a name stand for one adapter, or for several in shares of the requests."""

    name: str
    targets: tuple[AliasTarget, ...]
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAlias:
    """Forget an alias. The adapters that it stood for stay."""

    name: str
    requested_by: str = ""
    requested_from: str = ""
    op_id: str = ""


class Backend(Protocol):
    """Everything that the ingress may ask of the cluster."""

    @property
    def allow_runtime_updating(self) -> bool:
        """Whether load and unload are allowed; if not they raise RuntimeUpdatingDisabledError."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem]:
        """Stream one request: a GenerationStart, then lists of outputs until it finished.

        The first outputs come at once, later ones are gathered by time. The stream ends after the
        output whose ``request_finished`` is true. Closing the iterator aborts the request.
        """

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        """Turn a prompt into token ids as ``generate`` would."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, special tokens included."""

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's own bytes, for logprobs: a token may be part of a character."""

    async def base_model(self) -> BaseModelInfo:
        """Describe the base model."""

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        """List registered adapters by name."""

    async def get_adapter(self, name: str) -> AdapterStatus:
        """Describe one registered adapter, or raise AdapterNotFoundError."""

    async def load_adapter(self, load: LoadAdapter) -> AdapterVersion:
        """Register or replace an adapter on every live replica; returns once all of them agree."""

    def receive_adapter(self) -> AbstractContextManager[Path]:
        """A directory to receive an adapter's files in; emptied at the end."""

    async def push_adapter(self, push: PushAdapter) -> AdapterVersion:
        """Take over received files and register them on every live replica."""

    async def unload_adapter(self, unload: UnloadAdapter) -> AdapterVersion:
        """Forget an adapter on every live replica; returns the version that was in service."""

    async def pin_adapter(self, pin: PinAdapter) -> AdapterVersion:
        """Pin or unpin an adapter on every live replica."""

    async def roll_back_adapter(self, rollback: RollBackAdapter) -> AdapterVersion:
        """Put an earlier version in service; returns the new one once all replicas agree."""

    async def list_aliases(self) -> list[AdapterAlias]:
        """List every alias by name."""

    async def set_alias(self, asked: SetAlias) -> AdapterAlias:
        """Set or move an alias on every live replica; returns once all of them agree."""

    async def delete_alias(self, asked: DeleteAlias) -> AdapterAlias:
        """Forget an alias on every live replica; returns what it stood for."""

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        """List operations, those under way among them, latest first."""

    async def get_operation(self, op_id: str) -> OperationStatus:
        """Describe one operation, or raise OperationNotFoundError."""

    async def list_replicas(self) -> list[ReplicaStatus]:
        """List the replicas that hold a lease."""

    async def metrics(self) -> ClusterMetrics:
        """What controller and replicas count, at most some seconds old."""

    async def healthy(self) -> bool:
        """Whether the controller answers and at least one replica can serve."""
