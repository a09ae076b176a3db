"""Pairs the tensors of an adapter file with the modules that its configuration targets.

Every tensor must have a use and every targeted module its tensors. Knows names and shapes; reads
values only to compare copies of base weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.module_plan import ModulePlan
from engine.lora.targets import LoRATarget, ModelTargets
from engine.lora.tensor_names import TensorName, TensorRole, parse_tensor_name
from engine.lora.weight_files import StoredTensor

_Pairs = dict[tuple[str, TensorRole], tuple[str, StoredTensor]]


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The two tensors of one module: lora_a [rank, in], lora_b [out, rank]."""

    lora_a: StoredTensor
    lora_b: StoredTensor


def match_tensors(
    stored: Mapping[str, StoredTensor],
    plan: Mapping[str, ModulePlan],
    targets: ModelTargets,
    base_weight: Callable[[str], torch.Tensor | None] | None,
) -> dict[str, ModuleTensors]:
    """Give each planned module its tensors, in the plan's order, or say what does not fit."""
    if not stored:
        raise InvalidAdapterError("its weight file holds no tensors")
    pairs = _use_each(stored, plan, targets, base_weight)
    matched: dict[str, ModuleTensors] = {}
    for name, module in plan.items():
        a = pairs.get((name, TensorRole.LORA_A))
        b = pairs.get((name, TensorRole.LORA_B))
        if a is None and b is None:
            raise InvalidAdapterError(
                f"its configuration targets {name}, but the weight file has no tensors for it"
            )
        if a is None or b is None:
            present, absent = ("lora_A", "lora_B") if b is None else ("lora_B", "lora_A")
            raise InvalidAdapterError(f"{name} has a {present} without its {absent}")
        _check_shapes(targets[name], module.rank, a, b)
        matched[name] = ModuleTensors(a[1], b[1])
    return matched


def _use_each(
    stored: Mapping[str, StoredTensor],
    plan: Mapping[str, ModulePlan],
    targets: ModelTargets,
    base_weight: Callable[[str], torch.Tensor | None] | None,
) -> _Pairs:
    pairs: _Pairs = {}
    adapters: dict[str, str] = {}
    for key, tensor in stored.items():
        name = parse_tensor_name(key)
        if name is None:
            raise InvalidAdapterError(f"tensor {_shown(key)} is not part of a LoRA adapter")
        if name.role is TensorRole.MODULE_WEIGHT and base_weight is not None:
            _check_base_copy(key, tensor, base_weight(name.module))
            continue
        _check_use(key, name, plan, targets)
        adapters.setdefault(name.adapter, key)
        if len(adapters) > 1:
            several = ", ".join(map(_shown, adapters.values()))
            raise InvalidAdapterError(f"holds tensors of several adapters: {several}")
        if (name.module, name.role) in pairs:
            other = pairs[name.module, name.role][0]
            raise InvalidAdapterError(f"tensors {_shown(key)} and {_shown(other)} are the same")
        pairs[name.module, name.role] = (key, tensor)
    return pairs


def _check_use(
    key: str, name: TensorName, plan: Mapping[str, ModulePlan], targets: ModelTargets
) -> None:
    if name.role not in (TensorRole.LORA_A, TensorRole.LORA_B):
        raise UnsupportedAdapterError(
            f"tensor {_shown(key)} is {name.role.value}, which is not served"
        )
    if name.module not in targets:
        raise InvalidAdapterError(
            f"tensor {_shown(key)} belongs to module {_shown(name.module)}, which the base model "
            f"{targets.base_model} does not have; its modules are named like "
            f"{_shown(_closest(name.module, targets))}"
        )
    if name.module not in plan:
        raise InvalidAdapterError(
            f"tensor {_shown(key)} belongs to a module that the configuration does not target"
        )


def _check_base_copy(key: str, copy: StoredTensor, base: torch.Tensor | None) -> None:
    """PEFT may save base weights beside an adapter; they are served when they change nothing."""
    if base is None:
        raise UnsupportedAdapterError(
            f"tensor {_shown(key)} is a full weight of a module that the base model does not have"
        )
    if tuple(base.shape) != copy.shape:
        raise UnsupportedAdapterError(
            f"tensor {_shown(key)} replaces a base weight of shape {tuple(base.shape)} by one of "
            f"shape {copy.shape}; resized vocabularies are not served"
        )
    ours, theirs = base.detach().cpu(), copy.load()
    # Copies made in another precision are equal after rounding to the coarser one.
    same = torch.equal(ours.to(theirs.dtype), theirs) or torch.equal(theirs.to(ours.dtype), ours)
    if not same:
        raise UnsupportedAdapterError(
            f"tensor {_shown(key)} replaces a base weight by other values, which is not served"
        )


def _check_shapes(
    target: LoRATarget, rank: int, a: tuple[str, StoredTensor], b: tuple[str, StoredTensor]
) -> None:
    for (key, tensor), expected, what in (
        (a, (rank, target.in_features), "rank and input width"),
        (b, (target.out_features, rank), "output width and rank"),
    ):
        if tensor.shape != expected:
            raise InvalidAdapterError(
                f"tensor {_shown(key)} has shape {_shown(tensor.shape)}, but configuration and "
                f"base model say {expected} ({what})"
            )


def _closest(module: str, targets: ModelTargets) -> str:
    last = module.rpartition(".")[2]
    return next((name for name in targets if name.endswith(last)), next(iter(targets), ""))


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 160 else text[:157] + "..."
