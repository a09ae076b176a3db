"""Runs a model once for every kernel that a step can need, so that none is compiled in a request.

A kernel is compiled anew for each choice that ``kernels.tuning`` makes, such as into how many parts
a context is cut. What it chooses by is a step's sizes; here are sizes that lead to every choice.
Nothing is written to the cache, and no adapter is needed: to a slot of rank 0 nothing is done.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.models.paged_model import PagedModel
from kernels import ops
from kernels.metadata import AttentionBatch, LoRABatch

# Beyond these, more tokens and longer contexts lead to no other choice.
_MAX_TOKENS = 4096
# Beyond this, the rank does not matter either.
_MAX_TOKENS_OF_RANKS = 1024
_MAX_CONTEXT = 16384


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """A step of some sequences alike: the tokens of each, and its context with them.

    With a `rank`, every token uses an adapter of it, and neighbours in runs of `segment_len`.
    """

    num_sequences: int
    query_len: int
    context_len: int
    rank: int = 0
    segment_len: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.query_len


def warm_up_steps(max_tokens: int, max_context: int, max_rank: int) -> Iterator[WarmUpStep]:
    """Yield steps that together launch what any step within these limits does."""
    for context in _powers(min(max_context, _MAX_CONTEXT)):
        yield WarmUpStep(1, 1, context)
    for tokens in _powers(min(max_tokens, _MAX_TOKENS)):
        query_len = min(tokens, max_context)
        sequences = -(-tokens // query_len)
        yield WarmUpStep(sequences, query_len, query_len)
        for rank in _powers(max_rank if tokens <= _MAX_TOKENS_OF_RANKS else min(max_rank, 1)):
            for segment_len in _powers(sequences * query_len, base=4):
                yield WarmUpStep(sequences, query_len, query_len, rank, segment_len)


def _powers(limit: int, base: int = 2) -> Iterator[int]:
    """Yield the powers below `limit`, then `limit`; nothing for 0."""
    value = 1
    while value < limit:
        yield value
        value *= base
    if limit:
        yield limit


class WarmUp:
    """Runs warm-up steps on one model, whose cache and slots are in place and empty."""

    def __init__(self, model: PagedModel, block_size: int) -> None:
        self._model = model
        self._device = model.spec.device
        self._block_size = block_size

    def run(self, step: WarmUpStep) -> None:
        """Compute a step and sample; every token is token 0, and every block the first one."""
        tokens = torch.zeros(step.num_tokens, dtype=torch.int64, device=self._device)
        logits = self._model.forward(
            tokens,
            tokens,
            attention=self._attention(step),
            lora=self._lora(step) if step.rank else None,
            logits_rows=tokens[:1],
            logits_lora=None,
        )
        ops.sample_tokens(logits, torch.zeros(1, 4, device=self._device), tokens[:1])

    def _attention(self, step: WarmUpStep) -> AttentionBatch:
        count = step.num_sequences
        blocks = -(-step.context_len // self._block_size)
        return AttentionBatch(
            query_starts=self._integers(count + 1) * step.query_len,
            context_lens=torch.full_like(self._integers(count), step.context_len),
            block_tables=self._integers(count * blocks).view(count, blocks) * 0,
            slot_mapping=torch.full((step.num_tokens,), -1, device=self._device),
            num_decodes=count if step.query_len == 1 else 0,
            max_query_len=step.query_len,
            max_context_len=step.context_len,
        )

    def _lora(self, step: WarmUpStep) -> LoRABatch:
        num_segments = -(-step.num_tokens // step.segment_len)
        slots = torch.zeros(step.num_tokens, dtype=torch.int32, device=self._device)
        return LoRABatch(
            token_slots=slots,
            segment_starts=(self._integers(num_segments + 1) * step.segment_len).clamp(
                max=step.num_tokens
            ),
            segment_slots=slots[:num_segments],
            max_segment_len=step.segment_len,
            max_active_rank=step.rank,
            num_active=1,
        )

    def _integers(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=self._device)
