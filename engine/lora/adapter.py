"""Loads one adapter into host memory, checked against the base model to the last tensor.

Knows how configuration, tensors and modules must fit together. Knows nothing of devices, slots or
other adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from adapters import AdapterFiles, LoRARequest, find_adapter_files, read_adapter
from engine.config import LoRAConfig
from engine.errors import AdapterError, InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter_tensors import BaseWeight, ModuleTensors, match_tensors
from engine.lora.adapter_tokenizer import BaseTokenizer
from engine.lora.module_change import ChangeBuilder, ModuleChange, check_values
from engine.lora.module_plan import ModulePlan, plan_modules, unmatched_targets
from engine.lora.module_spelling import ModuleSpelling, find_spelling
from engine.lora.peft_config import MAX_CONFIG_BYTES, PeftLoRAConfig, read_peft_config
from engine.lora.targets import ModelTargets, TargetKind
from engine.lora.tensor_names import TensorRole
from engine.lora.tensor_plan import TensorPlan, plan_tensors, trained_token_ids
from engine.lora.weight_files import read_weight_files, stored_keys

# Headers, tokenizer and chat template files beside the weights.
_EXTRA_BYTES = 256 << 20

# Tensors start at multiples of this many elements, so that rows are aligned for vector loads.
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """What is worth telling people about a loaded adapter.

    ``target_modules`` are the last parts of the modules' names, each once. ``features`` are the
    configuration's fields beyond plain LoRA, ``notes`` what an owner may want to look at.
    """

    digest: str
    lora_name: str
    rank: int
    size_bytes: int
    target_modules: tuple[str, ...]
    num_modules: int
    num_tensors: int
    features: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """One module's weights, the scaling folded into lora_b.

    lora_a  [rank, in]
    lora_b  [rank, out]   rank-major: one rank's row streams
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class LoRAAdapter:
    """An adapter's weights, in host memory unless an uploader gave it.

    ``modules`` are views into one contiguous ``buffer``; ``changes`` is what it changes otherwise.
    An adapter with an ``invocation`` is applied from the last place on where these tokens occur.
    """

    info: AdapterInfo
    buffer: torch.Tensor
    modules: Mapping[str, LoRAModule]
    changes: Mapping[str, ModuleChange] = field(default_factory=dict)
    invocation: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return self.info.digest

    @property
    def rank(self) -> int:
        """The largest rank of any linear: what the kernels have to compute."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def size_bytes(self) -> int:
        return self.info.size_bytes

    def with_buffer(self, buffer: torch.Tensor) -> "LoRAAdapter":
        """The same over a copy of the buffer, which may be on another device."""
        modules = {
            name: LoRAModule(_in_buffer(buffer, module.lora_a), _in_buffer(buffer, module.lora_b))
            for name, module in self.modules.items()
        }
        return replace(self, buffer=buffer, modules=modules)


def load_adapter(
    request: LoRARequest,
    targets: ModelTargets,
    limits: LoRAConfig,
    dtype: torch.dtype,
    *,
    base_weight: BaseWeight | None = None,
    tokenizer: BaseTokenizer | None = None,
) -> LoRAAdapter:
    """Read and check the adapter in ``request.lora_path``.

    PEFT saves a copy of lm_head beside an adapter on it; ``base_weight`` lets that copy be
    compared with the base model's own, and DoRA's scale be computed. Raises AdapterError, whatever
    the files hold. Without ``tokenizer``, it is the caller who knows what token ids mean.
    """
    try:
        if tokenizer is not None:
            tokenizer.check(Path(request.lora_path))
        return _load(request, targets, limits, dtype, base_weight)
    except OSError as error:
        reason = error.strerror or str(error)
        where = f" {error.filename}" if error.filename else ""
        raise InvalidAdapterError(
            f"adapter {request.lora_name!r} cannot be read: {reason}{where}"
        ) from error
    except AdapterError as error:
        raise type(error)(f"adapter {request.lora_name!r}: {error}") from error


def _load(
    request: LoRARequest,
    targets: ModelTargets,
    limits: LoRAConfig,
    dtype: torch.dtype,
    base_weight: BaseWeight | None,
) -> LoRAAdapter:
    files = find_adapter_files(Path(request.lora_path))
    raw_config = _read_config(files)
    config = read_peft_config(raw_config)
    _check_base_model(config, limits)
    spelling = _find_spelling(files, targets)
    targets = spelling.spell_targets(targets)
    base_weight = _spelled(base_weight, spelling)
    plan = plan_modules(config, targets)
    wanted = plan_tensors(config, plan, targets)
    _check_ranks(plan, limits)
    _check_size(files, wanted, targets, limits)

    content = read_adapter(files)
    if content.config != raw_config:
        raise InvalidAdapterError(f"{files.config} changed while the adapter was read")
    if request.digest is not None and request.digest != content.digest:
        raise InvalidAdapterError(
            f"its files have digest {content.digest}, not {request.digest} as registered: they "
            "changed"
        )
    stored = read_weight_files(content.weights, allow_pickle=limits.allow_pickle)
    tensors = match_tensors(stored, wanted, plan, targets, base_weight)
    buffer, modules = _copy_weights(tensors, plan, dtype)
    changes = _changes(tensors, plan, targets, config, ChangeBuilder(dtype, base_weight))
    if not any(m.lora_a.any() and m.lora_b.any() for m in modules.values()) and all(
        change.is_trivial for change in changes.values()
    ):
        raise InvalidAdapterError(
            "every lora_A or lora_B is zero: the adapter would change nothing"
        )
    info = AdapterInfo(
        digest=content.digest,
        lora_name=request.lora_name,
        rank=max(module.rank for module in plan.values()),
        size_bytes=buffer.nbytes + sum(change.size_bytes for change in changes.values()),
        target_modules=tuple(dict.fromkeys(name.rpartition(".")[2] for name in plan)),
        num_modules=len(plan),
        num_tensors=len(stored),
        features=config.features,
        notes=tuple(
            f"target_modules entry {entry!a} matches no module of the base model"
            for entry in unmatched_targets(config, targets)
        ),
    )
    return LoRAAdapter(
        info=info,
        buffer=buffer,
        modules={spelling.original(name): module for name, module in modules.items()},
        changes={spelling.original(name): change for name, change in changes.items()},
        invocation=config.invocation,
    )


def _read_config(files: AdapterFiles) -> bytes:
    """Read the configuration ahead of the rest: it decides whether the rest is worth reading."""
    with (files.root / files.config).open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def _find_spelling(files: AdapterFiles, targets: ModelTargets) -> ModuleSpelling:
    """What some of the tensors are called decides it for the configuration too."""
    weights = next((path for path in files.weights if path.suffix == ".safetensors"), None)
    return find_spelling(() if weights is None else stored_keys(files.root / weights), targets)


def _spelled(base_weight: BaseWeight | None, spelling: ModuleSpelling) -> BaseWeight | None:
    if base_weight is None:
        return None
    return lambda name, parameter: base_weight(spelling.original(name), parameter)


def _check_base_model(config: PeftLoRAConfig, limits: LoRAConfig) -> None:
    accepted = limits.base_model_names
    if accepted and config.base_model not in accepted:
        raise UnsupportedAdapterError(
            f"adapter_config.json: base_model_name_or_path is {config.base_model!a}; accepted are "
            f"{', '.join(map(ascii, accepted))} (base_model_names)"
        )


def _check_ranks(plan: Mapping[str, ModulePlan], limits: LoRAConfig) -> None:
    name, largest = max(plan.items(), key=lambda item: item[1].rank)
    if largest.rank > limits.max_lora_rank:
        raise UnsupportedAdapterError(
            f"rank {largest.rank} (in {name}) is over the limit max_lora_rank="
            f"{limits.max_lora_rank}; start the engine with a larger max_lora_rank to serve it"
        )


def _check_size(
    files: AdapterFiles, wanted: TensorPlan, targets: ModelTargets, limits: LoRAConfig
) -> None:
    """Bound what is read into memory by the largest adapter that could be served."""
    itemsize = torch.float32.itemsize
    limit = _EXTRA_BYTES
    full = {name for name, roles in wanted.items() if TensorRole.MODULE_WEIGHT in roles}
    for target in targets.values():
        widths = target.in_features + target.out_features
        limit += itemsize * (limits.max_lora_rank + 4) * widths
        if target.name in full or target.kind in (TargetKind.EMBEDDING, TargetKind.LM_HEAD):
            limit += 2 * itemsize * target.in_features * target.out_features
    if files.size_bytes > limit:
        raise InvalidAdapterError(
            f"its files take {files.size_bytes} bytes; an adapter for {targets.base_model} with "
            f"max_lora_rank={limits.max_lora_rank} takes at most {limit}"
        )


def _copy_weights(
    tensors: Mapping[str, ModuleTensors], plan: Mapping[str, ModulePlan], dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, LoRAModule]]:
    pairs = {
        name: (parts[TensorRole.LORA_A], parts[TensorRole.LORA_B])
        for name, parts in tensors.items()
        if TensorRole.LORA_A in parts
    }
    shapes = {name: (*a.shape, b.shape[0]) for name, (a, b) in pairs.items()}
    buffer, modules = allocate_modules(shapes, dtype)
    for name, module in modules.items():
        stored_a, stored_b = pairs[name]
        module.lora_a.copy_(stored_a.load())
        # In float32 before the cast, as PEFT scales in at least the weights' precision.
        module.lora_b.copy_((stored_b.load().float() * plan[name].scaling).t())
        check_values(name, "lora_A", module.lora_a)
        check_values(name, "lora_B", module.lora_b)
    return buffer, modules


def allocate_modules(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, LoRAModule]]:
    """Return one buffer and in it the modules of these shapes: rank, in, out."""
    size = sum(
        _aligned(rank * in_features) + _aligned(rank * out_features)
        for rank, in_features, out_features in shapes.values()
    )
    buffer = torch.zeros(size, dtype=dtype)
    modules: dict[str, LoRAModule] = {}
    offset = 0
    for name, (rank, in_features, out_features) in shapes.items():
        lora_a = buffer[offset : offset + rank * in_features].view(rank, in_features)
        offset += _aligned(lora_a.numel())
        lora_b = buffer[offset : offset + rank * out_features].view(rank, out_features)
        offset += _aligned(lora_b.numel())
        modules[name] = LoRAModule(lora_a, lora_b)
    return buffer, modules


def _changes(
    tensors: Mapping[str, ModuleTensors],
    plan: Mapping[str, ModulePlan],
    targets: ModelTargets,
    config: PeftLoRAConfig,
    builder: ChangeBuilder,
) -> dict[str, ModuleChange]:
    trained = trained_token_ids(config, targets)
    changes: dict[str, ModuleChange] = {}
    for name, parts in tensors.items():
        change = builder.build(targets[name], parts, plan.get(name), trained.get(name, ()))
        if change is not None:
            changes[name] = change
    if targets.input_embedding in trained and targets.tied_head is not None:
        # One weight: a trained row of the embedding is one of the head as well.
        changes[targets.tied_head] = changes[targets.input_embedding]
    return changes


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _in_buffer(buffer: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return what a view of one buffer is in a copy of it."""
    start = part.storage_offset()
    return buffer[start : start + part.numel()].view(part.shape)
