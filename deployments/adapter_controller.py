"""A handle on a running cluster's adapters, for programs that script it through Ray.

    from deployments import AdapterController

    adapters = AdapterController("smollm2-135m-instruct")
    version = await adapters.load("sql", "/models/sql-v7", replace=True)
    await adapters.set_alias("prod", {"sql@7": 95, "sql": 5})

Every method returns once all replicas agree, as the HTTP routes do, and raises the errors of
``deployments.errors``. Ray must be initialised in the calling process. A call whose answer was
lost may be repeated with the same ``op_id``. The permission to change adapters is the
deployment's; keys are HTTP's matter, since whoever can reach the Ray cluster can do anything.
"""

import asyncio
import getpass
import uuid
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias, AliasTarget
from deployments.backend import (
    AdapterQuery,
    AdapterState,
    AdapterStatus,
    DeleteAlias,
    LoadAdapter,
    PinAdapter,
    ReplicaStatus,
    RollBackAdapter,
    SetAlias,
    UnloadAdapter,
)
from deployments.controller_actor import NAMESPACE, controller_name
from deployments.controller_client import ControllerClient
from deployments.errors import ReplicaUnavailableError
from deployments.operations import OperationQuery, OperationStatus


class AdapterController:
    """Changes and describes the adapters of the cluster that serves ``model_id``.

    ``requested_by`` goes to the journal with every operation.
    """

    def __init__(self, model_id: str, *, requested_by: str | None = None) -> None:
        self._model_id = model_id
        self._requested_by = requested_by or f"ray:{getpass.getuser()}"
        self._client = ControllerClient(self._find)

    # -- changes

    async def load(
        self,
        name: str,
        source: str | None = None,
        *,
        replace: bool = False,
        pin: bool = False,
        op_id: str | None = None,
    ) -> AdapterVersion:
        """Put an adapter in service; without a source the resolvers are asked for the name."""
        load = LoadAdapter(
            name=name,
            source=source,
            load_inplace=replace,
            pin=pin,
            requested_by=self._requested_by,
        )
        return await self._client.load(load, _id(op_id))

    async def unload(
        self,
        name: str,
        *,
        force: bool = False,
        timeout_s: float | None = None,
        op_id: str | None = None,
    ) -> AdapterVersion:
        """Take an adapter out of service; returns the version that was in it."""
        unload = UnloadAdapter(
            name=name, force=force, timeout_s=timeout_s, requested_by=self._requested_by
        )
        return await self._client.unload(unload, _id(op_id))

    async def roll_back(
        self, name: str, generation: int | None = None, *, op_id: str | None = None
    ) -> AdapterVersion:
        """Put an earlier version's bytes in service, by default the last other ones."""
        rollback = RollBackAdapter(
            name=name, generation=generation, requested_by=self._requested_by
        )
        return await self._client.roll_back(rollback, _id(op_id))

    async def pin(
        self, name: str, *, pinned: bool = True, op_id: str | None = None
    ) -> AdapterVersion:
        """Keep an adapter's weights in memory on every replica, or let them go."""
        pin = PinAdapter(name=name, pinned=pinned, requested_by=self._requested_by)
        return await self._client.pin(pin, _id(op_id))

    async def set_alias(
        self, name: str, targets: str | Mapping[str, float], *, op_id: str | None = None
    ) -> AdapterAlias:
        """Have a name stand for an adapter, or for several by weight."""
        weights = {targets: 1.0} if isinstance(targets, str) else targets
        pairs = tuple(AliasTarget(adapter, weight) for adapter, weight in weights.items())
        asked = SetAlias(name=name, targets=pairs, requested_by=self._requested_by)
        return await self._client.set_alias(asked, _id(op_id))

    async def delete_alias(self, name: str, *, op_id: str | None = None) -> AdapterAlias:
        """Forget an alias; the adapters that it stood for stay."""
        asked = DeleteAlias(name=name, requested_by=self._requested_by)
        return await self._client.delete_alias(asked, _id(op_id))

    # -- views

    async def get_adapter(self, name: str) -> AdapterStatus:
        """One adapter, with its residency on each replica."""
        return await self._client.get_adapter(name)

    async def list_adapters(
        self,
        prefix: str = "",
        *,
        state: AdapterState | None = None,
        pinned: bool | None = None,
        after: str = "",
        limit: int | None = None,
    ) -> list[AdapterStatus]:
        """Adapters by name; ``after`` is the last name of the page before."""
        query = AdapterQuery(prefix=prefix, state=state, pinned=pinned, after=after, limit=limit)
        return await self._client.list_adapters(query)

    async def list_aliases(self) -> list[AdapterAlias]:
        """Every alias by name."""
        return await self._client.list_aliases()

    async def list_operations(self, name: str = "", *, limit: int = 50) -> list[OperationStatus]:
        """Operations, those under way among them, latest first."""
        return await self._client.list_operations(OperationQuery(name=name, limit=limit))

    async def get_operation(self, op_id: str) -> OperationStatus:
        """One operation: its phase, each replica's part, and why it was refused."""
        return await self._client.get_operation(op_id)

    async def list_replicas(self) -> list[ReplicaStatus]:
        """The replicas that hold a lease."""
        return await self._client.list_replicas()

    async def _find(self) -> ActorHandle:
        name = controller_name(self._model_id)
        try:
            return await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        except ValueError as error:
            raise ReplicaUnavailableError(
                f"no deployment of {self._model_id!r} runs on this Ray cluster"
            ) from error


def _id(op_id: str | None) -> str:
    return op_id or uuid.uuid4().hex
