"""Runs one scheduled step on the model: tensors in, one token for each sampling request out.

Knows block tables, slots and logits rows. Knows nothing of queues, text or adapters' files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.lora.batch import build_lora_batch
from engine.models.paged_model import PagedModel
from engine.outputs import PositionLogprobs, ScheduledRequest
from engine.request import Request
from engine.sampler import Sampled, SamplingState, position_logprobs, sample
from kernels.metadata import AttentionBatch, LoRABatch

RequestKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed.

    ``prompt_logprobs`` maps a request to (position, log probabilities) of prompt tokens whose
    predecessor was computed in this step.
    """

    sampled: Mapping[RequestKey, Sampled]
    prompt_logprobs: Mapping[RequestKey, list[tuple[int, PositionLogprobs]]]


class ModelRunner:
    """Builds a step's batch, runs it and samples. Used by one thread."""

    def __init__(self, model: PagedModel, block_size: int, *, has_lora: bool) -> None:
        self._model = model
        self._block_size = block_size
        self._has_lora = has_lora
        self._device = model.spec.device

    def run(
        self, scheduled: Sequence[ScheduledRequest], states: Mapping[RequestKey, SamplingState]
    ) -> StepResult:
        """Compute all scheduled tokens and sample where a request's last token was reached."""
        rows = [_logits_range(item) for item in scheduled]
        logits = self._model.forward(
            *self._tokens(scheduled),
            attention=self._attention(scheduled),
            lora=self._lora((item, range(item.num_tokens)) for item in scheduled),
            logits_rows=self._logits_rows(scheduled, rows),
            logits_lora=self._lora(zip(scheduled, rows, strict=True)),
        )
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
            return StepResult({}, prompt_logprobs)
        if len(last_rows) != logits.shape[0]:
            logits = logits[torch.tensor(last_rows, device=self._device)]
        chosen = sample(logits, [states[key] for key in samplers])
        return StepResult(dict(zip(samplers, chosen, strict=True)), prompt_logprobs)

    def _tokens(self, scheduled: Sequence[ScheduledRequest]) -> tuple[torch.Tensor, torch.Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        for item in scheduled:
            stop = item.num_computed_tokens + item.num_tokens
            ids += item.request.token_slice(item.num_computed_tokens, stop)
            positions += range(item.num_computed_tokens, stop)
        tensors = torch.tensor([ids, positions], dtype=torch.int64).to(self._device)
        return tensors[0], tensors[1]

    def _attention(self, scheduled: Sequence[ScheduledRequest]) -> AttentionBatch:
        lengths = np.array([item.num_tokens for item in scheduled], dtype=np.int32)
        contexts = lengths + np.array([item.num_computed_tokens for item in scheduled], np.int32)
        starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        widths = -(-contexts // self._block_size)
        tables = np.zeros((len(scheduled), int(widths.max())), dtype=np.int32)
        for row, (item, width) in enumerate(zip(scheduled, widths.tolist(), strict=True)):
            tables[row, :width] = item.block_ids[:width]
        return AttentionBatch(
            query_starts=self._to_device(starts),
            context_lens=self._to_device(contexts),
            block_tables=self._to_device(tables),
            slot_mapping=self._to_device(self._slot_mapping(tables, lengths, contexts)),
            num_decodes=int((lengths == 1).sum()),
            max_query_len=int(lengths.max()),
            max_context_len=int(contexts.max()),
        )

    def _slot_mapping(
        self, tables: np.ndarray, lengths: np.ndarray, contexts: np.ndarray
    ) -> np.ndarray:
        """Flat KV position of each new token: its block's start plus its place in the block."""
        request = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        positions = np.arange(int(ends[-1])) - np.repeat(ends - contexts, lengths)
        blocks = tables[request, positions // self._block_size].astype(np.int64)
        return np.asarray(blocks * self._block_size + positions % self._block_size)

    def _logits_rows(
        self, scheduled: Sequence[ScheduledRequest], rows: Sequence[range]
    ) -> torch.Tensor:
        wanted: list[int] = []
        start = 0
        for item, span in zip(scheduled, rows, strict=True):
            wanted += range(start + span.start, start + span.stop)
            start += item.num_tokens
        return torch.tensor(wanted, dtype=torch.int64).to(self._device)

    def _lora(self, spans: Iterable[tuple[ScheduledRequest, range]]) -> LoRABatch | None:
        if not self._has_lora:
            return None
        runs = chain.from_iterable(_slot_runs(item, span) for item, span in spans)
        return build_lora_batch(runs, self._model.slot_ranks, self._device)

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _slot_runs(item: ScheduledRequest, span: range) -> Iterator[tuple[int, int | None]]:
    """Split a span of the item's tokens where its adapter starts."""
    num_base = item.request.adapter_start - item.num_computed_tokens - span.start
    num_base = min(max(num_base, 0), len(span))
    yield num_base, None
    yield len(span) - num_base, item.slot


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
    found = []
    for row in range(logits.shape[0]):
        position = item.num_computed_tokens + row + 1
        if item.num_computed_tokens >= request.num_prompt_tokens:
            break
        if position < request.num_prompt_tokens:
            token_id = request.prompt_token_ids[position]
            found.append((position, position_logprobs(logits[row], token_id, num_top)))
    return found
