"""What a step must read and multiply at least, counted on a model small enough to do by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.floor import Floor, Rates, kv_bytes, prefill_flops, torch_threads, weight_bytes

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 2, 1, 4, 32


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One layer with q and v, a tied embedding and a norm, in bfloat16."""
    config = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (8, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (4, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_a_step_reads_weights_cache_and_adapters_once(model: Path) -> None:
    assert weight_bytes(model) == 2 * (32 * 8 + 8 * 8 + 4 * 8 + 8)
    assert kv_bytes(model, batch=3, context=5) == 3 * 5 * 2 * 2 * KV_HEADS * HEAD_DIM
    adapters = 2 * 2 * 16 * ((8 + 8) + (4 + 8))
    floor = Floor.of_step(model, batch=3, context=5, num_adapters=2, rank=16)
    assert floor.num_bytes == weight_bytes(model) + kv_bytes(model, 3, 5) + adapters
    assert floor.flops == 3 * weight_bytes(model)


def test_a_prompt_multiplies_linears_for_every_token_and_the_head_for_one(model: Path) -> None:
    linears, head = 8 * 8 + 4 * 8, VOCAB * HIDDEN
    # Scores and sums of values, each token with all before it and itself: 1 + 2 + 3.
    attention = 2 * HEADS * HEAD_DIM * 6
    assert prefill_flops(model, 3) == 2 * (3 * linears + head + attention)


def test_a_floor_is_the_longer_of_reading_and_multiplying() -> None:
    rates = Rates.fastest([Rates(50.0, 100.0), Rates(40.0, 200.0)])
    assert rates == Rates(50.0, 200.0)
    assert Floor(100, 200).seconds(rates) == 2.0
    assert Floor(100, 2000).seconds(rates) == 10.0


def test_threads_lent_to_torch_are_given_back() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
