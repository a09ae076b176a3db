"""Adapters in slots against plain models with the same adapters merged into their weights."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from adapters import LoRARequest
from engine.config import LoRAConfig
from engine.lora.adapter import load_adapter
from engine.models.paged_model import PagedModel
from tests.engine.models.paged_sequences import (
    Sequences,
    load_paged,
    load_plain,
    plain_logits,
    run_in_chunks,
)
from tests.tiny_models import MakeModel

LIMITS = LoRAConfig(max_loras=3, max_cpu_loras=3, max_lora_rank=8)
PROMPT_LENS = (9, 4, 11, 1)
NUM_DECODES = 4
LLAMA_ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


class TinyAdapter:
    """A random adapter on every module whose last name is one of `targets`."""

    def __init__(self, model: PagedModel, targets: Sequence[str], rank: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rank, self.alpha = rank, 2 * rank
        self.targets = list(targets)
        self.factors = {}
        for name, target in model.targets.items():
            if name.rpartition(".")[2] in targets:
                a = torch.randn(rank, target.in_features, generator=generator)
                b = torch.randn(target.out_features, rank, generator=generator)
                self.factors[name] = (a * 0.2, b * 0.2)

    def save(self, path: Path) -> LoRARequest:
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": self.targets,
        }
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for name, (a, b) in self.factors.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        save_file(tensors, path / "adapter_model.safetensors")
        return LoRARequest(lora_name=path.name, lora_path=str(path))

    def merge_into(self, plain: torch.nn.Module) -> None:
        for name, (a, b) in self.factors.items():
            module = plain.get_submodule(name)
            delta = self.alpha / self.rank * b @ a
            weight = module.get_parameter("weight")
            # A copy of its own: merging into a head must not reach the embedding tied to it.
            merged = weight.detach() + (delta.T if isinstance(module, Conv1D) else delta)
            module.weight = torch.nn.Parameter(merged)


def put(model: PagedModel, slot: int, adapter: TinyAdapter, path: Path) -> None:
    request = adapter.save(path / f"slot{slot}")
    loaded = load_adapter(request, model.targets, LIMITS, model.spec.dtype)
    model.write_slot(slot, loaded)


@pytest.mark.parametrize(
    ("model_type", "fuse", "targets"),
    [
        ("llama", True, [LLAMA_ALL, "q_proj v_proj"]),
        ("llama", True, ["k_proj", "up_proj down_proj"]),
        ("llama", False, [LLAMA_ALL, "v_proj gate_proj"]),
        ("qwen3", True, ["q_proj o_proj", "k_proj v_proj"]),
        ("llama", True, [f"{LLAMA_ALL} lm_head", "lm_head"]),
        ("phi3", True, ["qkv_proj gate_up_proj", "o_proj down_proj"]),
        ("gemma2", True, [LLAMA_ALL, "gate_proj"]),
        ("gpt2", True, ["c_attn c_fc c_proj", "c_proj"]),
    ],
)
def test_mixed_batch_equals_models_with_merged_weights(
    make_model: MakeModel, tmp_path: Path, model_type: str, targets: list[str], *, fuse: bool
) -> None:
    path = make_model(model_type)
    model = load_paged(path, fuse=fuse, lora=LIMITS)
    adapters = [
        TinyAdapter(model, names.split(), rank=rank, seed=rank)
        for names, rank in zip(targets, (8, 3), strict=True)
    ]
    slots = {1: 2, 2: 0, 3: 2}
    put(model, 2, adapters[0], tmp_path)
    put(model, 0, adapters[1], tmp_path)
    sequences = Sequences([n + NUM_DECODES for n in PROMPT_LENS], model.spec.vocab_size)
    got = run_in_chunks(model, sequences, PROMPT_LENS, 3, slots)

    merged = {slot: load_plain(path) for slot in (None, 2, 0)}
    adapters[0].merge_into(merged[2])
    adapters[1].merge_into(merged[0])
    for i, logits in enumerate(got):
        expected = plain_logits(merged[slots.get(i)], sequences.tokens[i])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_head_uses_the_slots_of_the_chosen_rows(make_model: MakeModel, tmp_path: Path) -> None:
    path = make_model("llama", tie_word_embeddings=True)
    model = load_paged(path, lora=LIMITS)
    adapter = TinyAdapter(model, ["lm_head"], rank=4, seed=1)
    put(model, 1, adapter, tmp_path)
    sequences = Sequences([5, 3], model.spec.vocab_size)
    got = sequences.step(model, {0: 5, 1: 3}, {1: 1}, last_only=True)
    base, merged = load_plain(path), load_plain(path)
    adapter.merge_into(merged)
    for i, plain in ((0, base), (1, merged)):
        expected = plain_logits(plain, sequences.tokens[i])[-1:]
        torch.testing.assert_close(got[i], expected, rtol=1e-4, atol=1e-4)


def test_cleared_slot_is_the_base_model(make_model: MakeModel, tmp_path: Path) -> None:
    path = make_model("llama")
    model = load_paged(path, lora=LIMITS)
    put(model, 1, TinyAdapter(model, ["q_proj", "down_proj"], rank=4, seed=1), tmp_path)
    model.clear_slot(1)
    put(model, 0, TinyAdapter(model, ["k_proj"], rank=2, seed=2), tmp_path)
    sequences = Sequences([6], model.spec.vocab_size)
    (got,) = run_in_chunks(model, sequences, [6], 3, {0: 1})
    torch.testing.assert_close(
        got, plain_logits(load_plain(path), sequences.tokens[0]), rtol=1e-4, atol=1e-4
    )
