"""Builds the LoRABatch of a step: which device slot each token uses.

Knows runs of tokens and slots' ranks. Knows nothing of requests, adapters or weights.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kernels.metadata import LoRABatch

NO_SLOT = -1


def build_lora_batch(
    token_runs: Iterable[tuple[int, int | None]],
    slot_ranks: Sequence[int],
    device: torch.device | str = "cpu",
) -> LoRABatch | None:
    """Describe consecutive runs of ``(num_tokens, slot)``; slot None is the base model.

    Neighbouring runs of one slot become one segment. ``slot_ranks`` is the largest rank of each
    slot's adapter. Returns None when no token has an adapter, so that such a step skips LoRA.
    """
    lengths: list[int] = []
    slots: list[int] = []
    for num_tokens, slot in token_runs:
        number = NO_SLOT if slot is None else slot
        if num_tokens == 0:
            continue
        if slots and slots[-1] == number:
            lengths[-1] += num_tokens
        else:
            lengths.append(num_tokens)
            slots.append(number)

    active = {slot for slot in slots if slot != NO_SLOT}
    if not active:
        return None
    segment_slots = np.array(slots, dtype=np.int32)
    segment_starts = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(lengths, out=segment_starts[1:])
    return LoRABatch(
        token_slots=_to_device(np.repeat(segment_slots, lengths), device),
        segment_starts=_to_device(segment_starts, device),
        segment_slots=_to_device(segment_slots, device),
        max_segment_len=max(lengths),
        max_active_rank=max(slot_ranks[slot] for slot in active),
        num_active=len(active),
        segments=tuple(
            (start, stop, slot)
            for start, stop, slot in zip(
                segment_starts[:-1].tolist(), segment_starts[1:].tolist(), slots, strict=True
            )
            if slot != NO_SLOT
        ),
    )


def _to_device(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
