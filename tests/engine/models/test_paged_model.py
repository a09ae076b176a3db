"""PagedModel against the plain transformers model: same logits, however the work is cut up."""

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.errors import UnsupportedModelError
from engine.models.llama import LlamaBody
from engine.models.paged_model import PagedModel
from tests.engine.models.paged_sequences import (
    BLOCK_SIZE,
    Sequences,
    load_paged,
    load_plain,
    plain_logits,
    run_in_chunks,
)
from tests.tiny_models import TINY_MODELS, MakeModel

PROMPT_LENS = (1, 5, 19, 12, 4)
NUM_DECODES = 9
LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize(
    ("model_type", "fuse"),
    [(name, True) for name in TINY_MODELS] + [(name, False) for name in LLAMA_SHAPED],
)
def test_logits_equal_transformers_in_chunked_prefill_and_decode(
    make_model: MakeModel, model_type: str, *, fuse: bool
) -> None:
    path = make_model(model_type)
    model, plain = load_paged(path, fuse=fuse), load_plain(path)
    sequences = Sequences([n + NUM_DECODES for n in PROMPT_LENS], model.spec.vocab_size)
    got = run_in_chunks(model, sequences, PROMPT_LENS, chunk=3)
    for tokens, logits in zip(sequences.tokens, got, strict=True):
        torch.testing.assert_close(logits, plain_logits(plain, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", TINY_MODELS)
def test_llama_shaped_models_take_the_short_way(make_model: MakeModel, model_type: str) -> None:
    body = load_paged(make_model(model_type))._body
    assert isinstance(body, LlamaBody) == (model_type in LLAMA_SHAPED)


@pytest.mark.parametrize(
    "overrides",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"head_dim": 16},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=lambda overrides: next(iter(overrides)),
)
def test_variants_of_llama_equal_transformers(
    make_model: MakeModel, overrides: dict[str, object]
) -> None:
    path = make_model("llama", **overrides)
    model, plain = load_paged(path), load_plain(path)
    sequences = Sequences([23], model.spec.vocab_size)
    (got,) = run_in_chunks(model, sequences, [20], chunk=7)
    expected = plain_logits(plain, sequences.tokens[0])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fuse", [True, False])
def test_only_the_chosen_rows_get_logits(make_model: MakeModel, *, fuse: bool) -> None:
    model = load_paged(make_model("llama"), fuse=fuse)
    every, last = Sequences([6, 3], 131), Sequences([6, 3], 131)
    expected = every.step(model, {0: 6, 1: 3})
    got = last.step(model, {0: 6, 1: 3}, last_only=True)
    assert {i: tuple(logits.shape) for i, logits in got.items()} == {0: (1, 131), 1: (1, 131)}
    for i, logits in got.items():
        torch.testing.assert_close(logits, expected[i][-1:])


@pytest.mark.parametrize("fuse", [True, False])
def test_a_step_may_want_no_logits(make_model: MakeModel, *, fuse: bool) -> None:
    model = load_paged(make_model("llama"), fuse=fuse)
    sequences = Sequences([6], 131)
    batch = sequences.attention_batch([0], [range(6)])
    none = torch.empty(0, dtype=torch.int64)
    logits = model.forward(sequences.tokens[0], torch.arange(6), batch, None, none, None)
    assert logits.shape == (0, 131)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_served_as_they_are(
    make_model: MakeModel, dtype: torch.dtype
) -> None:
    path = make_model("llama", dtype=dtype)
    model, plain = load_paged(path), load_plain(path)
    assert model.spec.dtype == plain.dtype == dtype
    sequences = Sequences([20], model.spec.vocab_size)
    (got,) = run_in_chunks(model, sequences, [17], chunk=5)
    expected = plain_logits(plain, sequences.tokens[0])
    assert got.dtype == torch.float32
    assert (got - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


def test_two_models_in_one_process_do_not_meet(make_model: MakeModel) -> None:
    paths = [make_model("llama"), make_model("llama", tie_word_embeddings=True)]
    models = [load_paged(path) for path in paths]
    sequences = [Sequences([12], 131, seed=seed) for seed in (1, 2)]
    parts: list[list[torch.Tensor]] = [[], []]
    for _ in range(6):
        for model, own, logits in zip(models, sequences, parts, strict=True):
            logits.append(own.step(model, {0: 2})[0])
    for path, own, logits in zip(paths, sequences, parts, strict=True):
        expected = plain_logits(load_plain(path), own.tokens[0])
        torch.testing.assert_close(torch.cat(logits), expected, rtol=1e-4, atol=1e-4)


def test_spec_tells_the_shape_of_the_model(make_model: MakeModel) -> None:
    spec = load_paged(make_model("gemma2")).spec
    assert (spec.vocab_size, spec.num_layers, spec.num_kv_heads, spec.head_dim) == (131, 3, 2, 8)
    assert spec.windows == (7, None, 7)
    assert spec.max_model_len == 256
    assert (spec.dtype, spec.device) == (torch.float32, torch.device("cpu"))


def test_blocks_that_fit_count_keys_and_values_of_all_layers(make_model: MakeModel) -> None:
    block_bytes = 3 * 2 * BLOCK_SIZE * 2 * 8 * 4
    cache = CacheConfig(block_size=BLOCK_SIZE, memory_bytes=10 * block_bytes)
    config = EngineConfig(model=make_model("llama"), lora=None, device="cpu", cache=cache)
    assert PagedModel(config).num_blocks_that_fit() == 10


def test_slots_need_lora(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="without LoRA"):
        load_paged(make_model("llama")).clear_slot(0)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("gpt_oss", "s_aux"), ("bert", "not causal"), ("diffllama", "runs twice")],
)
def test_attention_that_would_not_be_exact_is_refused(
    make_model: MakeModel, model_type: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_paged(make_model(model_type))
