"""What a replica needs of its engine: the part of ``AsyncEngine`` that deployments use.

Written down so that replicas are tested with a small engine of the same shape.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from adapters import LoRARequest
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams


class AdapterInfoLike(Protocol):
    """What the engine found out about an adapter when it loaded it."""

    @property
    def rank(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class ResidencyLike(Protocol):
    """Where an adapter's weights are."""

    @property
    def digest(self) -> str: ...
    @property
    def host(self) -> bool: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def num_running(self) -> int: ...


class StatsLike(Protocol):
    """How busy the engine is."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


class AdapterEngine(Protocol):
    """The engine as a holder of adapters."""

    async def load_lora(self, request: LoRARequest) -> AdapterInfoLike: ...
    async def remove_lora(self, digest: str) -> None: ...
    async def pin_lora(self, digest: str) -> None: ...
    async def unpin_lora(self, digest: str) -> None: ...
    def loras(self) -> Sequence[ResidencyLike]: ...
    def stats(self) -> StatsLike: ...


class GeneratingEngine(AdapterEngine, Protocol):
    """The engine as a whole."""

    @property
    def is_alive(self) -> bool: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def abort(self, request_id: str) -> None: ...
    def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        lora: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[list[RequestOutput]]: ...
