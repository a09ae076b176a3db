"""Layers that compute with ``kernels.ops`` what a transformers layer computes with torch.

Each takes over the weights of the module it replaces. Knows tensors. Knows nothing of adapters,
attention or which module of a model it stands for.
"""

import torch
from torch import nn

from kernels import ops


class KernelLinear(nn.Module):
    """``x @ weight.T + bias`` for x of any leading shape."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        # Plain attributes: looking up a parameter costs a microsecond, some hundred times a step.
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return self.project(rows).view(*x.shape[:-1], self.out_features)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [T, in] to [T, out]."""
        return ops.linear(rows, self.weight, self.bias)


class KernelRMSNorm(nn.Module):
    """LlamaRMSNorm over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return ops.rms_norm(rows, self.weight, self.eps).view(x.shape)


class GatedMLP(nn.Module):
    """LlamaMLP with a SiLU gate: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        width = gate.shape[-1]
        mixed = ops.silu_and_mul(gate.view(-1, width), up.view(-1, width))
        down: torch.Tensor = self.down_proj(mixed.view(gate.shape))
        return down
