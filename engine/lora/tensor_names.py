"""The grammar of tensor names in PEFT's files: which module, and which part of its adapter.

Knows PEFT's present and past key naming. Knows nothing of shapes or of the base model.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

PEFT_PREFIX = "base_model.model."


class TensorRole(StrEnum):
    """What a tensor is to its module. Values say it to people."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    LORA_BIAS = "a bias on lora_B"
    MAGNITUDE = "a DoRA magnitude"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    TRAINED_TOKENS = "trained token embeddings"
    OTHER_LORA = "an unknown LoRA variant"
    MODULE_WEIGHT = "a full weight"
    MODULE_BIAS = "a full bias"


@dataclass(frozen=True, slots=True)
class TensorName:
    """One parsed name. ``adapter`` is the adapter's name inside the key, where a file has it."""

    module: str
    role: TensorRole
    adapter: str = ""


# module . part [. adapter] [. weight]; an adapter's name has no dot.
_LORA_KEY = re.compile(
    r"(?P<module>.+?)\."
    r"(?P<part>lora_[A-Za-z_]+)"
    r"(?:\.(?!(?:weight|bias)$)(?P<adapter>[^.]+))?"
    r"(?:\.(?P<kind>weight|bias))?",
    re.DOTALL,
)
_TOKENS_KEY = re.compile(
    r"(?P<module>.+?)\.(?:token_adapter\.)?trainable_tokens_delta(?:\.[^.]+)?", re.DOTALL
)
_MODULE_KEY = re.compile(
    r"(?P<module>.+?)(?:(?:\.token_adapter)?\.base_layer|\.modules_to_save(?:\.[^.]+)?)?\.(?P<kind>weight|bias)",
    re.DOTALL,
)

_LORA_PARTS = {
    ("lora_A", "weight"): TensorRole.LORA_A,
    ("lora_B", "weight"): TensorRole.LORA_B,
    ("lora_B", "bias"): TensorRole.LORA_BIAS,
    ("lora_magnitude_vector", "weight"): TensorRole.MAGNITUDE,
    ("lora_magnitude_vector", None): TensorRole.MAGNITUDE,
    ("lora_embedding_A", None): TensorRole.EMBEDDING_A,
    ("lora_embedding_B", None): TensorRole.EMBEDDING_B,
}


def parse_tensor_name(key: str) -> TensorName | None:
    """Parse a key of an adapter file, with or without PEFT's prefix; None when it is none."""
    bare = key.removeprefix(PEFT_PREFIX)
    if match := _LORA_KEY.fullmatch(bare):
        role = _LORA_PARTS.get((match["part"], match["kind"]), TensorRole.OTHER_LORA)
        return TensorName(match["module"], role, match["adapter"] or "")
    if match := _TOKENS_KEY.fullmatch(bare):
        return TensorName(match["module"], TensorRole.TRAINED_TOKENS)
    if match := _MODULE_KEY.fullmatch(bare):
        is_weight = match["kind"] == "weight"
        return TensorName(
            match["module"], TensorRole.MODULE_WEIGHT if is_weight else TensorRole.MODULE_BIAS
        )
    return None
