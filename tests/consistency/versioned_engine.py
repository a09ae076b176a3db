"""A small engine whose every token is the content of the adapter that it serves.

It reads the content from the adapter's file when it loads it, and looks it up again for each token:
wrong bytes, bytes that changed under a request and bytes that went too early all show in the text.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adapters import LoRARequest
from deployments.config import DeploymentConfig
from engine.errors import AdapterNotLoadedError
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams
from tests.deployments.fake_engine import FakeAdapterInfo, FakeEngine

_GONE = "gone"


@dataclass(kw_only=True)
class VersionedEngine(FakeEngine):
    """``load_delay_s`` is how long an adapter takes to load."""

    load_delay_s: float = 0.0
    contents: dict[str, str] = field(default_factory=dict)

    async def load_lora(self, request: LoRARequest) -> FakeAdapterInfo:
        await asyncio.sleep(self.load_delay_s)
        info = await super().load_lora(request)
        assert request.digest is not None
        weights = Path(request.lora_path) / "adapter_model.safetensors"
        self.contents[request.digest] = await asyncio.to_thread(weights.read_text)
        return info

    async def remove_lora(self, digest: str) -> None:
        await super().remove_lora(digest)
        del self.contents[digest]

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        lora: LoRARequest | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[list[RequestOutput]]:
        if lora is not None and lora.digest not in self.loaded:
            raise AdapterNotLoadedError(lora.lora_name)
        self.running[request_id] = lora
        count = params.max_tokens or 4
        try:
            for index in range(count):
                content = "base" if lora is None else self.contents.get(lora.digest or "", _GONE)
                is_last = index == count - 1 or request_id in self.aborted
                yield [_output(request_id, f"{content} ", is_last=is_last)]
                if is_last:
                    return
                await asyncio.sleep(self.token_delay_s * random.random())
        finally:
            del self.running[request_id]


async def make_versioned_engine(config: DeploymentConfig, num_threads: int) -> VersionedEngine:
    """For deployments: tokens take up to 20 ms, loads 20 ms."""
    return VersionedEngine(token_delay_s=0.02, load_delay_s=0.02)


def _output(request_id: str, text: str, *, is_last: bool) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        text=text,
        token_ids=(1,),
        finish_reason=FinishReason.LENGTH if is_last else None,
        request_finished=is_last,
    )
