"""Linears that add each token's adapter to the base model's output.

Knows where its module's slot weights are found and which tokens use which slot. Knows nothing of
adapters' names, files or how slots are assigned.
"""

import torch

from engine.lora.weights import LoRAWeights
from engine.models.context import LoRAScope
from engine.models.layers import KernelLinear
from kernels import ops


class LoRALinear(KernelLinear):
    """A linear whose output gets ``scaling * B @ A @ x`` of each token's adapter.

    Costs nothing beyond the base linear in a step without adapters, or when no adapter in a slot
    targets this module.
    """

    def __init__(self, base: KernelLinear, name: str, weights: LoRAWeights, scope: LoRAScope):
        super().__init__(base.weight, base.bias)
        self._name = name
        self._weights = weights
        self._scope = scope

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().project(rows)
        batch = self._scope.batch
        if batch is not None and (lora := self._weights.module(self._name)) is not None:
            ops.lora_apply(rows, lora.lora_a, lora.lora_b, lora.ranks, batch, (out,))
        return out
