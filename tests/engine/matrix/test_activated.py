"""An activated LoRA shares the base model's prefix up to its invocation, and nothing after it."""

import pytest
import torch

from engine import LLM, CacheConfig, SamplingParams
from tests.engine.matrix.features import INVOCATION
from tests.engine.matrix.laboratory import LIMITS, NUM_STEPS, PROMPT, Laboratory
from tests.engine.matrix.test_matrix import assert_greedy

BLOCK_SIZE = 4
LAST_INVOCATION = 15
# Whole blocks before the last invocation, and before the last token, whose logits are needed.
BASE_TOKENS = LAST_INVOCATION // BLOCK_SIZE * BLOCK_SIZE
ALL_TOKENS = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory("llama", tmp_path_factory.mktemp("activated"), {"aLoRA", "plain"})


@pytest.fixture
def llm(lab: Laboratory) -> LLM:
    cache = CacheConfig(num_blocks=64, block_size=BLOCK_SIZE)
    return LLM(lab.checkpoint, dtype="float32", num_threads=1, lora=LIMITS, cache=cache)


def answer(llm: LLM, lab: Laboratory, feature: str | None, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    (result,) = llm.generate([prompt], params, lora=[lab.request(feature)])
    return result.completions[0].token_ids


def answer_and_check(llm: LLM, lab: Laboratory, feature: str | None) -> int:
    """Compare the answer with PEFT's; returns how many of the prompt's tokens were cached."""
    before = llm.engine.stats().total_cached_prompt_tokens
    tokens = answer(llm, lab, feature, PROMPT)
    assert_greedy(tokens, lab.truth(feature, PROMPT + tokens))
    return llm.engine.stats().total_cached_prompt_tokens - before


def test_the_prompt_is_as_these_tests_say() -> None:
    assert tuple(PROMPT[LAST_INVOCATION : LAST_INVOCATION + 2]) == INVOCATION
    assert BASE_TOKENS < ALL_TOKENS


def test_prefix_of_the_base_model_is_reused_up_to_the_invocation(llm: LLM, lab: Laboratory) -> None:
    assert answer_and_check(llm, lab, None) == 0
    assert answer_and_check(llm, lab, "aLoRA") == BASE_TOKENS
    assert answer_and_check(llm, lab, "aLoRA") == ALL_TOKENS
    assert answer_and_check(llm, lab, None) == ALL_TOKENS


def test_base_model_reuses_the_prefix_of_an_activated_adapter(llm: LLM, lab: Laboratory) -> None:
    assert answer_and_check(llm, lab, "aLoRA") == 0
    assert answer_and_check(llm, lab, None) == BASE_TOKENS


def test_another_adapter_shares_nothing_with_it(llm: LLM, lab: Laboratory) -> None:
    answer_and_check(llm, lab, "aLoRA")
    answer_and_check(llm, lab, None)
    assert answer_and_check(llm, lab, "plain") == 0


def test_a_prompt_without_the_invocation_is_answered_by_the_base_model(
    llm: LLM, lab: Laboratory
) -> None:
    prompt = [token for token in PROMPT if token not in INVOCATION]
    tokens = answer(llm, lab, "aLoRA", prompt)
    truth = lab.truth(None, prompt + tokens)[len(prompt) - 1 : -1]
    assert tokens == torch.argmax(truth, dim=-1).tolist()
