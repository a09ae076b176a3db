"""A backend with one real engine in this process and no adapters."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

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
from deployments.errors import (
    AdapterNotFoundError,
    OperationNotFoundError,
    RuntimeUpdatingDisabledError,
)
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    TokenizeRequest,
    TokenizeResult,
)
from deployments.llm_server import LLMServer
from deployments.operations import OperationQuery, OperationStatus


class LocalBackend:
    """Serves the base model with one ``LLMServer``."""

    allow_runtime_updating = False

    def __init__(self, server: LLMServer) -> None:
        self._server = server

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem]:
        if request.adapter is not None:
            raise AdapterNotFoundError(request.adapter)
        return self._server.generate(request)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        return await self._server.tokenize(request)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._server.detokenize(token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        return await self._server.token_bytes(token_ids)

    async def base_model(self) -> BaseModelInfo:
        return self._server.base_model

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        return []

    async def get_adapter(self, name: str) -> AdapterStatus:
        raise AdapterNotFoundError(name)

    async def load_adapter(self, load: LoadAdapter) -> AdapterVersion:
        raise RuntimeUpdatingDisabledError

    def receive_adapter(self) -> AbstractContextManager[Path]:
        raise RuntimeUpdatingDisabledError

    async def push_adapter(self, push: PushAdapter) -> AdapterVersion:
        raise RuntimeUpdatingDisabledError

    async def unload_adapter(self, unload: UnloadAdapter) -> AdapterVersion:
        raise RuntimeUpdatingDisabledError

    async def pin_adapter(self, pin: PinAdapter) -> AdapterVersion:
        raise RuntimeUpdatingDisabledError

    async def roll_back_adapter(self, rollback: RollBackAdapter) -> AdapterVersion:
        raise RuntimeUpdatingDisabledError

    async def list_aliases(self) -> list[AdapterAlias]:
        return []

    async def set_alias(self, asked: SetAlias) -> AdapterAlias:
        raise RuntimeUpdatingDisabledError

    async def delete_alias(self, asked: DeleteAlias) -> AdapterAlias:
        raise RuntimeUpdatingDisabledError

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        return []

    async def get_operation(self, op_id: str) -> OperationStatus:
        raise OperationNotFoundError(op_id)

    async def list_replicas(self) -> list[ReplicaStatus]:
        return []

    async def metrics(self) -> ClusterMetrics:
        return ClusterMetrics()

    async def healthy(self) -> bool:
        return True
