"""Routes the attention of any transformers model through the paged KV cache.

transformers calls the function registered here for each attention module; it finds the module's
own `PagedAttention` on the module itself. Knows the calling convention of AttentionInterface.
Knows nothing of blocks' owners, adapters or sampling.

No mask function is registered under this name, so transformers builds no mask; whatever a model
asks for beyond causality, a window and a soft cap is refused, never ignored.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from engine.cache.kv_cache import KVShape, LayerKV
from engine.errors import UnsupportedModelError
from engine.models.context import ForwardContext
from kernels import ops
from kernels.metadata import KVScales

ATTENTION_NAME = "lorafleet_paged"

_ATTRIBUTE = "paged_attention"

# Passed along by models without changing what causal attention over paged KV computes.
_IGNORED_ARGUMENTS = frozenset(
    {
        "is_causal",
        "dropout",
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
    }
    | {"output_router_logits", "return_dict", "cache_position", "position_embeddings"}
)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention module needs: the shape of its cache and how far it sees."""

    kv: KVShape
    window: int | None

    def quantised(self) -> "AttentionSpec":
        """The same over a cache of eight-bit floats."""
        return replace(self, kv=self.kv.quantised())


# cos and sin, each [T, D].
Rotary = tuple[torch.Tensor, torch.Tensor]


class _Attend(Protocol):
    """Query [T, H, D], key and value [T, Hkv, D] to [T, H, D].

    With ``rotary`` queries and keys are rotated first; both are changed.
    """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor: ...


class PagedAttention:
    """One module's attention over its own layer of the KV cache."""

    __slots__ = ("_context", "key_cache", "scales", "value_cache")

    def __init__(self, context: ForwardContext) -> None:
        self._context = context
        self.key_cache: torch.Tensor | None = None
        self.value_cache: torch.Tensor | None = None
        self.scales: KVScales | None = None

    def place(self, kv: LayerKV | None) -> None:
        """Use this cache from now on."""
        self.key_cache = None if kv is None else kv.key
        self.value_cache = None if kv is None else kv.value
        self.scales = None if kv is None else kv.scales

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Store the new tokens' keys and values, then attend to each sequence's context."""
        assert self.key_cache is not None and self.value_cache is not None, "no cache allocated"
        batch = self._context.attention
        caches = (self.key_cache, self.value_cache)
        slots, scales = batch.slot_mapping, self.scales
        if rotary is None:
            ops.store_kv(key, value, *caches, slots, scales=scales)
        else:
            ops.rope_and_store_kv(query, key, value, rotary, *caches, slots, scales=scales)
        return ops.paged_attention(
            query,
            *caches,
            batch,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            scales=scales,
        )


class _Recorder:
    """Stands in for a cache during one forward pass of one token, to learn the module's shapes."""

    def __init__(self, calls: list["_Recorder"]) -> None:
        self._calls = calls
        self.spec: AttentionSpec | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Attend from a lone token: to itself, so its value is the result."""
        if key.shape != value.shape or query.shape[2] != key.shape[2]:
            raise UnsupportedModelError("keys and values of different head sizes are not supported")
        if self.spec is not None:
            raise UnsupportedModelError("an attention module that runs twice is not supported")
        self.spec = AttentionSpec(KVShape(key.shape[1], key.shape[2], key.dtype), window)
        self._calls.append(self)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def paged_attention_of(module: nn.Module) -> _Attend:
    """Return what `attach_paged_attention` gave to an attention module."""
    attend: _Attend | None = getattr(module, _ATTRIBUTE, None)
    if attend is None:
        raise UnsupportedModelError(f"{type(module).__name__} attends without a layer index")
    return attend


def attach_paged_attention(
    model: nn.Module, run_token: Callable[[], object], context: ForwardContext
) -> list[tuple[PagedAttention, AttentionSpec]]:
    """Give every attention module its own `PagedAttention`, in the order in which they run.

    Which modules attend, and with what shapes, is learnt from ``run_token``, a forward pass of one
    token.
    """
    calls: list[_Recorder] = []
    candidates = {module: _Recorder(calls) for module in _numbered_modules(model)}
    for module, recorder in candidates.items():
        setattr(module, _ATTRIBUTE, recorder)
    try:
        run_token()
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(f"the model cannot run a lone token: {error}") from error
    finally:
        for module in candidates:
            delattr(module, _ATTRIBUTE)
    if not calls:
        raise UnsupportedModelError("the model has no attention that can be paged")
    modules = {recorder: module for module, recorder in candidates.items()}
    attached = []
    for recorder in calls:
        assert recorder.spec is not None
        paged = PagedAttention(context)
        setattr(modules[recorder], _ATTRIBUTE, paged)
        attached.append((paged, recorder.spec))
    return attached


def _numbered_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that know their layer's index: attention modules are among them."""
    return (m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int))


def _paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """AttentionInterface: query [1, H, T, D], key and value [1, Hkv, T, D] to [1, T, H, D]."""
    attend = paged_attention_of(module)
    _refuse_unknown(module, attention_mask, kwargs)
    out = attend.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
    )
    return out.unsqueeze(0), None


def _refuse_unknown(
    module: nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} builds an attention mask of its own")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} is not causal")
    for argument, value in kwargs.items():
        if value is not None and argument not in _IGNORED_ARGUMENTS:
            raise UnsupportedModelError(f"{name} passes {argument!r}, which is not supported")


AttentionInterface.register(ATTENTION_NAME, _paged_attention_forward)
