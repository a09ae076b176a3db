"""The base model as the engine runs it: weights, KV cache and adapter slots behind one forward.

Knows how the parts of ``engine.models`` fit together. Knows nothing of requests, scheduling or
adapters' names.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from engine.cache.kv_cache import allocate_kv, num_blocks_that_fit
from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.lora.adapter import LoRAAdapter
from engine.lora.layers import LoRASlots, ModelPlace, attach_lora
from engine.lora.targets import ModelTargets, TargetKind
from engine.models.attention import (
    ATTENTION_NAME,
    AttentionSpec,
    PagedAttention,
    attach_paged_attention,
)
from engine.models.context import ForwardContext
from engine.models.injection import find_targets, inject_kernels
from engine.models.isolation import check_isolation
from engine.models.layers import KernelLinear
from engine.models.llama import LlamaBody, is_llama_shaped
from engine.models.loader import load_model, resolve_device
from engine.models.registry import max_model_len, model_class, read_config
from engine.models.spec import ModelSpec
from engine.parallel.group import TensorParallelGroup
from engine.parallel.sharding import ShardedModel, ShardPlan, shard_model
from kernels.metadata import AttentionBatch, LoRABatch


class _Body(Protocol):
    """From token ids [T], positions [T] and rows [R] to the logits [R, vocab] of these rows.

    ``head_modules`` are the modules that see the chosen rows alone. ``hidden`` gives the final
    hidden states [R, hidden] of rows of the last call, ``hidden_size`` None where it cannot.
    """

    @property
    def head_modules(self) -> frozenset[str]: ...

    @property
    def hidden_size(self) -> int | None: ...

    def hidden(self, rows: torch.Tensor) -> torch.Tensor: ...

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor: ...


class PagedModel:
    """A transformers causal language model over a paged KV cache, with LoRA slots.

    Raises UnsupportedModelError when the model cannot be served exactly. One thread at a time may
    call it. ``fuse`` False runs transformers' own forward code where a faster equivalent is known.
    With a ``group`` it is one rank's part: all ranks are built and called alike, ``spec`` has the
    rank's own key heads, ``targets`` the whole model, and adapters are given in parts.
    """

    spec: ModelSpec
    targets: ModelTargets

    def __init__(
        self,
        config: EngineConfig,
        *,
        fuse: bool = True,
        group: TensorParallelGroup | None = None,
    ) -> None:
        hf_config = read_config(config.model)
        cls = model_class(hf_config)
        length = max_model_len(hf_config, config.max_model_len)
        device = resolve_device(config.device) if group is None else group.device
        model = load_model(
            cls,
            hf_config,
            config.model,
            dtype=config.dtype,
            # A split model is split before any of it goes to a device.
            device=device if group is None else torch.device("cpu"),
            attention=ATTENTION_NAME,
        )
        self.targets = placed_targets = find_targets(model, config.model.name)
        self._sharded: ShardedModel | None = None
        if group is not None:
            self._sharded = shard_model(model, group)
            placed_targets = self._sharded.plan.part_of(self.targets, group.tp_rank, group.tp_size)
            model.to(device)
        inject_kernels(model)
        self._model = model
        self._body: _Body = (
            LlamaBody(model) if fuse and is_llama_shaped(model) else _TransformersBody(model)
        )
        self._context = ForwardContext()
        self._cache_config = config.cache
        self._attention = attach_paged_attention(model, self._run_token, self._context)
        self.spec = _spec(model, self._attention, length, device, self._body.hidden_size)
        self._lora: LoRASlots | None = None
        self._fixed_linears: frozenset[str] = frozenset()
        self._plain_slots: set[int] = set()
        if config.lora is not None:
            self._lora = attach_lora(
                model,
                placed_targets,
                config.lora,
                self._context,
                ModelPlace(model.dtype, device, self._body.head_modules),
            )
        if isinstance(self._body, LlamaBody) and group is None:
            self._body.fuse_layers(self._context)
        check_isolation(self.forward, self.allocate_cache, config.cache.block_size, self.spec)
        self._release_cache()
        if config.cache.kv_cache_dtype == "fp8":
            self._attention = [(paged, spec.quantised()) for paged, spec in self._attention]

    def num_blocks_that_fit(self) -> int:
        """Return how many KV blocks the cache settings allow."""
        return num_blocks_that_fit([spec.kv for _, spec in self._attention], self._cache_config)

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache of every layer, replacing what was there."""
        block_size = self._cache_config.block_size
        for paged, spec in self._attention:
            paged.place(allocate_kv(spec.kv, num_blocks, block_size, self.spec.device))

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        """Make `slot` mean `adapter`; no running step may use the slot."""
        self._lora_slots().write_slot(slot, adapter)
        self._plain_slots.discard(slot)
        if not adapter.changes and self._fixed_linears.issuperset(adapter.modules):
            self._plain_slots.add(slot)

    def fix_slots(self) -> None:
        """Give the layers' linears their slots now, in places that stay the same from then on."""
        if self._lora is not None:
            kinds = (TargetKind.LINEAR, TargetKind.CONV1D)
            names = [name for name, target in self.targets.items() if target.kind in kinds]
            self._lora.weights.allocate(names)
            self._fixed_linears = frozenset(names)

    def is_plain(self, slot: int) -> bool:
        """Return whether a slot's adapter only adds B @ A, in places that `fix_slots` fixed."""
        return slot in self._plain_slots

    def clear_slot(self, slot: int) -> None:
        """Make `slot` mean no adapter."""
        self._lora_slots().clear_slot(slot)

    @property
    def slot_ranks(self) -> Sequence[int]:
        """The largest rank in each slot, 0 for an empty one: what ``build_lora_batch`` asks for."""
        return self._lora_slots().weights.slot_ranks

    @property
    def shard_plan(self) -> ShardPlan | None:
        """How the model is split among ranks, None when it is not."""
        return None if self._sharded is None else self._sharded.plan

    def base_weight(self, name: str, parameter: str = "weight") -> torch.Tensor | None:
        """Return the weight or bias of the base model's module at this path, None without one.

        For telling whether an adapter's copy of a base weight is only that, and for DoRA. It is
        whole also where the model is split, and then known to the first rank alone.
        """
        if self._sharded is not None and name in self._sharded.plan.splits:
            return self._sharded.whole[name].get(parameter)
        try:
            weight = getattr(self._model.get_submodule(name), parameter, None)
        except AttributeError:
            return None
        return weight if isinstance(weight, torch.Tensor) else None

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBatch,
        lora: LoRABatch | None,
        logits_rows: torch.Tensor,
        logits_lora: LoRABatch | None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute one step and return the logits of the chosen tokens; fills the KV cache.

        input_ids, positions   [T] int64
        lora                   slots of the T tokens, None when all use the base model
        logits_rows            [R] int64    tokens whose logits are wanted
        logits_lora            slots of these R tokens, None when all use the base model
        returns                [R, vocab] float32, which is ``out`` where that is given
        """
        with self._context.step(attention, lora, logits_lora):
            logits = self._body(input_ids, positions, logits_rows)
            return logits.float() if out is None else out.copy_(logits)

    @torch.inference_mode()
    def hidden(self, rows: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        """Return the final hidden states of chosen tokens of the last step.

        rows      [R] int64
        lora      slots of these R tokens, None when all use the base model
        returns   [R, hidden] float32
        """
        with self._context.chosen(lora):
            return self._body.hidden(rows).float()

    def _lora_slots(self) -> LoRASlots:
        if self._lora is None:
            raise ValueError("this engine was configured without LoRA")
        return self._lora

    @torch.inference_mode()
    def _run_token(self) -> None:
        token = torch.zeros(1, dtype=torch.int64, device=self._model.device)
        self._body(token, token, token)

    def _release_cache(self) -> None:
        for paged, _ in self._attention:
            paged.place(None)


class _TransformersBody:
    """transformers' own forward code, whatever the architecture."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        names = {module: name for name, module in model.named_modules()}
        self.head_modules = frozenset({names[model.get_output_embeddings()]})
        self.hidden_size: int | None = None
        self._last: torch.Tensor | None = None
        decoder = model.base_model
        if decoder is not model:
            decoder.register_forward_hook(self._keep)

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        output = self._model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [R, hidden] of rows of the last call."""
        assert self._last is not None
        return self._last[rows]

    def _keep(self, decoder: object, args: object, output: Any) -> None:
        """Take what the decoder hands to the head, if that is what it looks like."""
        last = output[0]
        width = self._model.get_output_embeddings().in_features
        if isinstance(last, torch.Tensor) and last.dim() == 3 and last.shape[-1] == width:
            self._last, self.hidden_size = last[0], width


def _spec(
    model: PreTrainedModel,
    attention: list[tuple[PagedAttention, AttentionSpec]],
    length: int,
    device: torch.device,
    hidden_size: int | None,
) -> ModelSpec:
    first = attention[0][1].kv
    head = model.get_output_embeddings()
    if not isinstance(head, KernelLinear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear output head")
    return ModelSpec(
        vocab_size=head.out_features,
        num_layers=len(attention),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        windows=tuple(spec.window for _, spec in attention),
        max_model_len=length,
        dtype=model.dtype,
        device=device,
        hf_config=model.config,
        hidden_size=hidden_size,
    )
