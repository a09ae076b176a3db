"""Calls to the controller's actor, from whatever process.

Knows Ray's errors and what they mean; knows nothing of how the actor is made or found.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.backend import (
    ALL_ADAPTERS,
    AdapterQuery,
    AdapterStatus,
    ClusterMetrics,
    DeleteAlias,
    LoadAdapter,
    PinAdapter,
    ReplicaStatus,
    RollBackAdapter,
    SetAlias,
    UnloadAdapter,
)
from deployments.cluster_protocol import (
    MemberId,
    PrepareReport,
    Register,
    RegisterAnswer,
    Resolved,
    Watch,
    WatchAnswer,
)
from deployments.errors import ReplicaUnavailableError
from deployments.operations import OperationQuery, OperationStatus
from deployments.push_fetcher import PushedFile


class ControllerClient:
    """A connection to the controller that outlives it. Errors come as the controller raised them.

    Ray repeats calls that a restart interrupted; the controller recognises repeated operations.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[ActorHandle]], *, watch_timeout_s: float | None = None
    ) -> None:
        self._make_connection = connect
        self._watch_timeout_s = watch_timeout_s
        self._actor: ActorHandle | None = None

    async def register(self, request: Register) -> RegisterAnswer:
        answer: RegisterAnswer = await self._call("register", request)
        return answer

    async def watch(self, request: Watch) -> WatchAnswer:
        answer: WatchAnswer = await asyncio.wait_for(
            self._call("watch", request), self._watch_timeout_s
        )
        return answer

    async def report(self, member: MemberId, op_id: str, report: PrepareReport) -> None:
        await self._call("report", member, op_id, report)

    async def resolve(self, name: str, member: MemberId) -> Resolved:
        answer: Resolved = await self._call("resolve", name, member)
        return answer

    async def has_upload(self, upload: str) -> bool:
        return bool(await self._call("has_upload", upload))

    async def write_part(self, upload: str, name: str, offset: int, data: bytes) -> None:
        await self._call("write_part", upload, name, offset, data)

    async def share_push(self, digest: str) -> Sequence[PushedFile]:
        files: Sequence[PushedFile] = await self._call("share_push", digest)
        return files

    async def leave(self, member: MemberId) -> None:
        await self._call("leave", member)

    async def load(self, load: LoadAdapter, op_id: str) -> AdapterVersion:
        version: AdapterVersion = await self._call("load", load, op_id)
        return version

    async def unload(self, unload: UnloadAdapter, op_id: str) -> AdapterVersion:
        version: AdapterVersion = await self._call("unload", unload, op_id)
        return version

    async def pin(self, pin: PinAdapter, op_id: str) -> AdapterVersion:
        version: AdapterVersion = await self._call("pin", pin, op_id)
        return version

    async def roll_back(self, rollback: RollBackAdapter, op_id: str) -> AdapterVersion:
        version: AdapterVersion = await self._call("roll_back", rollback, op_id)
        return version

    async def set_alias(self, asked: SetAlias, op_id: str) -> AdapterAlias:
        alias: AdapterAlias = await self._call("set_alias", asked, op_id)
        return alias

    async def delete_alias(self, asked: DeleteAlias, op_id: str) -> AdapterAlias:
        alias: AdapterAlias = await self._call("delete_alias", asked, op_id)
        return alias

    async def list_aliases(self) -> list[AdapterAlias]:
        aliases: list[AdapterAlias] = await self._call("list_aliases")
        return aliases

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        adapters: list[AdapterStatus] = await self._call("list_adapters", query)
        return adapters

    async def get_adapter(self, name: str) -> AdapterStatus:
        status: AdapterStatus = await self._call("get_adapter", name)
        return status

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        operations: list[OperationStatus] = await self._call("list_operations", query)
        return operations

    async def get_operation(self, op_id: str) -> OperationStatus:
        status: OperationStatus = await self._call("get_operation", op_id)
        return status

    async def list_replicas(self) -> list[ReplicaStatus]:
        replicas: list[ReplicaStatus] = await self._call("list_replicas")
        return replicas

    async def metrics(self) -> ClusterMetrics:
        metrics: ClusterMetrics = await self._call("metrics")
        return metrics

    async def _call(self, method: str, *args: Any) -> Any:
        actor = await self._connect()
        try:
            # In a context of its own: Ray cancels with a call whatever was called in its context,
            # but what the controller does for one request, others may wait for as well.
            return await Context().run(getattr(actor, method).remote, *args)
        except RayTaskError as error:
            raise (error.cause or error) from error
        except ActorUnavailableError as error:
            raise ReplicaUnavailableError("the controller cannot be reached, try again") from error
        except RayActorError as error:
            self._actor = None  # It is gone for good: the next call connects anew.
            raise ReplicaUnavailableError("the controller has ended, try again") from error

    async def _connect(self) -> ActorHandle:
        if self._actor is None:
            self._actor = await self._make_connection()
        return self._actor
