"""All decoder layers of Llama's shape as one call, where the C++ extension has them.

The same ops in the same order as a loop over ``kernels.ops``, bit for bit, without Python in
between: that is a fifth of a small model's decode step. Knows layers' weights. Knows nothing of
models' names or of adapters beyond slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.backend import is_available
from kernels.metadata import AttentionBatch, LoRABatch

# Keys and values [num_blocks, block_size, Hkv, D].
LayerCache = tuple[torch.Tensor, torch.Tensor]
# lora_a, lora_b and ranks of linears that share their input, see ``kernels.ops.lora_apply``.
GroupSlots = tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor]
# Of qkv, o, gate and up, down; None while no adapter has targeted the group.
LayerSlots = tuple[GroupSlots | None, GroupSlots | None, GroupSlots | None, GroupSlots | None]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm: its weight and epsilon."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Linears:
    """Weights [out_p, in] that share their input, and a bias [out_p] or None for each."""

    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """What one layer computes with. `query_norm` and `key_norm` are of each head."""

    input_norm: Norm
    qkv: Linears
    query_norm: Norm | None
    key_norm: Norm | None
    o: Linears
    mlp_norm: Norm
    gate_up: Linears
    down: Linears
    head_dim: int
    scale: float
    window: int | None


class DecoderLayers:
    """The layers of one model. Look at `runs_on` first."""

    def __init__(self, layers: Sequence[DecoderLayer]) -> None:
        from kernels import cpu

        self._cpu = cpu
        self._layers = [_to_extension(cpu.extension(), layer) for layer in layers]

    @staticmethod
    def runs_on(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether tensors of this kind can take the one call."""
        return (
            device.type == "cpu"
            and is_available("cpu", "decoder_layers")
            and dtype in (torch.float32, torch.bfloat16)
        )

    def prefers_loop(self, stream: torch.Tensor) -> bool:
        """Return whether some op alone is faster elsewhere for so many rows."""
        return self._cpu.prefers_torch(stream)

    def run(
        self,
        stream: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionBatch,
        lora: LoRABatch | None,
        slots: Sequence[LayerSlots],
    ) -> torch.Tensor:
        """Run every layer and return what the last one's MLP still has to add to the stream.

        stream      [T, hidden]    changed, contiguous
        cos, sin    [T, D]         same dtype
        caches      one for each layer, changed
        slots       one for each layer
        returns     [T, hidden]    new tensor
        """
        extension = self._cpu.extension()
        placed = extension.AttentionBatch(
            attention.query_starts,
            attention.context_lens,
            attention.block_tables,
            attention.slot_mapping,
            attention.num_decodes,
        )
        segments = None
        if lora is not None and lora.max_active_rank:
            segments = extension.LoRABatch(lora.segment_starts, lora.segment_slots)
        update: torch.Tensor = extension.decoder_layers(
            self._layers, stream, cos, sin, caches, placed, segments, slots
        )
        return update


def _to_extension(extension: Any, layer: DecoderLayer) -> Any:
    def norm(part: Norm | None) -> Any:
        return None if part is None else extension.Norm(part.weight, part.eps)

    def linears(part: Linears) -> Any:
        return extension.LinearGroup(part.weights, part.biases)

    return extension.DecoderLayer(
        input_norm=norm(layer.input_norm),
        qkv=linears(layer.qkv),
        query_norm=norm(layer.query_norm),
        key_norm=norm(layer.key_norm),
        o=linears(layer.o),
        mlp_norm=norm(layer.mlp_norm),
        gate_up=linears(layer.gate_up),
        down=linears(layer.down),
        head_dim=layer.head_dim,
        scale=layer.scale,
        window=layer.window,
    )
