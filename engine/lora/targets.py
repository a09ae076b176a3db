"""What an adapter may attach to: the base model's modules, as plain facts.

Knows names, widths and kinds. Knows nothing of tensors, files or devices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class TargetKind(StrEnum):
    """How a module is built, as far as LoRA is concerned."""

    LINEAR = "linear"
    CONV1D = "conv1d"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    OTHER = "a module that takes no adapter"

    @property
    def is_linear(self) -> bool:
        """Whether it maps rows [T, in] to [T, out] by a matrix."""
        return self in (TargetKind.LINEAR, TargetKind.CONV1D, TargetKind.LM_HEAD)


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """One module of the base model; ``name`` is its path, as in model.layers.0.self_attn.q_proj."""

    name: str
    in_features: int
    out_features: int
    kind: TargetKind = TargetKind.LINEAR
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ModelTargets(Mapping[str, LoRATarget]):
    """Every module with weights of one base model, by module path.

    ``tied_head`` is the output head whose weight is that of ``input_embedding``, None without one.
    """

    modules: Mapping[str, LoRATarget]
    base_model: str = ""
    architecture: str = ""
    input_embedding: str | None = None
    tied_head: str | None = None

    def __getitem__(self, name: str) -> LoRATarget:
        return self.modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)
