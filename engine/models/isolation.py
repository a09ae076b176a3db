"""Checks on the loaded model that sequences of one batch do not touch each other.

A config does not say whether a model mixes tokens outside attention (a convolution, a recurrent
state) or derives positions by counting rows: such a model would answer fluently and wrong. Two
small batches tell. Knows batches and logits. Knows nothing of model classes.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch

from engine.errors import UnsupportedModelError
from engine.models.spec import ModelSpec
from kernels.metadata import AttentionBatch, LoRABatch

Forward = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        AttentionBatch,
        LoRABatch | None,
        torch.Tensor,
        LoRABatch | None,
    ],
    torch.Tensor,
]

_SUBJECT_LEN = 4

# Lengths before and after the subject. Both batches have as many tokens, so that matrix products
# take the same path and differ by rounding alone.
_NEIGHBOURS = ((3, 2), (2, 3))

# Largest difference, relative to the largest logit, that rounding may cause.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_isolation(
    forward: Forward, allocate_cache: Callable[[int], None], block_size: int, spec: ModelSpec
) -> None:
    """Raise UnsupportedModelError when a sequence's logits depend on its neighbours in the batch.

    Leaves a small KV cache allocated.
    """
    num_tokens = _SUBJECT_LEN + sum(map(sum, _NEIGHBOURS))
    generator = torch.Generator().manual_seed(0)
    # All different, so that no neighbour happens to be the same in both batches.
    ids = torch.randperm(max(num_tokens, spec.vocab_size), generator=generator) % spec.vocab_size
    subject, rest = ids[:_SUBJECT_LEN], ids[_SUBJECT_LEN:]
    results = []
    for before, after in _NEIGHBOURS:
        others, rest = rest[: before + after], rest[before + after :]
        tokens = torch.cat([others[:before], subject, others[before:]]).to(spec.device)
        lengths = (before, _SUBJECT_LEN, after)
        batch, num_blocks = _prefill_batch(lengths, block_size, spec.device)
        allocate_cache(num_blocks)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(spec.device)
        rows = torch.arange(before, before + _SUBJECT_LEN, device=spec.device)
        results.append(forward(tokens, positions, batch, None, rows, None))
    first, second = results
    if first.shape != (_SUBJECT_LEN, spec.vocab_size):
        raise UnsupportedModelError(f"the model returns logits of shape {tuple(first.shape)}")
    difference = float((first - second).abs().max() / first.abs().max().clamp(min=1e-6))
    if not difference <= _TOLERANCE.get(spec.dtype, 1e-3):
        raise UnsupportedModelError(
            "a sequence's logits depend on other sequences of its batch "
            f"(relative difference {difference:.2g}): the model mixes tokens outside attention"
        )


def _prefill_batch(
    lengths: Sequence[int], block_size: int, device: torch.device
) -> tuple[AttentionBatch, int]:
    """Describe whole prompts in consecutive blocks; also return how many blocks they take."""
    counts = [-(-length // block_size) for length in lengths]
    firsts = list(accumulate(counts, initial=0))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, counts, strict=False)):
        tables[row, :count] = torch.arange(first, first + count)
    slots = chain.from_iterable(
        range(first * block_size, first * block_size + length)
        for first, length in zip(firsts, lengths, strict=False)
    )
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(list(slots), dtype=torch.int64, device=device),
        num_decodes=0,
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )
    return batch, firsts[-1]
