"""Runs one scheduled step on the model: one token for each sampling request out.

Knows which tokens' logits a request needs. Knows nothing of queues, text, adapters' files or of
how the step is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.executor import ModelExecutor
from engine.outputs import PositionLogprobs, ScheduledRequest
from engine.pooling import Pooler, pooled_range
from engine.request import Request
from engine.sampler import Sampled, SamplingState, position_logprobs, sample
from engine.step_batch import build_step

RequestKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed.

    ``prompt_logprobs`` maps a request to (position, log probabilities) of prompt tokens whose
    predecessor was computed in this step. ``embeddings`` has the prompts that are pooled whole.
    """

    sampled: Mapping[RequestKey, Sampled]
    prompt_logprobs: Mapping[RequestKey, list[tuple[int, PositionLogprobs]]]
    embeddings: Mapping[RequestKey, tuple[float, ...]] = field(default_factory=dict)


class ModelRunner:
    """Builds a step's batch, runs it and samples. Used by one thread."""

    def __init__(self, executor: ModelExecutor, block_size: int) -> None:
        self._executor = executor
        self._block_size = block_size
        self._pooler = Pooler()

    def run(
        self, scheduled: Sequence[ScheduledRequest], states: Mapping[RequestKey, SamplingState]
    ) -> StepResult:
        """Compute all scheduled tokens and sample where a request's last token was reached."""
        rows = [_logits_range(item) for item in scheduled]
        pooled = [pooled_range(item) for item in scheduled]
        logits = self._executor.execute(build_step(scheduled, rows, self._block_size, pooled))
        embeddings = self._pooler.add(scheduled, self._executor.hidden()) if any(pooled) else {}
        prompt_logprobs = {}
        last_rows = []
        samplers = []
        row = 0
        for item, span in zip(scheduled, rows, strict=True):
            if item.request.params.prompt_logprobs is not None:
                found = _prompt_logprobs(item, logits[row : row + len(span)])
                prompt_logprobs[item.request.key] = found
            row += len(span)
            if item.samples:
                last_rows.append(row - 1)
                samplers.append(item.request.key)
        if not samplers:
            return StepResult({}, prompt_logprobs, embeddings)
        if len(last_rows) != logits.shape[0]:
            logits = logits[torch.tensor(last_rows, device=logits.device)]
        chosen = sample(logits, [states[key] for key in samplers])
        sampled = dict(zip(samplers, chosen, strict=True))
        return StepResult(sampled, prompt_logprobs, embeddings)

    def forget(self, key: RequestKey) -> None:
        """A sequence has ended, perhaps before its time."""
        self._pooler.forget(key)


def _logits_range(item: ScheduledRequest) -> range:
    """Which of the item's tokens need logits, counted from its first token in the step."""
    params = item.request.params
    if params.prompt_logprobs is not None:
        is_prefill = item.num_computed_tokens < item.request.num_prompt_tokens
        if is_prefill:
            return range(item.num_tokens)
    return range(item.num_tokens - 1, item.num_tokens) if item.samples else range(0)


def _prompt_logprobs(
    item: ScheduledRequest, logits: torch.Tensor
) -> list[tuple[int, PositionLogprobs]]:
    """Log probability of each prompt token given what comes before it; logits [span, vocab]."""
    request: Request = item.request
    num_top = request.params.prompt_logprobs
    assert num_top is not None
    if item.num_computed_tokens >= request.num_prompt_tokens:
        return []
    # Row r is what comes after the tokens up to the item's r-th.
    first = item.num_computed_tokens + 1
    last = min(first + logits.shape[0], request.num_prompt_tokens)
    token_ids = request.prompt_token_ids[first:last]
    found = position_logprobs(logits[: len(token_ids)], token_ids, [num_top] * len(token_ids))
    return list(zip(range(first, last), found, strict=True))
