"""A small engine of the real one's shape: it echoes the prompt and says which bytes it used."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from adapters import LoRARequest
from deployments.config import DeploymentConfig
from engine.errors import (
    AdapterNotLoadedError,
    CapacityError,
    QueueFullError,
    UnsupportedAdapterError,
)
from engine.outputs import FinishReason, RequestOutput, RequestTiming
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeAdapterInfo:
    rank: int = 8
    size_bytes: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeResidency:
    digest: str
    host: bool = True
    slot: int | None = None
    num_running: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStats:
    num_running: int
    num_waiting: int = 0
    num_blocks: int = 100
    num_free_blocks: int = 75
    max_loras: int = 8
    num_slots_in_use: int = 0
    total_steps: int = 0
    total_prompt_tokens: int = 0
    total_cached_prompt_tokens: int = 0
    total_output_tokens: int = 0
    total_preemptions: int = 0
    total_slot_loads: int = 0


class FakeTokenizer:
    """One token for each character."""

    chat_template = "yes"

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return list(map(chr, token_ids))


@dataclass(kw_only=True)
class FakeEngine:
    """``gate`` holds loads up while it is clear; ``refusals`` maps names to what loading raises.

    The adapter ``slow_name`` takes a second to load.
    """

    token_delay_s: float = 0.0
    max_running: int = 1000
    max_pinned: int = 1000
    slow_name: str = ""
    refusals: dict[str, Exception] = field(default_factory=dict)
    loaded: dict[str, LoRARequest] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    running: dict[str, LoRARequest | None] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    num_loads: int = 0
    max_model_len: int = 128
    vocab_size: int = 256
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def load_lora(self, request: LoRARequest) -> FakeAdapterInfo:
        self.num_loads += 1
        await self.gate.wait()
        if request.lora_name == self.slow_name:
            await asyncio.sleep(1)
        if request.lora_name in self.refusals:
            raise self.refusals[request.lora_name]
        assert request.digest is not None
        self.loaded[request.digest] = request
        return FakeAdapterInfo()

    async def remove_lora(self, digest: str) -> None:
        del self.loaded[digest]
        self.pinned.discard(digest)

    async def pin_lora(self, digest: str) -> None:
        if digest not in self.loaded:
            raise AdapterNotLoadedError(digest)
        if len(self.pinned) >= self.max_pinned:
            raise CapacityError(f"{len(self.pinned)} is pinned")
        self.pinned.add(digest)

    async def unpin_lora(self, digest: str) -> None:
        self.pinned.remove(digest)

    @property
    def is_alive(self) -> bool:
        return True

    def loras(self) -> list[FakeResidency]:
        return [FakeResidency(digest=digest) for digest in self.loaded]

    def stats(self) -> FakeStats:
        return FakeStats(num_running=len(self.running))

    def check_room(self, n: int) -> None:
        if len(self.running) >= self.max_running:
            raise QueueFullError("full")

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:  # Nobody remembers an id that is unknown.
            self.aborted.add(request_id)

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
        if len(self.running) >= self.max_running:
            raise QueueFullError("full")
        if lora is not None and lora.digest not in self.loaded:
            raise AdapterNotLoadedError(lora.lora_name)
        self.running[request_id] = lora
        label = "base" if lora is None or lora.digest is None else lora.digest[:8]
        count = params.max_tokens or 4
        try:
            for index in range(count):
                if request_id in self.aborted:
                    yield [_output(request_id, "", FinishReason.ABORT)]
                    return
                finish = FinishReason.LENGTH if index == count - 1 else None
                output = _output(request_id, f"{label} ", finish)
                yield [output if index else replace(output, timing=_timing())]
                await asyncio.sleep(self.token_delay_s)
        finally:
            del self.running[request_id]


async def make_fake_engine(config: DeploymentConfig, num_threads: int) -> FakeEngine:
    """For deployments: an engine that refuses one name and is slow to load another."""
    return FakeEngine(
        token_delay_s=0.01,
        refusals={"refused": UnsupportedAdapterError("uses DoRA")},
        slow_name="slow",
    )


def _timing() -> RequestTiming:
    now = time.monotonic()
    return RequestTiming(now, now, now)


def _output(request_id: str, text: str, finish: FinishReason | None) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        text=text,
        token_ids=(1,) if text else (),
        finish_reason=finish,
        request_finished=finish is not None,
    )
