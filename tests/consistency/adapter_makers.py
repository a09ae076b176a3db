"""Adapters whose version shows in every token.

For the small engine the weights are the version's name. For the real engine each is a LoRA on the
last layer that allows two tokens only, which no other version uses.
"""

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import save_tiny_model

# Two tokens a version, after the special ones.
_FIRST_TOKEN = 4
_VOCAB_SIZE = 16_384
_HIDDEN_SIZE = 48
_FORCE = 1e4


class AdapterMaker(Protocol):
    """Writes versions and recognises them."""

    def write(self, index: int) -> Path:
        """Write the version with this number; its content is ``content_of(index)``."""

    def contents(self, text: str) -> tuple[str, ...]:
        """The versions that a generated text shows."""


def content_of(index: int) -> str:
    """What a version is called in histories."""
    return f"v{index}"


class NamedAdapters:
    """For ``VersionedEngine``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, index: int) -> Path:
        path = self._root / content_of(index)
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(content_of(index))
        return path

    def contents(self, text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text.split()))


class ForcingAdapters:
    """For the real engine with the model of ``save_forced_model``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, index: int) -> Path:
        path = self._root / content_of(index)
        path.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["lm_head"]}
        (path / "adapter_config.json").write_text(json.dumps(config))
        lora_a = torch.randn(1, _HIDDEN_SIZE, generator=torch.Generator().manual_seed(index))
        # Whatever the sign of the product with lora_a, one of the two wins.
        lora_b = torch.zeros(_VOCAB_SIZE, 1)
        first = _FIRST_TOKEN + 2 * index
        lora_b[first], lora_b[first + 1] = _FORCE, -_FORCE
        prefix = "base_model.model.lm_head"
        save_file(
            {f"{prefix}.lora_A.weight": lora_a, f"{prefix}.lora_B.weight": lora_b},
            path / "adapter_model.safetensors",
        )
        return path

    def contents(self, text: str) -> tuple[str, ...]:
        tokens = [int(token.removeprefix("t")) for token in text.split()]
        return tuple(dict.fromkeys(content_of((token - _FIRST_TOKEN) // 2) for token in tokens))


def save_forced_model(path: Path) -> None:
    """Write a tiny random model whose tokens are spelled t0, t1, and so on."""
    save_tiny_model(
        path, "llama", dtype=torch.float32, vocab_size=_VOCAB_SIZE, hidden_size=_HIDDEN_SIZE
    )
    tokenizer = Tokenizer(
        models.WordLevel({f"t{index}": index for index in range(_VOCAB_SIZE)}, unk_token="t0")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t3"
    ).save_pretrained(path)
