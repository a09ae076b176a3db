"""Adds the adapters' updates to the outputs: one launch that shrinks and one that expands.

The intermediate stays in the parts that the shrink was cut into; see ``kernels.lora_shrink``.
"""

from collections.abc import Sequence

import torch

from kernels.lora_expand import expand_parts
from kernels.lora_shrink import shrink_parts
from kernels.metadata import LoRABatch


def lora_apply(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    ranks: torch.Tensor,
    batch: LoRABatch,
    ys: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
) -> None:
    """Launch twice for all adapters and up to three projections; see `kernels.ops`."""
    expand_parts(shrink_parts(x, lora_a, ranks, batch), lora_b, ranks, batch, ys, scales)
