"""Greedy tokens and log probabilities equal PEFT + transformers in float32, whatever the batch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from adapters import LoRARequest
from engine import LLM, CacheConfig, LoRAConfig, SamplingParams, SchedulerConfig
from engine.lora import module_plan
from tests.engine.conftest import ADAPTERS
from tests.engine.oracle import PeftOracle

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
NAMES: list[str | None] = [None, *ADAPTERS]

Prompt = list[int]


def make_prompts(num_prompts: int = 20) -> list[Prompt]:
    """Prompts of 1 to 90 random tokens."""
    rng = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 33] + [rng.randint(3, 90) for _ in range(num_prompts - 6)]
    return [[rng.randrange(3, 131) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def lora(adapter_paths: dict[str, Path]) -> Callable[[str | None], LoRARequest | None]:
    def make(name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        return LoRARequest(lora_name=name, lora_path=str(adapter_paths[name]))

    return make


def make_llm(checkpoint: Path, **settings: object) -> LLM:
    settings.setdefault("cache", CacheConfig(num_blocks=512, enable_prefix_caching=False))
    return LLM(checkpoint, dtype="float32", num_threads=1, **settings)


def check(
    llm: LLM,
    oracle: PeftOracle,
    cases: list[tuple[str | None, Prompt]],
    lora: Callable[[str | None], LoRARequest | None],
) -> None:
    """Generate all cases in one batch and compare each with PEFT."""
    results = llm.generate(
        [prompt for _, prompt in cases], GREEDY, lora=[lora(name) for name, _ in cases]
    )
    for (name, prompt), result in zip(cases, results, strict=True):
        expected = oracle.generate(name, prompt, NUM_TOKENS)
        found = result.completions[0].token_ids[: len(expected)]
        assert found == expected, f"{name} after {len(prompt)} tokens"


def mixed_cases() -> list[tuple[str | None, Prompt]]:
    """Each of 20 prompts with every adapter and the base, in a shuffled order."""
    cases = [(name, prompt) for prompt in make_prompts() for name in NAMES]
    random.Random(6).shuffle(cases)
    return cases


def test_oracle_distinguishes_the_adapters(oracle: PeftOracle) -> None:
    prompt = make_prompts()[-1]
    outputs = {tuple(oracle.generate(name, prompt, NUM_TOKENS)) for name in NAMES}
    assert len(outputs) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_adapter_alone_equals_peft(
    name: str | None, checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    llm = make_llm(checkpoint)
    for prompt in make_prompts():
        check(llm, oracle, [(name, prompt)], lora)


def test_mixed_batch_equals_peft(
    checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    check(make_llm(checkpoint), oracle, mixed_cases(), lora)
    assert oracle.num_ties <= 3


def test_fewer_slots_than_adapters_equals_peft(
    checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    llm = make_llm(
        checkpoint,
        lora=LoRAConfig(max_loras=2, max_cpu_loras=2),
        scheduler=SchedulerConfig(max_adapter_wait_s=0.01),
    )
    cases = mixed_cases()
    # The requests of one batch are served adapter by adapter; each of these has nearly all.
    for start in range(0, len(cases), 20):
        check(llm, oracle, cases[start : start + 20], lora)
    assert llm.engine.stats().total_slot_loads > 3 * len(ADAPTERS)


def test_chunked_prefill_equals_peft(
    checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=7, max_num_seqs=5)
    check(make_llm(checkpoint, scheduler=scheduler), oracle, mixed_cases()[:70], lora)


def test_preemption_equals_peft(
    checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    cache = CacheConfig(num_blocks=28, block_size=4, enable_prefix_caching=False)
    llm = make_llm(checkpoint, cache=cache, max_model_len=108)
    check(llm, oracle, mixed_cases(), lora)
    assert llm.engine.stats().total_preemptions > 10


def test_prefix_cache_hits_equal_peft(
    checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    llm = make_llm(checkpoint, cache=CacheConfig(num_blocks=2048, block_size=4))
    check(llm, oracle, mixed_cases(), lora)
    before = llm.engine.stats().total_cached_prompt_tokens
    check(llm, oracle, mixed_cases(), lora)
    assert llm.engine.stats().total_cached_prompt_tokens > before + 1000


@pytest.mark.parametrize("name", NAMES)
def test_prompt_logprobs_agree_to_1e_4(
    name: str | None, checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    scheduler = SchedulerConfig(max_num_batched_tokens=16)
    llm = make_llm(checkpoint, scheduler=scheduler)
    prompts = [prompt for prompt in make_prompts() if len(prompt) > 1]
    for prompt, result in zip(prompts, llm.generate(prompts, params, lora=lora(name)), strict=True):
        expected = oracle.logprobs(name, prompt)
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        found = []
        wanted = []
        for position, logprobs in enumerate(result.prompt_logprobs[1:], 1):
            assert logprobs is not None
            assert logprobs.chosen.token_id == prompt[position]
            for entry in (logprobs.chosen, *logprobs.top):
                found.append(entry.logprob)
                wanted.append(float(expected[position - 1, entry.token_id]))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-5)


@contextmanager
def wrong_scaling(factor: float) -> Iterator[None]:
    """Break the engine on purpose: every adapter counts ``factor`` times."""
    original = module_plan.ModulePlan.__init__

    def broken(self: module_plan.ModulePlan, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)  # type: ignore[arg-type]
        object.__setattr__(self, "scaling", self.scaling * factor)

    module_plan.ModulePlan.__init__ = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        module_plan.ModulePlan.__init__ = original  # type: ignore[method-assign]


def test_wrong_scaling_is_noticed(
    checkpoint: Path, oracle: PeftOracle, lora: Callable[..., LoRARequest | None]
) -> None:
    with wrong_scaling(1.05), pytest.raises(AssertionError, match=r"after .* tokens"):
        check(make_llm(checkpoint), oracle, mixed_cases(), lora)
