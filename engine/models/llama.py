"""Runs models of Llama's shape without transformers' forward code.

transformers' bookkeeping in a decode step costs a small model half as much as its arithmetic; for
the architectures listed here the same computation is a short loop over ``kernels.ops``. Weights,
names and rotary embeddings stay transformers'. Knows the modules of these architectures. Knows
nothing of batches beyond rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.models.attention import paged_attention_of
from engine.models.context import ForwardContext
from engine.models.fused_layers import FusedLayers
from engine.models.layers import GatedMLP, KernelLinear, KernelRMSNorm, LinearGroup
from kernels.decoder import DecoderLayers

# How each architecture says how far a layer sees. All else in their decoder layers is Llama's, and
# in Qwen3 a norm of each query and key head.
_WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaForCausalLM": lambda attention: None,
    "MistralForCausalLM": lambda attention: getattr(attention.config, "sliding_window", None),
    "Qwen2ForCausalLM": lambda attention: attention.sliding_window,
    "Qwen3ForCausalLM": lambda attention: attention.sliding_window,
}


def is_llama_shaped(model: PreTrainedModel) -> bool:
    """Return whether `LlamaBody` computes what `model` does; its kernels must be injected."""
    cls = type(model)
    return (
        cls.__name__ in _WINDOWS
        and cls.__module__.startswith("transformers.models.")
        and isinstance(model.lm_head, KernelLinear)
        and isinstance(model.model.norm, KernelRMSNorm)
        and all(_layer_fits(layer) for layer in model.model.layers)
    )


class LlamaBody:
    """The forward pass from token ids to logits."""

    # The last norm runs after the rows with logits are chosen.
    head_modules = frozenset({"model.norm", "lm_head"})

    def __init__(self, model: PreTrainedModel) -> None:
        window_of = _WINDOWS[type(model).__name__]
        inner: Any = model.model
        self._modules = inner.layers
        self._embed: nn.Module = inner.embed_tokens
        self._rotary: nn.Module = inner.rotary_emb
        self._windows = [window_of(layer.self_attn) for layer in inner.layers]
        self._layers = [
            _LlamaLayer(layer, window)
            for layer, window in zip(inner.layers, self._windows, strict=True)
        ]
        self._fused: FusedLayers | None = None
        self._norm: KernelRMSNorm = inner.norm
        self._head = model.lm_head
        self.hidden_size: int | None = int(model.config.hidden_size)
        self._stream: torch.Tensor | None = None

    def fuse_layers(self, context: ForwardContext) -> None:
        """From now on run all layers as one call where that is possible."""
        weight = self._norm.weight
        if DecoderLayers.runs_on(weight.device, weight.dtype):
            self._fused = FusedLayers(self._modules, self._windows, context)

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Map [T] tokens to the logits [R, vocab] of the chosen rows."""
        stream = self._embed(input_ids)
        cos, sin = (t[0] for t in self._rotary(stream, position_ids=positions.unsqueeze(0)))
        if self._fused is not None and self._fused.fits(stream):
            stream.add_(self._fused.run(stream, cos, sin))
        else:
            self._loop(stream, cos, sin)
        self._stream = stream
        logits: torch.Tensor = self._head.project(self._norm.normalise(stream[rows]))
        return logits

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [R, hidden] of rows of the last call."""
        assert self._stream is not None
        return self._norm.normalise(self._stream[rows])

    def _loop(self, stream: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        update = None
        for layer in self._layers:
            update = layer.run(stream, update, cos, sin)
        if update is not None:
            stream.add_(update)


class _LlamaLayer:
    """One decoder layer: attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, layer: Any, window: int | None) -> None:
        attention = layer.self_attn
        attention.qkv = LinearGroup((attention.q_proj, attention.k_proj, attention.v_proj))
        self._attention = attention
        self._qkv: LinearGroup = attention.qkv
        self._head_norms = (attention.q_norm, attention.k_norm) if _has_head_norms(layer) else None
        self._o_proj: KernelLinear = attention.o_proj
        self._input_norm: KernelRMSNorm = layer.input_layernorm
        self._mlp_norm: KernelRMSNorm = layer.post_attention_layernorm
        self._mlp: GatedMLP = layer.mlp
        self._head_dim = int(attention.head_dim)
        self._scale = float(attention.scaling)
        self._window = window

    def run(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Bring the stream [T, hidden] up to this layer's MLP, in place; return what that adds.

        `update` is what the layer before returned. Each addition is part of the norm after it.
        """
        norm = self._input_norm
        rows = norm.normalise(stream) if update is None else norm.add_and_normalise(stream, update)
        attended = self._attend(rows, cos, sin)
        return self._mlp.transform(self._mlp_norm.add_and_normalise(stream, attended))

    def _attend(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = (rows.shape[0], -1, self._head_dim)
        query, key, value = (out.view(heads) for out in self._qkv.project(rows))
        if self._head_norms is not None:
            query, key = self._head_norms[0](query), self._head_norms[1](key)
        mixed = paged_attention_of(self._attention).attend(
            query,
            key,
            value,
            scale=self._scale,
            window=self._window,
            soft_cap=None,
            rotary=(cos, sin),
        )
        return self._o_proj.project(mixed.view(rows.shape[0], -1))


def _has_head_norms(layer: Any) -> bool:
    return hasattr(layer.self_attn, "q_norm")


def _layer_fits(layer: Any) -> bool:
    attention = layer.self_attn
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    if _has_head_norms(layer):
        norms += [attention.q_norm, attention.k_norm]
    return (
        isinstance(layer.mlp, GatedMLP)
        and all(isinstance(linear, KernelLinear) for linear in linears)
        and all(isinstance(norm, KernelRMSNorm) for norm in norms)
    )
