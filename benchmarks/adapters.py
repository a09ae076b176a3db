"""Writes random adapters in PEFT's format, for benchmarks that need many."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM


def write_random_adapters(
    model: Path,
    root: Path,
    *,
    num_adapters: int,
    rank: int = 8,
    target_modules: tuple[str, ...] = ("q_proj", "v_proj"),
) -> list[Path]:
    """Write ``num_adapters`` adapters that differ and return their directories."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shapes = {
        name: (module.in_features, module.out_features)
        for name, module in skeleton.named_modules()
        if name.rpartition(".")[2] in target_modules
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(target_modules),
    }
    paths = []
    for index in range(num_adapters):
        path = root / f"adapter-{index:03d}"
        path.mkdir(parents=True)
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for name, (num_in, num_out) in shapes.items():
            prefix = f"base_model.model.{name}"
            lora_a = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            lora_b = torch.randn(num_out, rank, generator=generator) * 0.01
            tensors[f"{prefix}.lora_A.weight"] = lora_a.bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = lora_b.bfloat16()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
        paths.append(path)
    return paths
