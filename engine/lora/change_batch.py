"""Which tokens of a step have adapters that change more than B @ A adds.

Knows runs of tokens and slots. Knows nothing of modules or weights.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from kernels.metadata import LoRABatch


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """The tokens of such slots, as runs on the host and one by one on the device.

    runs   (first token, end, slot)
    rows   [n] int64    the tokens
    slots  [n] int64    their slots
    """

    num_tokens: int
    runs: tuple[tuple[int, int, int], ...]
    rows: torch.Tensor
    slots: torch.Tensor


def select_changed(batch: LoRABatch, changed_slots: Collection[int]) -> ChangeBatch | None:
    """The part of the batch that uses these slots, None when no token does."""
    runs = tuple(run for run in batch.segments if run[2] in changed_slots)
    if not runs:
        return None
    rows = [row for start, stop, _ in runs for row in range(start, stop)]
    slots = [slot for start, stop, slot in runs for _ in range(start, stop)]
    index = torch.tensor([rows, slots], dtype=torch.int64).to(batch.token_slots.device)
    return ChangeBatch(batch.token_slots.shape[0], runs, index[0], index[1])
