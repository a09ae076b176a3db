"""Slots must hold exactly the adapter that was written last, and nothing of the one before."""

from dataclasses import replace

import pytest
import torch

from engine.config import LoRAConfig
from engine.lora.adapter import LoRAAdapter, load_adapter
from engine.lora.targets import LoRATarget, ModelTargets
from engine.lora.weights import LoRAWeights, SlotWeights
from tests.engine.lora.peft_adapters import PeftAdapter, make_adapter

LIMITS = LoRAConfig(max_loras=3, max_lora_rank=8)
QKV = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    return make_adapter(
        tmp_path_factory.mktemp("attention"),
        rank_pattern={"v_proj": 7},
        target_modules=["q_proj", "v_proj"],
    )


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    return make_adapter(tmp_path_factory.mktemp("mlp"), r=2, target_modules=["up_proj", "q_proj"])


def load(adapter: PeftAdapter) -> LoRAAdapter:
    return load_adapter(adapter.request, adapter.targets, LIMITS, torch.float32)


def delta(weights: SlotWeights, projection: int, slot: int) -> torch.Tensor:
    """What the kernels would add, reading rows below the rank only."""
    rank = int(weights.ranks[projection, slot])
    return weights.lora_b[projection][slot, :rank].T @ weights.lora_a[projection, slot, :rank]


def assert_slot_holds(weights: LoRAWeights, slot: int, oracle: PeftAdapter) -> None:
    expected = oracle.delta_weights()
    for name, target in oracle.targets.items():
        module = weights.module(name)
        if module is None:
            assert name not in expected
            continue
        want = expected.get(name, torch.zeros(target.out_features, target.in_features))
        torch.testing.assert_close(delta(module, 0, slot), want, atol=1e-5, rtol=1e-5)


def test_nothing_is_allocated_before_an_adapter_targets_it(attention: PeftAdapter) -> None:
    weights = LoRAWeights(attention.targets, LIMITS, torch.float32, "cpu")
    assert weights.size_bytes == 0 and weights.module("lm_head") is None
    weights.write_slot(0, load(attention))
    assert weights.size_bytes > 0
    assert weights.module("lm_head") is None
    assert weights.module("model.layers.1.self_attn.q_proj") is not None


def test_a_slot_holds_what_was_written_last(attention: PeftAdapter, mlp: PeftAdapter) -> None:
    weights = LoRAWeights(attention.targets, LIMITS, torch.float32, "cpu")
    weights.write_slot(1, load(attention))
    weights.write_slot(2, load(mlp))
    assert_slot_holds(weights, 1, attention)
    assert_slot_holds(weights, 2, mlp)
    assert weights.slot_ranks == [0, 7, 2]

    weights.write_slot(1, load(mlp))
    assert_slot_holds(weights, 1, mlp)
    assert weights.slot_ranks == [0, 2, 2]


def test_a_cleared_slot_changes_nothing(attention: PeftAdapter) -> None:
    weights = LoRAWeights(attention.targets, LIMITS, torch.float32, "cpu")
    weights.write_slot(0, load(attention))
    weights.clear_slot(0)
    assert weights.slot_ranks == [0, 0, 0]
    for name in attention.targets:
        module = weights.module(name)
        assert module is None or not module.ranks.any()


def test_a_group_of_projections_is_one_stack(attention: PeftAdapter) -> None:
    weights = LoRAWeights(attention.targets, LIMITS, torch.float32, "cpu", groups=[QKV])
    weights.write_slot(2, load(attention))
    module = weights.module(QKV[1])
    assert module is not None and module is weights.module(QKV[0])
    assert module.ranks.tolist() == [[0, 0, 4], [0, 0, 0], [0, 0, 7]]
    assert module.lora_a.shape == (3, 3, 8, 16)
    assert [tuple(b.shape) for b in module.lora_b] == [(3, 8, 16), (3, 8, 8), (3, 8, 8)]
    expected = attention.delta_weights()
    for projection in (0, 2):
        torch.testing.assert_close(delta(module, projection, 2), expected[QKV[projection]])


def test_modules_of_a_group_must_share_their_input() -> None:
    targets = ModelTargets({"a": LoRATarget("a", 4, 4), "b": LoRATarget("b", 5, 4)})
    with pytest.raises(ValueError, match="same input width"):
        LoRAWeights(targets, LIMITS, torch.float32, "cpu", groups=[("a", "b")])


def test_a_write_that_fails_leaves_the_slot_empty(attention: PeftAdapter) -> None:
    weights = LoRAWeights(attention.targets, LIMITS, torch.float32, "cpu")
    adapter = load(attention)
    weights.write_slot(0, adapter)
    foreign = replace(adapter, modules={"nowhere": next(iter(adapter.modules.values()))})
    with pytest.raises(KeyError):
        weights.write_slot(0, foreign)
    assert weights.slot_ranks == [0, 0, 0]
    module = weights.module(QKV[0])
    assert module is not None and not module.ranks.any()
