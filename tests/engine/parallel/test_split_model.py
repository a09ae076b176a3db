"""A model split among ranks against the whole one: same logits, whatever the adapters change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import LoRAConfig
from engine.errors import UnsupportedModelError
from engine.models.loader import load_model
from engine.models.registry import model_class, read_config
from engine.parallel.sharding import Split, check_split, plan_shards
from tests.engine.matrix.features import WHAT, WHERE
from tests.engine.matrix.laboratory import LIMITS, PROMPT, Laboratory, load, run_mixed
from tests.engine.models.paged_sequences import Sequences, load_paged, run_in_chunks
from tests.engine.parallel.ranks import ThreadedRanks
from tests.tiny_models import MakeModel

Ranks = Callable[..., ThreadedRanks]

PROMPT_LENS = (9, 4, 11, 1)

# Everything that adapters may change in a Llama; an activated LoRA differs in its tokens alone.
FEATURES = [
    name
    for name, feature in (WHERE | WHAT).items()
    if feature.refused is None and not name.startswith("aLoRA")
]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "overrides", "tp_size"),
    [
        ("llama", {}, 2),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 3, "intermediate_size": 90},
            3,
        ),
        ("llama", {"tie_word_embeddings": True}, 2),
        ("llama", {"attention_bias": True, "mlp_bias": True}, 2),
        ("mistral", {}, 2),
        ("qwen2", {}, 2),
        ("qwen3", {}, 2),
    ],
)
@pytest.mark.parametrize("fuse", [True, False])
def test_ranks_give_the_whole_models_logits(
    make_model: MakeModel,
    ranks: Ranks,
    model_type: str,
    overrides: dict[str, object],
    tp_size: int,
    *,
    fuse: bool,
) -> None:
    path = make_model(model_type, **overrides)
    lengths = [n + 4 for n in PROMPT_LENS]
    results = []
    for model in (load_paged(path), ranks(path, tp_size, fuse=fuse)):
        sequences = Sequences(lengths, model.spec.vocab_size)
        results.append(run_in_chunks(model, sequences, PROMPT_LENS, 3))
    assert_same(*results)


@pytest.mark.parametrize("architecture", ["llama", "llama, tied", "qwen2"])
def test_adapters_change_what_they_change_in_the_whole_model(
    architecture: str, ranks: Ranks, tmp_path: Path
) -> None:
    laboratory = Laboratory(architecture, tmp_path, FEATURES)
    assert len(laboratory.served) >= 17, laboratory.refusals
    split = ranks(laboratory.checkpoint, 2, lora=LIMITS)
    slots = dict(enumerate(laboratory.served))
    for slot, feature in slots.items():
        request = laboratory.request(feature)
        assert request is not None
        # Read against the split model: what is compared with base weights sees them whole.
        split.write_slot(slot, load(split, request))
        laboratory.model.write_slot(slot, load(laboratory.model, request))
    tokens = [*PROMPT, *PROMPT]
    base = run_mixed(laboratory.model, tokens, None)
    assert_same(run_mixed(split, tokens, None), base)
    for slot in slots:
        # The adapter, another one, and the base model in one batch.
        used = {1: slot, 3: (slot + 1) % len(slots)}
        expected = run_mixed(laboratory.model, tokens, used)
        assert (expected[1] - base[1]).abs().max() > 0.05, slots[slot]
        assert_same(run_mixed(split, tokens, used), expected)


def test_slots_are_replaced_and_cleared_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    laboratory = Laboratory("llama", tmp_path, ["DoRA", "all-linear", "modules_to_save lm_head"])
    split = ranks(laboratory.checkpoint, 2, lora=LoRAConfig(max_loras=1, max_lora_rank=8))
    whole = load_paged(laboratory.checkpoint, lora=LoRAConfig(max_loras=1, max_lora_rank=8))
    for feature in ("DoRA", "all-linear", "modules_to_save lm_head", "DoRA"):
        request = laboratory.request(feature)
        assert request is not None
        for model in (split, whole):
            model.write_slot(0, load(model, request))
        assert_same(run_mixed(split, PROMPT, {1: 0, 2: 0}), run_mixed(whole, PROMPT, {1: 0, 2: 0}))
    split.clear_slot(0)
    assert_same(run_mixed(split, PROMPT, {1: 0}), run_mixed(whole, PROMPT, None))


def test_each_rank_holds_its_part_alone(make_model: MakeModel, ranks: Ranks) -> None:
    path = make_model("llama")
    model = ranks(path, 2)
    assert [rank.spec.num_kv_heads for rank in model.ranks] == [1, 1]
    assert model.spec.vocab_size == 131
    name = "model.layers.0.self_attn.q_proj"
    whole = load_paged(path).base_weight(name)
    assert whole is not None
    assert torch.equal(model.base_weight(name), whole)
    parts = [rank._model.get_submodule(name).weight for rank in model.ranks]
    assert torch.equal(torch.cat(parts), whole)
    heads = [rank._model.get_submodule("lm_head").weight.shape[0] for rank in model.ranks]
    assert heads == [66, 65]


@pytest.mark.parametrize(
    ("model_type", "overrides", "tp_size", "reason"),
    [
        ("llama", {}, 4, "num_attention_heads 6 cannot be divided by tensor_parallel_size 4"),
        ("llama", {}, 3, "num_key_value_heads 2 cannot be divided by tensor_parallel_size 3"),
        ("llama", {"intermediate_size": 87}, 2, "intermediate_size 87 cannot be divided"),
        ("gemma2", {}, 2, "tensor parallelism serves LlamaForCausalLM"),
    ],
)
def test_models_that_cannot_be_split_exactly_are_refused(
    make_model: MakeModel, model_type: str, overrides: dict[str, object], tp_size: int, reason: str
) -> None:
    config = read_config(make_model(model_type, **overrides))
    with pytest.raises(UnsupportedModelError, match=reason):
        check_split(model_class(config).__name__, config, tp_size)


def test_plan_names_every_linear_and_the_vocabulary(make_model: MakeModel) -> None:
    path = make_model("qwen3")
    config = read_config(path)
    model = load_model(
        model_class(config),
        config,
        path,
        dtype="auto",
        device=torch.device("cpu"),
        attention="eager",
    )
    plan = plan_shards(model, 2)
    linears = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear]
    assert set(plan.splits) == {*linears, "model.embed_tokens"}
    assert plan.splits["model.layers.1.mlp.down_proj"] is Split.INPUTS
    assert plan.splits["lm_head"] is Split.VOCABULARY
