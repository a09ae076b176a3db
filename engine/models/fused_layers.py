"""The decoder layers of a Llama-shaped model in the one call of ``kernels.decoder``.

Knows where transformers' modules keep what the call takes, and when a step needs the loop instead.
"""

from collections.abc import Sequence
from typing import Any

import torch

from engine.lora.layers import LoRAUpdate
from engine.models.attention import PagedAttention, paged_attention_of
from engine.models.context import ForwardContext
from engine.models.layers import KernelLinear, KernelRMSNorm, LinearGroup
from kernels.decoder import (
    DecoderLayer,
    DecoderLayers,
    GroupSlots,
    LayerCache,
    LayerSlots,
    Linears,
    Norm,
)


class FusedLayers:
    """All layers of one model; caches and slots are looked up anew in every step."""

    def __init__(
        self, layers: Sequence[Any], windows: Sequence[int | None], context: ForwardContext
    ) -> None:
        self._context = context
        self._layers = DecoderLayers(
            [_decoder_layer(layer, window) for layer, window in zip(layers, windows, strict=True)]
        )
        self._attention = [_paged(layer.self_attn) for layer in layers]
        self._groups = [_groups(layer) for layer in layers]

    def fits(self, stream: torch.Tensor) -> bool:
        """Return whether the one call computes this step, and is the fastest way to.

        It knows neither what adapters change beyond B @ A nor quantised caches.
        """
        is_plain = self._context.layers.changes is None and self._attention[0].scales is None
        return is_plain and not self._layers.prefers_loop(stream)

    def run(self, stream: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Run the layers over the stream [T, hidden], in place; return what is left to add."""
        lora = self._context.layers.batch
        slots = [_NO_SLOTS if lora is None else _slots(groups) for groups in self._groups]
        caches = [_cache(paged) for paged in self._attention]
        attention = self._context.attention
        return self._layers.run(stream, cos, sin, caches, attention, lora, slots)


_NO_SLOTS: LayerSlots = (None, None, None, None)
_Group = KernelLinear | LinearGroup


def _decoder_layer(layer: Any, window: int | None) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_linears(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        o=_linears(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_linears(mlp.gate_proj, mlp.up_proj),
        down=_linears(mlp.down_proj),
        head_dim=int(attention.head_dim),
        scale=float(attention.scaling),
        window=window,
    )


def _norm(norm: KernelRMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _linears(*linears: KernelLinear) -> Linears:
    return Linears([linear.weight for linear in linears], [linear.bias for linear in linears])


def _paged(attention: Any) -> PagedAttention:
    paged = paged_attention_of(attention)
    assert isinstance(paged, PagedAttention)
    return paged


def _cache(paged: PagedAttention) -> LayerCache:
    assert paged.key_cache is not None and paged.value_cache is not None, "no cache allocated"
    return paged.key_cache, paged.value_cache


def _groups(layer: Any) -> tuple[_Group, _Group, _Group, _Group]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.qkv, attention.o_proj, mlp.gate_up, mlp.down_proj


def _slots(groups: tuple[_Group, _Group, _Group, _Group]) -> LayerSlots:
    qkv, o, gate_up, down = groups
    return _slots_of(qkv), _slots_of(o), _slots_of(gate_up), _slots_of(down)


def _slots_of(group: _Group) -> GroupSlots | None:
    update = group.update
    assert isinstance(update, LoRAUpdate)
    weights = update.slot_weights
    return None if weights is None else (weights.lora_a, weights.lora_b, weights.ranks)
