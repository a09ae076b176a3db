"""A Llama of any size with random weights, and adapters on it, for measuring where no model is.

Nothing is downloaded, and the base model's weights are never on disk: the engine is made to take
them from the device where they were made.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.roofline import LlamaShape

TINY = LlamaShape("tiny", 64, 128, 2, 4, 2, 16, 300)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A directory with a configuration and a tokenizer, and how to make the weights."""

    path: Path
    shape: LlamaShape
    dtype: torch.dtype
    device: torch.device

    def build(self, attention: str) -> LlamaForCausalLM:
        """Make the model on its device. Its outputs mean nothing, its time is a real model's."""
        config = LlamaConfig.from_pretrained(self.path)
        with torch.device(self.device):
            model = LlamaForCausalLM._from_config(
                config, dtype=self.dtype, attn_implementation=attention
            )
        return model.requires_grad_(False).eval()

    @contextmanager
    def replacing_checkpoints(self) -> Iterator[None]:
        """Let engines built while the block runs use random weights."""

        def load_model(*args: Any, attention: str, **kwargs: Any) -> LlamaForCausalLM:
            return self.build(attention)

        with mock.patch("engine.models.paged_model.load_model", load_model):
            yield


def make_random_model(
    path: Path, shape: LlamaShape, dtype: torch.dtype, device: torch.device
) -> RandomModel:
    """Write the configuration and a tokenizer of single bytes to `path`."""
    path.mkdir(parents=True)
    LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
    ).save_pretrained(path)
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
    return RandomModel(path, shape, dtype, device)


def write_adapters(
    model: RandomModel, root: Path, num_adapters: int, rank: int, modules: tuple[str, ...]
) -> list[Path]:
    """Write adapters that differ in their scaling and share the bytes of one weight file."""
    shared = root / "shared.safetensors"
    root.mkdir(parents=True)
    save_file(_weights(model.shape, rank, modules), shared)
    paths = []
    for index in range(num_adapters):
        path = root / f"adapter-{index:03d}"
        path.mkdir()
        os.link(shared, path / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.path.name,
            "r": rank,
            "lora_alpha": rank + index,
            "target_modules": sorted(modules),
        }
        (path / "adapter_config.json").write_text(json.dumps(config))
        paths.append(path)
    return paths


def _weights(shape: LlamaShape, rank: int, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    hidden, heads = shape.hidden, shape.num_heads * shape.head_size
    kv = shape.num_kv_heads * shape.head_size
    sizes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, shape.intermediate),
        "mlp.up_proj": (hidden, shape.intermediate),
        "mlp.down_proj": (shape.intermediate, hidden),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (inputs, outputs) in sizes.items():
            if name.rpartition(".")[2] in modules:
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                lora_a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                lora_b = torch.randn(outputs, rank, generator=generator) * 0.01
                tensors[f"{prefix}.lora_A.weight"] = lora_a.bfloat16()
                tensors[f"{prefix}.lora_B.weight"] = lora_b.bfloat16()
    return tensors
