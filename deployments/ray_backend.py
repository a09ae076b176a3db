"""The ``Backend`` of a Ray cluster: requests go to replicas, everything else to the controller."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from contextvars import Context
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.backend import (
    ALL_ADAPTERS,
    AdapterQuery,
    AdapterStatus,
    BaseModelInfo,
    ClusterMetrics,
    DeleteAlias,
    LoadAdapter,
    PinAdapter,
    PushAdapter,
    ReplicaStatus,
    RollBackAdapter,
    SetAlias,
    UnloadAdapter,
)
from deployments.controller_actor import Deployed, connect_controller
from deployments.errors import (
    ClusterError,
    OverloadedError,
    ReplicaUnavailableError,
    RuntimeUpdatingDisabledError,
)
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    TokenizeRequest,
    TokenizeResult,
)
from deployments.operations import OperationQuery, OperationStatus
from deployments.push_store import PushStore
from deployments.push_transfer import send_upload

# A request that no replica has admitted may go to another one. Waits before each further try: a
# replica that died is known to Serve within about a second.
_RETRY_DELAYS_S = (0.02, 0.2, 0.6, 1.5)
_HEALTH_TIMEOUT_S = 5.0


class RayBackend:
    """Talks to the replicas of one application through their handle."""

    def __init__(self, replicas: DeploymentHandle, deployed: Deployed) -> None:
        self._replicas = replicas
        self._controller = connect_controller(deployed)
        self._pushes = PushStore(deployed.config.cluster.push_path)
        self._allow_runtime_updating = deployed.config.adapters.allow_runtime_updating

    @property
    def allow_runtime_updating(self) -> bool:
        """Whether load and unload are allowed."""
        return self._allow_runtime_updating

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem]:
        """Stream one request; see ``Backend.generate``."""
        async with AsyncExitStack() as stack:
            start, items = await self._start(request, stack)
            yield start
            async for item in items:
                yield item

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        """Turn a prompt into token ids as ``generate`` would."""
        result: TokenizeResult = await self._ask("tokenize", request, adapter=request.adapter)
        return result

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text."""
        return str(await self._ask("detokenize", list(token_ids)))

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's own bytes."""
        result: list[bytes] = await self._ask("token_bytes", list(token_ids))
        return result

    async def base_model(self) -> BaseModelInfo:
        """Describe the base model."""
        result: BaseModelInfo = await self._ask("base_model")
        return result

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        """List registered adapters by name."""
        return await self._controller.list_adapters(query)

    async def get_adapter(self, name: str) -> AdapterStatus:
        """Describe one registered adapter."""
        return await self._controller.get_adapter(name)

    async def load_adapter(self, load: LoadAdapter) -> AdapterVersion:
        """Register or replace an adapter on every live replica."""
        self._check_may_update()
        return await self._controller.load(load, load.op_id or uuid.uuid4().hex)

    def receive_adapter(self) -> AbstractContextManager[Path]:
        """A directory to receive an adapter's files in."""
        return self._pushes.receive()

    async def push_adapter(self, push: PushAdapter) -> AdapterVersion:
        """Take over received files and register them on every live replica."""
        self._check_may_update()
        await send_upload(push.directory, self._controller)
        load = LoadAdapter(
            name=push.name,
            upload=push.directory.name,
            digest=await asyncio.to_thread(self._pushes.digest, push.directory),
            load_inplace=True,
            pin=push.pin,
            requested_by=push.requested_by,
            requested_from=push.requested_from,
        )
        return await self._controller.load(load, push.op_id or uuid.uuid4().hex)

    async def unload_adapter(self, unload: UnloadAdapter) -> AdapterVersion:
        """Forget an adapter on every live replica."""
        self._check_may_update()
        return await self._controller.unload(unload, unload.op_id or uuid.uuid4().hex)

    async def pin_adapter(self, pin: PinAdapter) -> AdapterVersion:
        """Pin or unpin an adapter on every live replica."""
        self._check_may_update()
        return await self._controller.pin(pin, pin.op_id or uuid.uuid4().hex)

    async def roll_back_adapter(self, rollback: RollBackAdapter) -> AdapterVersion:
        """Put an earlier version in service on every live replica."""
        self._check_may_update()
        return await self._controller.roll_back(rollback, rollback.op_id or uuid.uuid4().hex)

    async def list_aliases(self) -> list[AdapterAlias]:
        """List every alias by name."""
        return await self._controller.list_aliases()

    async def set_alias(self, asked: SetAlias) -> AdapterAlias:
        """Set or move an alias on every live replica."""
        self._check_may_update()
        return await self._controller.set_alias(asked, asked.op_id or uuid.uuid4().hex)

    async def delete_alias(self, asked: DeleteAlias) -> AdapterAlias:
        """Forget an alias on every live replica."""
        self._check_may_update()
        return await self._controller.delete_alias(asked, asked.op_id or uuid.uuid4().hex)

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        """List operations, latest first."""
        return await self._controller.list_operations(query)

    async def get_operation(self, op_id: str) -> OperationStatus:
        """Describe one operation."""
        return await self._controller.get_operation(op_id)

    async def list_replicas(self) -> list[ReplicaStatus]:
        """List the replicas that hold a lease."""
        return await self._controller.list_replicas()

    async def metrics(self) -> ClusterMetrics:
        """What controller and replicas count."""
        return await self._controller.metrics()

    async def healthy(self) -> bool:
        """Whether the controller answers and at least one replica can serve."""
        try:
            return bool(await asyncio.wait_for(self.list_replicas(), _HEALTH_TIMEOUT_S))
        except (ClusterError, RayError, TimeoutError):
            return False

    def _check_may_update(self) -> None:
        if not self._allow_runtime_updating:
            raise RuntimeUpdatingDisabledError

    async def _start(
        self, request: GenerateRequest, stack: AsyncExitStack
    ) -> tuple[GenerationItem, AsyncIterator[GenerationItem]]:
        """Have a replica admit the request; a replica that cannot is not the only one."""
        for delay_s in (*_RETRY_DELAYS_S, None):
            items = self._stream(request)
            try:
                start = await anext(items)
            except ReplicaUnavailableError:
                if delay_s is None:
                    raise
                await asyncio.sleep(delay_s)
            else:
                stack.push_async_callback(items.aclose)
                return start, items
        raise AssertionError("unreachable")

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationItem, None]:
        handle = self._replicas.options(stream=True, multiplexed_model_id=_name(request.adapter))
        response = _call(handle, "generate", request)
        is_over, failure = False, None
        try:
            async for item in response:
                if isinstance(item, Exception):
                    failure = item
                    break
                yield item
            is_over = True
        except asyncio.CancelledError:
            _raise_unless_cancelled()
            raise
        except Exception as error:
            is_over = True
            raise _translated(error) from error
        finally:
            if not is_over:
                response.cancel()
        if failure is not None:
            raise failure

    async def _ask(self, method: str, *args: object, adapter: str | None = None) -> Any:
        handle = self._replicas.options(multiplexed_model_id=_name(adapter))
        try:
            answer = await _call(handle, method, *args)
        except asyncio.CancelledError:
            _raise_unless_cancelled()
            raise
        except Exception as error:
            raise _translated(error) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _call(handle: DeploymentHandle, method: str, *args: object) -> Any:
    """Call a method of a replica, under an id of its own.

    Serve names a call after the HTTP request in whose context it is made, and its router keeps
    waiting calls by that name: of several calls of one request all but one would wait for ever.
    """
    return Context().run(getattr(handle, method).remote, *args)


def _name(adapter: str | None) -> str:
    return "" if adapter is None else adapter.partition("@")[0]


def _raise_unless_cancelled() -> None:
    """Tell a call that was cancelled elsewhere from a caller that is being cancelled.

    Serve raises CancelledError for both, and who takes the first for the second waits for ever.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise ReplicaUnavailableError("the replica gave the request up, try again") from None


def _translated(error: Exception) -> Exception:
    """What a failed call means, in our own errors."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, Exception) else error
    if isinstance(error, BackPressureError):
        return OverloadedError("all replicas are busy, try again")
    if isinstance(error, RayActorError | DeploymentUnavailableError):
        return ReplicaUnavailableError("the replica ended, try again")
    return error
