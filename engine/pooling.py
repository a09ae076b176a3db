"""Makes one vector of a prompt: its last token's final hidden state, or the mean of all tokens'.

Knows which tokens count and the sums of prompts that come in chunks. Knows nothing of models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.outputs import ScheduledRequest

_Key = tuple[str, int]


def pooled_range(item: ScheduledRequest) -> range:
    """Which of the item's tokens count, from its first token in the step."""
    match item.request.params.pooling:
        case "last":
            return range(item.num_tokens - 1, item.num_tokens) if item.samples else range(0)
        case "mean":
            return range(item.num_tokens)
        case _:
            return range(0)


@dataclass(slots=True)
class Pooler:
    """The sums of all prompts under way. Used by one thread."""

    _sums: dict[_Key, torch.Tensor] = field(default_factory=dict)

    def add(
        self, scheduled: Sequence[ScheduledRequest], hidden: torch.Tensor
    ) -> dict[_Key, tuple[float, ...]]:
        """Take the hidden states [R, hidden] of the tokens that count; returns whole vectors."""
        found = {}
        row = 0
        for item in scheduled:
            span = pooled_range(item)
            if not span:
                continue
            key, request = item.request.key, item.request
            total = hidden[row : row + len(span)].sum(dim=0)
            row += len(span)
            # What a preempted prompt had before is computed again from its first token.
            if item.num_computed_tokens and key in self._sums:
                total = self._sums[key] + total
            self._sums[key] = total
            if item.samples:
                count = request.num_prompt_tokens if request.params.pooling == "mean" else 1
                found[key] = tuple((self._sums.pop(key) / count).tolist())
        return found

    def forget(self, key: _Key) -> None:
        """A prompt is given up."""
        self._sums.pop(key, None)
