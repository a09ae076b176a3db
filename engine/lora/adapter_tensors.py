"""Pairs the tensors of an adapter file with the modules that its configuration changes.

Every tensor must have a use and every changed module its tensors. Knows names and shapes; reads
values only to compare copies of base weights.
"""

from collections.abc import Callable, Collection, Mapping

import torch

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.module_plan import ModulePlan
from engine.lora.targets import LoRATarget, ModelTargets, TargetKind
from engine.lora.tensor_names import PEFT_PREFIX, TensorName, TensorRole, parse_tensor_name
from engine.lora.tensor_plan import TensorPlan
from engine.lora.weight_files import StoredTensor

# Returns a base module's "weight" or "bias", None for what the base model does not have.
# A linear's weight is [out, in], however the model keeps it.
BaseWeight = Callable[[str, str], torch.Tensor | None]

ModuleTensors = Mapping[TensorRole, StoredTensor]

_PARAMETERS = {TensorRole.MODULE_WEIGHT: "weight", TensorRole.MODULE_BIAS: "bias"}

_Found = dict[tuple[str, TensorRole], tuple[str, StoredTensor]]


def match_tensors(
    stored: Mapping[str, StoredTensor],
    wanted: TensorPlan,
    plan: Mapping[str, ModulePlan],
    targets: ModelTargets,
    base_weight: BaseWeight | None,
) -> dict[str, ModuleTensors]:
    """Give each changed module its tensors, or say what does not fit."""
    if not stored:
        raise InvalidAdapterError("its weight file holds no tensors")
    found = _use_each(stored, wanted, targets, base_weight)
    matched: dict[str, ModuleTensors] = {}
    for name, roles in wanted.items():
        parts = {role: found[name, role] for role in sorted(roles) if (name, role) in found}
        _check_complete(name, roles, parts.keys())
        for role, (key, tensor) in parts.items():
            rank = plan[name].rank if name in plan else 0
            _check_shape(key, tensor, role, targets[name], rank)
        matched[name] = {role: tensor for role, (_, tensor) in parts.items()}
    return matched


def _use_each(
    stored: Mapping[str, StoredTensor],
    wanted: TensorPlan,
    targets: ModelTargets,
    base_weight: BaseWeight | None,
) -> _Found:
    found: _Found = {}
    adapters: dict[str, str] = {}
    spellings: dict[bool, str] = {}
    for key, tensor in stored.items():
        name = parse_tensor_name(key)
        if name is None:
            raise InvalidAdapterError(f"tensor {_shown(key)} is not part of a LoRA adapter")
        is_wanted = name.role in wanted.get(name.module, ())
        parameter = _PARAMETERS.get(name.role)
        if parameter is not None and not is_wanted and base_weight is not None:
            base = base_weight(name.module, parameter)
            _check_base_copy(key, tensor, base, targets.get(name.module))
            continue
        if not is_wanted:
            raise _useless(key, name, targets)
        adapters.setdefault(name.adapter, key)
        if len(adapters) > 1:
            several = ", ".join(map(_shown, adapters.values()))
            raise InvalidAdapterError(f"holds tensors of several adapters: {several}")
        if (name.module, name.role) in found:
            other = found[name.module, name.role][0]
            raise InvalidAdapterError(f"tensors {_shown(key)} and {_shown(other)} are the same")
        found[name.module, name.role] = (key, tensor)
        spellings.setdefault(key.startswith(PEFT_PREFIX), key)
    if len(spellings) > 1:
        # PEFT takes no notice of those without it; a file of them alone is what other tools write.
        raise InvalidAdapterError(
            f"tensor {_shown(spellings[False])} lacks the prefix {PEFT_PREFIX!a} that others have"
        )
    return found


def _useless(key: str, name: TensorName, targets: ModelTargets) -> Exception:
    if name.role is TensorRole.OTHER_LORA or name.role in _PARAMETERS:
        return UnsupportedAdapterError(
            f"tensor {_shown(key)} is {name.role.value}, which is not served"
        )
    if name.module not in targets:
        return InvalidAdapterError(
            f"tensor {_shown(key)} belongs to module {_shown(name.module)}, which the base model "
            f"{targets.base_model} does not have; its modules are named like "
            f"{_shown(_closest(name.module, targets))}"
        )
    return InvalidAdapterError(
        f"tensor {_shown(key)} is {name.role.value} of a module that the configuration does not "
        "target that way"
    )


def _check_base_copy(
    key: str, copy: StoredTensor, base: torch.Tensor | None, target: LoRATarget | None
) -> None:
    """PEFT may save base weights beside an adapter; they are served when they change nothing."""
    if base is None:
        raise UnsupportedAdapterError(
            f"tensor {_shown(key)} is a full weight of a module that the base model does not have"
        )
    if target is not None and target.kind is TargetKind.CONV1D:
        base = base.t()
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
            f"tensor {_shown(key)} replaces a base weight by other values, which the "
            "configuration does not say"
        )


def _check_complete(
    name: str, roles: frozenset[TensorRole], present: Collection[TensorRole]
) -> None:
    missing = sorted(roles - set(present))
    if not missing:
        return
    if not present:
        raise InvalidAdapterError(
            f"its configuration targets {name}, but the weight file has no tensors for it"
        )
    there, absent = (role.removeprefix("a ") for role in (sorted(present)[0], missing[0]))
    raise InvalidAdapterError(f"{name} has a {there} without its {absent}")


def _check_shape(
    key: str, tensor: StoredTensor, role: TensorRole, target: LoRATarget, rank: int
) -> None:
    expected, what = _expected_shape(role, target, rank)
    if role is TensorRole.TRAINED_TOKENS:
        expected = (tensor.shape[0] if tensor.shape else 0, *expected)
    if tensor.shape == expected:
        return
    if role is TensorRole.MODULE_WEIGHT and tensor.shape[1:] == expected[1:]:
        raise UnsupportedAdapterError(
            f"tensor {_shown(key)} replaces a base weight of shape {expected} by one of shape "
            f"{_shown(tensor.shape)}; resized vocabularies are not served"
        )
    raise InvalidAdapterError(
        f"tensor {_shown(key)} has shape {_shown(tensor.shape)}, but configuration and "
        f"base model say {expected} ({what})"
    )


def _expected_shape(role: TensorRole, target: LoRATarget, rank: int) -> tuple[tuple[int, ...], str]:
    inputs, outputs = target.in_features, target.out_features
    is_rows = target.kind in (TargetKind.EMBEDDING, TargetKind.CONV1D)
    weight: tuple[int, ...] = (inputs, outputs) if is_rows else (outputs, inputs)
    if target.kind is TargetKind.NORM:
        weight = (outputs,)
    shapes: dict[TensorRole, tuple[tuple[int, ...], str]] = {
        TensorRole.LORA_A: ((rank, inputs), "rank and input width"),
        TensorRole.LORA_B: ((outputs, rank), "output width and rank"),
        TensorRole.EMBEDDING_A: ((rank, inputs), "rank and vocabulary"),
        TensorRole.EMBEDDING_B: ((outputs, rank), "width and rank"),
        TensorRole.MODULE_WEIGHT: (weight, "the base weight's"),
        TensorRole.TRAINED_TOKENS: (
            (outputs if target.kind is TargetKind.EMBEDDING else inputs,),
            "tokens and width",
        ),
    }
    return shapes.get(role, ((outputs,), "output width"))


def _closest(module: str, targets: ModelTargets) -> str:
    last = module.rpartition(".")[2]
    return next((name for name in targets if name.endswith(last)), next(iter(targets), ""))


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 160 else text[:157] + "..."
