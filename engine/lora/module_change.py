"""What an adapter changes in one module beyond adding B @ A, computed once at load.

Knows PEFT's formulas for DoRA, biases, whole weights, embeddings and trained tokens. Knows nothing
of files, slots or batches.

For a linear, y = x @ W.T + b of the base model becomes

    scale * (y + lora(x)) + shift        DoRA, new biases and biases of lora_B
    x @ weight.T + bias                  a whole new weight
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter_tensors import BaseWeight, ModuleTensors
from engine.lora.module_plan import ModulePlan
from engine.lora.targets import LoRATarget, TargetKind
from engine.lora.tensor_names import TensorRole

# Rows of a weight whose norms are computed at once, which bounds the memory that takes.
_ROWS_AT_ONCE = 1024

# The largest float16. No trained value comes near it, a flipped bit of an exponent goes beyond; and
# sums of such values overflow at other places than PEFT's do.
_LARGEST = 65504.0

# Magnitudes and norms of an untrained DoRA adapter differ by the order of summation alone.
_SAME_SCALE = 1e-5


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModuleChange:
    """One module's change; None where there is none.

    scale, shift           [out] float32
    weight                 as the module's own, [out, in] for any linear
    bias                   [out]
    table, expand          [vocab, rank], [rank, width]   LoRA on an embedding, scaling in expand
    token_ids, token_rows  [n] int64, [n, width]          trained rows of an embedding or a head
    """

    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    table: torch.Tensor | None = None
    expand: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_trivial(self) -> bool:
        """Whether it leaves every result as it is."""
        parts = self.tensors
        scale, shift = parts.pop("scale", None), parts.pop("shift", None)
        table, expand = parts.pop("table", None), parts.pop("expand", None)
        return (
            not parts
            and (scale is None or bool(((scale - 1).abs() < _SAME_SCALE).all()))
            and (shift is None or bool((shift.abs() < _SAME_SCALE).all()))
            and (table is None or expand is None or not (table.any() and expand.any()))
        )

    def to(self, device: torch.device) -> "ModuleChange":
        """The same change on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return ModuleChange(**moved)


