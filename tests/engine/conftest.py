"""A tiny checkpoint with a tokenizer, adapters of many kinds on it, and PEFT's own answers."""

from pathlib import Path

import pytest

from tests.engine.oracle import PeftOracle, train_like_adapter
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.tiny_models import MakeModel

# Differing ranks, targets and scalings: what a mixed batch must keep apart.
ADAPTERS: dict[str, dict[str, object]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank-one": {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj", "k_proj", "o_proj"]},
    "mlp": {
        "r": 13,
        "lora_alpha": 20,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    },
    "rslora": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 6,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 16, "layers.1.self_attn.v_proj": 2},
        "alpha_pattern": {"down_proj": 30},
    },
    "one-layer": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["up_proj", "q_proj"],
        "layers_to_transform": [1],
    },
}


@pytest.fixture(scope="session")
def checkpoint(make_model: MakeModel) -> Path:
    """A tiny float32 llama with a tokenizer."""
    path = make_model("llama")
    save_tiny_tokenizer(path, vocab_size=131)
    return path


@pytest.fixture(scope="session")
def adapter_paths(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One adapter of each kind on the tiny llama."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        train_like_adapter(checkpoint, root / name, seed=seed, **config)
    return {name: root / name for name in ADAPTERS}


@pytest.fixture(scope="session")
def oracle(checkpoint: Path, adapter_paths: dict[str, Path]) -> PeftOracle:
    """PEFT's own answers for these adapters."""
    return PeftOracle(checkpoint, adapter_paths)
