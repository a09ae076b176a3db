"""DoRA where the expand kernel scales its outputs, as on a GPU: the same answers as PEFT's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters import LoRARequest
from engine import LLM, CacheConfig, SamplingParams
from engine.lora import layers
from kernels import ops
from tests.engine.oracle import PeftOracle, train_like_adapter

KINDS: dict[str, dict[str, object]] = {
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "biased": {"r": 3, "lora_alpha": 6, "lora_bias": True, "target_modules": ["k_proj", "up_proj"]},
    "plain": {"r": 5, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "gate_proj"]},
}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Build models that fuse scales; the list tells for each launch whether it had any."""
    build, apply = layers.LoRAUpdate.__init__, ops.lora_apply
    seen: list[bool] = []

    def fuse(self: Any, *args: Any, fuses_scales: bool = False) -> None:
        build(self, *args, fuses_scales=True)

    def watch(*args: Any, **kwargs: Any) -> None:
        scales: Sequence[torch.Tensor] | None = args[6]
        seen.append(scales is not None)
        apply(*args, **kwargs)

    monkeypatch.setattr(layers.LoRAUpdate, "__init__", fuse)
    monkeypatch.setattr(ops, "lora_apply", watch)
    return seen


def test_mixed_batch_with_fused_scales_answers_as_peft(
    checkpoint: Path, tmp_path: Path, fused: list[bool]
) -> None:
    paths = {name: tmp_path / name for name in KINDS}
    for seed, (name, config) in enumerate(KINDS.items()):
        train_like_adapter(checkpoint, paths[name], seed=seed, **config)
    oracle = PeftOracle(checkpoint, paths)
    llm = LLM(checkpoint, dtype="float32", num_threads=1, cache=CacheConfig(num_blocks=256))
    names = [*KINDS, None, *KINDS]
    prompts = [[5 + 7 * row + index for index in range(3 + 4 * row)] for row in range(len(names))]
    loras = [name and LoRARequest(lora_name=name, lora_path=str(paths[name])) for name in names]
    params = SamplingParams(temperature=0, max_tokens=8)
    results = llm.generate(prompts, params, lora=[lora or None for lora in loras])
    for name, prompt, result in zip(names, prompts, results, strict=True):
        expected = oracle.generate(name, prompt, 8)
        assert result.completions[0].token_ids[: len(expected)] == expected, name
    assert any(fused)
