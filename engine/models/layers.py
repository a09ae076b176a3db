"""Layers that compute with ``kernels.ops`` what a transformers layer computes with torch.

Each takes over the weights of the module it replaces. Knows tensors. Knows nothing of attention or
of adapters, except that something may want to add to a linear's output.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from kernels import ops

# Adds to the outputs [T, out_p] of linears that share the input [T, in], in place.
Update = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]


class KernelLinear(nn.Module):
    """``x @ weight.T + bias`` for x of any leading shape."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        # Plain attributes: looking up a parameter costs a microsecond, some hundred times a step.
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.out_features, self.in_features = weight.shape
        self.update: Update | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [T, in] to a new [T, out]."""
        out = ops.linear(rows, self.weight, self.bias)
        if self.update is not None:
            self.update(rows, (out,))
        return out


class LinearGroup(nn.Module):
    """Linears that always run together on one input, such as q, k and v.

    The members stay where they are in the model; theirs are the names, the group's is the update.
    On a GPU they are one product, since the narrow ones, as k and v are, would leave most of it
    idle; elsewhere weights stay where the checkpoint is mapped.
    """

    def __init__(self, members: Sequence[KernelLinear]) -> None:
        super().__init__()
        self.members = tuple(members)
        self.update: Update | None = None
        self._is_joined = _are_joined(self.members)
        # Made when it is first needed: then nothing else holds the members' weights any more, and
        # a whole model is not there twice.
        self._joined: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._sizes = [member.out_features for member in members]
        self._weights = [] if self._is_joined else [member.weight for member in members]
        self._biases = [member.bias for member in members]

    def project(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Map rows [T, in] to one new [T, out_p] for each member, perhaps parts of one tensor."""
        if self._is_joined:
            self._joined = self._joined or _join(self.members)
            outs = list(torch.split(ops.linear(rows, *self._joined), self._sizes, dim=1))
        else:
            outs = ops.linear_multi(rows, self._weights, self._biases)
        if self.update is not None:
            self.update(rows, outs)
        return outs


def _are_joined(members: Sequence[KernelLinear]) -> bool:
    return members[0].weight.device.type != "cpu"


def _join(members: Sequence[KernelLinear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights and biases as one; the members' own become parts of them."""
    sizes = [member.out_features for member in members]
    weight = torch.cat([member.weight for member in members])
    for member, part in zip(members, torch.split(weight, sizes), strict=True):
        member.weight = part
    if all(member.bias is None for member in members):
        return weight, None
    biases = [
        member.weight.new_zeros(size) if member.bias is None else member.bias
        for member, size in zip(members, sizes, strict=True)
    ]
    return weight, torch.cat(biases)


class KernelRMSNorm(nn.Module):
    """LlamaRMSNorm over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.eps = eps
        self.update: Update | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalise(x.reshape(-1, x.shape[-1])).view(x.shape)

    def normalise(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [T, hidden] to a new [T, hidden]."""
        return self._updated(rows, ops.rms_norm(rows, self.weight, self.eps))

    def add_and_normalise(self, stream: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Add the update to the stream [T, hidden], in place, and map the sum to a new one."""
        return self._updated(stream, ops.add_rms_norm(stream, update, self.weight, self.eps))

    def _updated(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self.update is not None:
            self.update(rows, (out,))
        return out


class GatedMLP(nn.Module):
    """LlamaMLP with a SiLU gate: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, gate: KernelLinear, up: KernelLinear, down: KernelLinear) -> None:
        super().__init__()
        self.gate_proj = gate
        self.up_proj = up
        self.down_proj = down
        self.gate_up = LinearGroup((gate, up))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(x.reshape(-1, x.shape[-1])).view(x.shape)

    def transform(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [T, hidden] to a new [T, hidden]."""
        gate, up = self.gate_up.project(rows)
        return self.down_proj.project(ops.silu_and_mul(gate, up))
