"""Layers of which each rank holds a part.

Every rank calls them with the same input and gets the same output, but for the two that a layer of
the model has in its middle: outputs of column-parallel linears stay apart (whole heads, or whole
features of an MLP), and a row-parallel linear adds up what comes of them. Column-parallel linears
need no code: a `KernelLinear` with fewer rows is one.

What adapters add is applied to a rank's part before the parts are added up, so that it costs no
exchange of its own: B is split like the outputs, A like the inputs.
"""

import torch
from torch import nn
from torch.nn import functional

from engine.models.layers import KernelLinear
from engine.parallel.group import TensorParallelGroup


class RowParallelLinear(KernelLinear):
    """A linear whose input is split: each rank computes a summand of every output.

    Its bias is there on the first rank only.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, group: TensorParallelGroup
    ) -> None:
        super().__init__(weight, bias if group.is_first else None)
        self._group = group

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Map a rank's part of the rows [T, in / ranks] to a new [T, out], whole on every rank."""
        out = super().project(rows)
        self._group.all_reduce(out)
        return out


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds some tokens."""

    def __init__(self, weight: torch.Tensor, vocab_size: int, group: TensorParallelGroup) -> None:
        super().__init__()
        # A parameter, as in a whole model: transformers looks at one for the model's dtype.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._start = group.span(vocab_size).start
        self._group = group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        ids = input_ids - self._start
        is_here = (ids >= 0) & (ids < self.weight.shape[0])
        embedded = functional.embedding(ids.where(is_here, 0), self.weight)
        embedded.masked_fill_(~is_here.unsqueeze(-1), 0.0)
        # Adding zeros changes nothing: the sum is the row that one rank holds.
        self._group.all_reduce(embedded)
        return embedded


class VocabParallelHead(KernelLinear):
    """An output head of which each rank holds some tokens; all ranks get all logits."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        vocab_size: int,
        group: TensorParallelGroup,
    ) -> None:
        super().__init__(weight, bias)
        self.out_features = vocab_size
        self._part = -(-vocab_size // group.tp_size)
        self._group = group

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows [R, hidden] to a new [R, vocab], whole on every rank."""
        part = super().project(rows)
        if not rows.shape[0]:
            return rows.new_empty(0, self.out_features)
        # The last rank's part may be shorter, and parts travel in one size.
        part = functional.pad(part, (0, self._part - part.shape[1]))
        parts = self._group.all_gather(part)
        logits = parts.transpose(0, 1).flatten(1)
        return logits[:, : self.out_features]
