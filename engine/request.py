"""One sequence being generated: its tokens and how far they have been computed.

A request for n sequences becomes n of these. Knows tokens; knows nothing of blocks, slots or
tensors. Owned by the engine's thread.
"""

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from adapters import LoRARequest
from engine.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request stands. PREEMPTED waits like WAITING, but was running before."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a request is to be served: for whom, how urgently, and until when (monotonic time)."""

    tenant: str = ""
    priority: int = 0
    deadline_s: float = math.inf


DEFAULT_TERMS = Terms()


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """The state of one sequence.

    ``num_computed_tokens`` tokens (prompt first, then output) have KV. Preemption sets it back.
    The adapter is applied from token ``adapter_start`` on; what comes before is the base model's.
    ``num_cached_tokens`` is how many prompt tokens the prefix cache served at first admission, at
    ``scheduled_s``. Waiting requests of different tenants take turns. Beyond ``deadline_s``, by the
    scheduler's clock, nobody wants the rest.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0
    lora: LoRARequest | None = None
    tenant: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    scheduled_s: float | None = None
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    adapter_start: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Identity inside the engine: the sequences of one request differ by index."""
        return (self.request_id, self.index)

    @property
    def digest(self) -> str | None:
        """The adapter's identity, None for the base model."""
        return None if self.lora is None else self.lora.digest

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt followed by output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]
