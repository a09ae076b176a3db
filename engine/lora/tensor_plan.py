"""Decides which tensors an adapter must bring for each module, by PEFT's rules.

Knows configurations and modules' kinds. Knows nothing of files or values.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.module_plan import ModulePlan
from engine.lora.peft_config import PeftLoRAConfig
from engine.lora.targets import ModelTargets, TargetKind
from engine.lora.tensor_names import TensorRole

# Where a whole new weight can be put in place of the base model's.
_REPLACEABLE = (
    TargetKind.LINEAR,
    TargetKind.CONV1D,
    TargetKind.LM_HEAD,
    TargetKind.EMBEDDING,
    TargetKind.NORM,
)

TensorPlan = Mapping[str, frozenset[TensorRole]]


def plan_tensors(
    config: PeftLoRAConfig, plan: Mapping[str, ModulePlan], targets: ModelTargets
) -> TensorPlan:
    """The roles that each changed module must have a tensor for."""
    _check_invocation(config, targets)
    roles: dict[str, set[TensorRole]] = defaultdict(set)
    for name in plan:
        roles[name] |= _lora_roles(config, name, targets)
    for name in _saved_modules(config, targets):
        roles[name].add(TensorRole.MODULE_WEIGHT)
        if targets[name].has_bias:
            roles[name].add(TensorRole.MODULE_BIAS)
    trained = trained_token_ids(config, targets)
    for name in trained:
        is_head_changed = name == targets.input_embedding and targets.tied_head in roles
        if name in roles or is_head_changed:
            raise UnsupportedAdapterError(
                f"trainable_token_indices for {name}, which is changed in another way too, "
                "are not served"
            )
        roles[name].add(TensorRole.TRAINED_TOKENS)
    for name in _biased_modules(config, plan, targets):
        roles[name].add(TensorRole.MODULE_BIAS)
    return {name: frozenset(wanted) for name, wanted in roles.items()}


def trained_token_ids(config: PeftLoRAConfig, targets: ModelTargets) -> dict[str, tuple[int, ...]]:
    """The token ids of each module whose rows were trained one by one."""
    found: dict[str, tuple[int, ...]] = {}
    for entry, ids in config.trained_tokens:
        name = _trained_module(entry, targets)
        target = targets[name]
        vocab = target.in_features if target.kind is TargetKind.EMBEDDING else target.out_features
        if ids and max(ids) >= vocab:
            raise InvalidAdapterError(
                f"trainable_token_indices has token {max(ids)}, but {name} has {vocab}"
            )
        if target.has_bias:
            raise UnsupportedAdapterError(
                f"trainable_token_indices for {name}, which has a bias, are not served"
            )
        found[name] = ids
    if targets.tied_head in found:
        raise UnsupportedAdapterError(
            f"trainable_token_indices for {targets.tied_head}, whose weight is that of "
            f"{targets.input_embedding}, are not served; name the embedding alone"
        )
    return found


def _check_invocation(config: PeftLoRAConfig, targets: ModelTargets) -> None:
    """An adapter that waits for a token that no prompt can hold would never do anything."""
    embedding = targets.get(targets.input_embedding or "")
    if embedding is not None and max(config.invocation, default=0) >= embedding.in_features:
        raise InvalidAdapterError(
            f"alora_invocation_tokens has token {max(config.invocation)}, but "
            f"{embedding.name} has {embedding.in_features}"
        )


def _lora_roles(config: PeftLoRAConfig, name: str, targets: ModelTargets) -> set[TensorRole]:
    if targets[name].kind is TargetKind.EMBEDDING:
        for field, is_used in (
            ("lora_bias", config.lora_bias),
            ("alora_invocation_tokens", config.invocation),
        ):
            if is_used:
                raise UnsupportedAdapterError(f"{field} on the embedding {name} is not served")
        roles = {TensorRole.EMBEDDING_A, TensorRole.EMBEDDING_B}
    else:
        roles = {TensorRole.LORA_A, TensorRole.LORA_B}
        if config.lora_bias:
            roles.add(TensorRole.LORA_BIAS)
    if config.use_dora:
        roles.add(TensorRole.MAGNITUDE)
    return roles


def _saved_modules(config: PeftLoRAConfig, targets: ModelTargets) -> Iterator[str]:
    for entry in config.modules_to_save:
        matched = [name for name in targets if _is_under(name, entry)]
        if not matched:
            raise InvalidAdapterError(
                f"modules_to_save entry {entry!a} matches no module of the base model "
                f"{targets.base_model}"
            )
        for name in matched:
            if targets[name].kind not in _REPLACEABLE:
                raise UnsupportedAdapterError(
                    f"modules_to_save entry {entry!a} replaces {name}, "
                    f"{targets[name].kind.value}, which is not served"
                )
            yield name


def _is_under(name: str, entry: str) -> bool:
    """Whether PEFT saves the module, or one that contains it; entries are plain suffixes."""
    segments = name.split(".")
    above = (".".join(segments[:end]) for end in range(1, len(segments) + 1))
    return any(path.endswith(entry) for path in above)


def _trained_module(entry: str | None, targets: ModelTargets) -> str:
    if entry is None:
        matched = [name for name in targets if name == targets.input_embedding]
    else:
        matched = [name for name in targets if name.endswith(entry)]
    kinds = (TargetKind.EMBEDDING, TargetKind.LM_HEAD)
    if len(matched) != 1 or targets[matched[0]].kind not in kinds:
        raise UnsupportedAdapterError(
            f"trainable_token_indices name {entry!a}, which is not one embedding or output head"
        )
    return matched[0]


def _biased_modules(
    config: PeftLoRAConfig, plan: Mapping[str, ModulePlan], targets: ModelTargets
) -> Iterator[str]:
    for name, target in targets.items():
        if config.bias == "none" or not target.has_bias:
            continue
        if config.bias == "all" or (name in plan and target.kind.is_linear):
            if target.kind is TargetKind.OTHER:
                raise UnsupportedAdapterError(
                    f"bias={config.bias!a} replaces that of {name}, {target.kind.value}, which is "
                    "not served"
                )
            yield name