class ChangeBuilder:
    """Computes modules' changes from their tensors, in the dtype of the base model."""

    def __init__(self, dtype: torch.dtype, base_weight: BaseWeight | None) -> None:
        self._dtype = dtype
        self._base_weight = base_weight

    def build(
        self,
        target: LoRATarget,
        tensors: ModuleTensors,
        plan: ModulePlan | None,
        token_ids: tuple[int, ...],
    ) -> ModuleChange | None:
        """The change of one module, None when B @ A is all there is."""
        loaded = {role: tensor.load().float() for role, tensor in tensors.items()}
        for role, values in loaded.items():
            check_values(target.name, role.value, values)
        parts: dict[str, torch.Tensor] = {}
        if TensorRole.TRAINED_TOKENS in loaded:
            parts |= self._trained_tokens(target, loaded[TensorRole.TRAINED_TOKENS], token_ids)
        elif TensorRole.MODULE_WEIGHT in loaded or target.kind is TargetKind.NORM:
            parts |= self._replacement(target, loaded)
        elif target.kind is TargetKind.EMBEDDING and plan is not None:
            parts |= self._embedding(target, loaded, plan)
        elif loaded.keys() - {TensorRole.LORA_A, TensorRole.LORA_B}:
            parts |= self._affine(target, loaded, plan)
        return ModuleChange(**parts) if parts else None

    def _trained_tokens(
        self, target: LoRATarget, rows: torch.Tensor, token_ids: tuple[int, ...]
    ) -> dict[str, torch.Tensor]:
        if len(token_ids) != rows.shape[0]:
            raise InvalidAdapterError(
                f"trainable_token_indices name {len(token_ids)} tokens of {target.name}, but the "
                f"weight file has {rows.shape[0]}"
            )
        ids = torch.tensor(token_ids, dtype=torch.int64)
        return {"token_ids": ids, "token_rows": self._cast(target, rows)}

    def _replacement(
        self, target: LoRATarget, loaded: Mapping[TensorRole, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        parts = {}
        if TensorRole.MODULE_WEIGHT in loaded:
            weight = loaded[TensorRole.MODULE_WEIGHT]
            is_turned = target.kind is TargetKind.CONV1D
            parts["weight"] = self._cast(target, weight.t().contiguous() if is_turned else weight)
        if TensorRole.MODULE_BIAS in loaded:
            parts["bias"] = self._cast(target, loaded[TensorRole.MODULE_BIAS])
        return parts

    def _embedding(
        self, target: LoRATarget, loaded: Mapping[TensorRole, torch.Tensor], plan: ModulePlan
    ) -> dict[str, torch.Tensor]:
        lora_a, lora_b = loaded[TensorRole.EMBEDDING_A], loaded[TensorRole.EMBEDDING_B]
        parts = {
            "table": self._cast(target, lora_a.t().contiguous()),
            "expand": self._cast(target, (lora_b * plan.scaling).t().contiguous()),
        }
        if TensorRole.MAGNITUDE in loaded:
            weight = self._base(target, "weight").t()
            parts["scale"] = _dora_scale(
                weight, lora_a, lora_b * plan.scaling, loaded[TensorRole.MAGNITUDE]
            )
        return parts

    def _affine(
        self,
        target: LoRATarget,
        loaded: Mapping[TensorRole, torch.Tensor],
        plan: ModulePlan | None,
    ) -> dict[str, torch.Tensor]:
        scale = torch.ones(target.out_features)
        shift = torch.zeros(target.out_features)
        if TensorRole.MAGNITUDE in loaded and plan is not None:
            lora_b = loaded[TensorRole.LORA_B] * plan.scaling
            weight = self._base(target, "weight")
            magnitude = loaded[TensorRole.MAGNITUDE]
            scale = _dora_scale(weight, loaded[TensorRole.LORA_A], lora_b, magnitude)
        if TensorRole.LORA_BIAS in loaded and plan is not None:
            shift += loaded[TensorRole.LORA_BIAS] * plan.scaling
        if target.has_bias:
            base = self._base(target, "bias").float().cpu()
            shift += loaded.get(TensorRole.MODULE_BIAS, base) - scale * base
        check_values(target.name, "the scale of DoRA", scale)
        return {"scale": scale, "shift": shift}

    def _base(self, target: LoRATarget, parameter: str) -> torch.Tensor:
        value = None if self._base_weight is None else self._base_weight(target.name, parameter)
        if value is None:
            raise UnsupportedAdapterError(
                f"its change of {target.name} depends on a base {parameter} that is not at hand"
            )
        return value.detach()

    def _cast(self, target: LoRATarget, values: torch.Tensor) -> torch.Tensor:
        cast = values.to(self._dtype)
        check_values(target.name, "a replaced weight", cast)
        return cast


def _dora_scale(
    weight: torch.Tensor, lora_a: torch.Tensor, scaled_b: torch.Tensor, magnitude: torch.Tensor
) -> torch.Tensor:
    """Magnitude over the norm of each row of the changed weight.

        scale[o] = magnitude[o] / || weight[o] + scaled_b[o] @ lora_a ||

    weight     [out, in]     the base model's
    lora_a     [rank, in]    float32
    scaled_b   [out, rank]   float32
    magnitude  [out]         float32
    returns    [out]         float32, on the CPU
    """
    lora_a = lora_a.to(weight.device)
    norms = []
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        changed = torch.addmm(weight[rows].float(), scaled_b[rows].to(weight.device), lora_a)
        norms.append(changed.norm(dim=1))
    return magnitude / torch.cat(norms).cpu()


def check_values(module: str, part: str, values: torch.Tensor) -> None:
    """Raise InvalidAdapterError for infinities, NaNs, and what only damage makes so large."""
    if not values.numel():
        return
    low, high = (float(value) for value in torch.aminmax(values))
    largest = max(-low, high)
    if not math.isfinite(largest):
        raise InvalidAdapterError(
            f"{part} of {module} has values that are not finite in {values.dtype}"
        )
    if largest > _LARGEST:
        raise InvalidAdapterError(
            f"{part} of {module} has values up to {largest:.1e}, more than {_LARGEST:.0f}: damaged"
        )
