"""What other tools and mistakes make of the files that PEFT saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

WEIGHTS = "adapter_model.safetensors"

Edit = Callable[[Path], None]
Tensors = dict[str, torch.Tensor]


def change_tensors(change: Callable[[Tensors], Tensors]) -> Edit:
    def edit(path: Path) -> None:
        changed = change(load_file(path / WEIGHTS))
        save_file({key: tensor.contiguous() for key, tensor in changed.items()}, path / WEIGHTS)

    return edit


def set_field(name: str, value: Any) -> Edit:
    def edit(path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps({**config, name: value}))

    return edit


def keep_fields(*names: str, **changes: Any) -> Edit:
    """Rewrite the configuration as a tool does that knows these fields alone."""

    def edit(path: Path) -> None:
        config = json.loads((path / "adapter_config.json").read_text())
        kept = {name: config[name] for name in names} | changes
        (path / "adapter_config.json").write_text(json.dumps(kept))

    return edit


def save_tokenizer(*tokens: str) -> Edit:
    """Save the base model's tokenizer beside the adapter, with more tokens, as trainers do."""

    def edit(path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(path.parents[1] / "base")
        tokenizer.add_tokens(list(tokens))
        tokenizer.save_pretrained(path)

    return edit


def claim_init(init: str) -> Edit:
    return set_field("init_lora_weights", init)


def claim_type(peft_type: str) -> Edit:
    return set_field("peft_type", peft_type)


def rename(old: str, new: str) -> Edit:
    return change_tensors(lambda tensors: {k.replace(old, new): t for k, t in tensors.items()})


def rename_as_multimodal(path: Path) -> None:
    """As PEFT names the text part of a multimodal model."""
    rename("base_model.model.model.", "base_model.model.model.language_model.")(path)


def rename_as_older_multimodal(path: Path) -> None:
    """As it did before transformers 4.52."""
    rename("base_model.model.", "base_model.model.language_model.")(path)


def drop_prefix(path: Path) -> None:
    rename("base_model.model.", "")(path)


def insert_adapter_name(path: Path) -> None:
    rename("lora_A.", "lora_A.default.")(path)
    rename("lora_B.", "lora_B.default.")(path)


def store_as(dtype: torch.dtype) -> Edit:
    return change_tensors(lambda tensors: {k: t.to(dtype) for k, t in tensors.items()})


def split_in_shards(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    weight_map = {}
    for number, keys in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        shard = f"adapter_model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in keys}, path / shard)
        weight_map |= dict.fromkeys(keys, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def zero_lora_b(path: Path) -> None:
    change_tensors(lambda tensors: {k: t * ("lora_A" in k) for k, t in tensors.items()})(path)


def narrow(path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        key = next(key for key in tensors if "lora_A" in key)
        return {**tensors, key: tensors[key][:, :-1]}

    change_tensors(change)(path)


def add_stray_tensor(path: Path) -> None:
    stray = {"base_model.model.stray.lora_A.weight": torch.ones(2, 2)}
    change_tensors(lambda tensors: tensors | stray)(path)


def add_head_rows(path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        (key,) = (key for key in tensors if "lm_head" in key)
        return {**tensors, key: torch.cat([tensors[key], tensors[key][:2]])}

    change_tensors(change)(path)
