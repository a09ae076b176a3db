"""Which tokens of a step have adapters that change more than B @ A adds.

Knows runs of tokens and slots. Knows nothing of modules or weights.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from kernels.metadata import LoRABatch

# Below this many tokens, one operation over all of them costs less than one for each run.
_MAX_TOKENS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """The tokens of such slots.

    runs    (first token, end, slot)
    spans   (first token, end, places)    what to scale at once, by the slots' places in a table:
            one place for all of a span's tokens, or a tensor [end - first] with one for each,
            where tokens between the runs have the place after the last slot's
    """

    num_tokens: int
    runs: tuple[tuple[int, int, int], ...]
    spans: tuple[tuple[int, int, int | torch.Tensor], ...]


def select_changed(
    batch: LoRABatch, changed_slots: Collection[int], max_loras: int
) -> ChangeBatch | None:
    """The part of the batch that uses these slots, None when no token does."""
    runs = tuple(run for run in batch.segments if run[2] in changed_slots)
    if not runs:
        return None
    num_tokens = batch.token_slots.shape[0]
    start, stop = runs[0][0], runs[-1][1]
    if len(runs) == 1 or stop - start > _MAX_TOKENS_AT_ONCE:
        return ChangeBatch(num_tokens, runs, runs)
    places = [max_loras] * (stop - start)
    for first, end, slot in runs:
        places[first - start : end - start] = [slot] * (end - first)
    index = torch.tensor(places, dtype=torch.int64).to(batch.token_slots.device)
    return ChangeBatch(num_tokens, runs, ((start, stop, index),))
