"""Loads one adapter into host memory, checked against the base model to the last tensor.

Knows how configuration, tensors and modules must fit together. Knows nothing of devices, slots or
other adapters.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from adapters import AdapterFiles, LoRARequest, find_adapter_files, read_adapter
from engine.config import LoRAConfig
from engine.errors import AdapterError, InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter_tensors import ModuleTensors, match_tensors
from engine.lora.module_plan import ModulePlan, plan_modules, unmatched_targets
from engine.lora.peft_config import MAX_CONFIG_BYTES, PeftLoRAConfig, read_peft_config
from engine.lora.targets import ModelTargets, TargetKind
from engine.lora.weight_files import read_weight_files

# Returns a base module's weight, None for a module that the base model does not have.
BaseWeight = Callable[[str], torch.Tensor | None]

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
    """An adapter's weights in host memory: views into one contiguous ``buffer``."""

    info: AdapterInfo
    buffer: torch.Tensor
    modules: Mapping[str, LoRAModule]

    @property
    def digest(self) -> str:
        return self.info.digest

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return self.info.rank

    @property
    def size_bytes(self) -> int:
        return self.info.size_bytes


def load_adapter(
    request: LoRARequest,
    targets: ModelTargets,
    limits: LoRAConfig,
    dtype: torch.dtype,
    *,
    base_weight: BaseWeight | None = None,
) -> LoRAAdapter:
    """Read and check the adapter in ``request.lora_path``.

    PEFT saves a copy of lm_head beside an adapter on it; ``base_weight`` lets that copy be
    compared with the base model's own. Raises AdapterError, whatever the files hold.
    """
    try:
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
    plan = plan_modules(config, targets)
    _check_ranks(plan, limits)
    _check_size(files, targets, limits)

    content = read_adapter(files)
    if content.config != raw_config:
        raise InvalidAdapterError(f"{files.config} changed while the adapter was read")
    if request.digest is not None and request.digest != content.digest:
        raise InvalidAdapterError(
            f"its files have digest {content.digest}, not {request.digest} as registered: they "
            "changed"
        )
    stored = read_weight_files(content.weights, allow_pickle=limits.allow_pickle)
    tensors = match_tensors(stored, plan, targets, base_weight)
    buffer, modules = _copy_weights(tensors, plan, dtype)
    info = AdapterInfo(
        digest=content.digest,
        lora_name=request.lora_name,
        rank=max(module.rank for module in modules.values()),
        size_bytes=buffer.nbytes,
        target_modules=tuple(dict.fromkeys(name.rpartition(".")[2] for name in modules)),
        num_modules=len(modules),
        num_tensors=len(stored),
        features=config.features,
        notes=tuple(_notes(config, targets, modules)),
    )
    return LoRAAdapter(info=info, buffer=buffer, modules=modules)


def _read_config(files: AdapterFiles) -> bytes:
    """Read the configuration ahead of the rest: it decides whether the rest is worth reading."""
    with (files.root / files.config).open("rb") as file:
        return file.read(MAX_CONFIG_BYTES + 1)


def _check_ranks(plan: Mapping[str, ModulePlan], limits: LoRAConfig) -> None:
    name, largest = max(plan.items(), key=lambda item: item[1].rank)
    if largest.rank > limits.max_lora_rank:
        raise UnsupportedAdapterError(
            f"rank {largest.rank} (in {name}) is over the limit max_lora_rank="
            f"{limits.max_lora_rank}; start the engine with a larger max_lora_rank to serve it"
        )


def _check_size(files: AdapterFiles, targets: ModelTargets, limits: LoRAConfig) -> None:
    """Bound what is read into memory by the largest adapter that could be served."""
    itemsize = torch.float32.itemsize
    limit = _EXTRA_BYTES
    for target in targets.values():
        limit += itemsize * limits.max_lora_rank * (target.in_features + target.out_features)
        if target.kind in (TargetKind.EMBEDDING, TargetKind.LM_HEAD):
            limit += 2 * itemsize * target.in_features * target.out_features
    if files.size_bytes > limit:
        raise InvalidAdapterError(
            f"its files take {files.size_bytes} bytes; an adapter for {targets.base_model} with "
            f"max_lora_rank={limits.max_lora_rank} takes at most {limit}"
        )


def _copy_weights(
    tensors: Mapping[str, ModuleTensors], plan: Mapping[str, ModulePlan], dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, LoRAModule]]:
    shapes = {name: (*pair.lora_a.shape, pair.lora_b.shape[0]) for name, pair in tensors.items()}
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
        lora_a.copy_(tensors[name].lora_a.load())
        # In float32 before the cast, as PEFT scales in at least the weights' precision.
        lora_b.copy_((tensors[name].lora_b.load().float() * plan[name].scaling).t())
        _check_finite(name, "lora_A", lora_a)
        _check_finite(name, "lora_B", lora_b)
        modules[name] = LoRAModule(lora_a, lora_b)
    return buffer, modules


def _check_finite(module: str, part: str, values: torch.Tensor) -> None:
    if not torch.isfinite(values).all():
        raise InvalidAdapterError(
            f"{part} of {module} has values that are not finite in {values.dtype}"
        )


def _notes(
    config: PeftLoRAConfig, targets: ModelTargets, modules: Mapping[str, LoRAModule]
) -> Iterator[str]:
    if not any(module.lora_b.any() for module in modules.values()):
        yield "every lora_B is zero, so the adapter answers exactly as the base model"
    for entry in unmatched_targets(config, targets):
        yield f"target_modules entry {entry!a} matches no module of the base model"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
