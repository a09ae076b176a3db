"""What is run before the first request launches every kernel that requests then need."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from adapters import LoRARequest
from engine import CacheConfig, LoRAConfig, SchedulerConfig
from engine.config import EngineConfig
from engine.executor import LocalExecutor
from engine.lora.adapter import load_adapter
from engine.warm_up import WarmUpStep, warm_up_steps
from kernels import aot_cases
from kernels.aot import TARGETS, launches_of

MAX_TOKENS, MAX_CONTEXT, MAX_RANK = 8192, 32768, 64
LIMITS = LoRAConfig(max_loras=2, max_cpu_loras=2, max_lora_rank=16)

Case = Callable[[], None]


def lora_cases(step: WarmUpStep) -> Iterator[Case]:
    """The launches of a step's adapters: groups of one to three linears."""
    for projections in (1, 2, 3):
        sizes = (step.num_tokens, step.segment_len, projections)
        yield partial(aot_cases.lora, *sizes, rank=step.rank)


def attention_case(step: WarmUpStep) -> Case:
    if step.query_len == 1:
        return partial(aot_cases.decode, 128, step.num_sequences, context=step.context_len)
    return partial(aot_cases.prefill, 128, step.query_len)


def random_steps() -> Iterator[WarmUpStep]:
    """Steps of any sizes within the limits."""
    rng = random.Random(0)
    for _ in range(400):
        tokens = int(2 ** rng.uniform(0, 13))
        segment_len = min(tokens, int(2 ** rng.uniform(0, 13)))
        yield WarmUpStep(1, tokens, tokens, rng.randint(1, MAX_RANK), segment_len)
        yield WarmUpStep(rng.randint(1, 300), 1, int(2 ** rng.uniform(0, 15)))


def compiled(target: str, steps: Iterator[WarmUpStep]) -> set[tuple[str, str]]:
    """The kernels that steps launch, as far as one is compiled apart from another."""
    found = set()
    for step in steps:
        cases = [attention_case(step), *(lora_cases(step) if step.rank else ())]
        launched = [launch for case in cases for launch in launches_of(target, case)]
        found |= {(launch.kernel, launch.config) for launch in launched}
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_no_step_needs_a_kernel_that_was_not_run(target: str) -> None:
    before = compiled(target, warm_up_steps(MAX_TOKENS, MAX_CONTEXT, MAX_RANK))
    assert compiled(target, random_steps()) <= before


def test_smaller_limits_take_fewer_steps() -> None:
    steps = [*warm_up_steps(64, 100, 0)]
    assert len(steps) < 20
    assert max(step.num_tokens for step in steps) == 64
    assert max(step.context_len for step in steps) == 100
    assert not any(step.rank for step in steps)


def test_warm_up_leaves_no_trace(checkpoint: Path, adapter_paths: dict[str, Path]) -> None:
    config = EngineConfig(
        model=checkpoint,
        dtype="float32",
        device="cpu",
        max_model_len=64,
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
        lora=LIMITS,
    )
    executor = LocalExecutor(config)
    executor.allocate_cache(32)
    executor._warm_up()
    for paged, _ in executor._model._attention:
        assert paged.key_cache is not None and paged.value_cache is not None
        assert not paged.key_cache.any() and not paged.value_cache.any()
    request = LoRARequest(lora_name="mlp", lora_path=str(adapter_paths["mlp"]))
    adapter = load_adapter(request, executor.targets, LIMITS, torch.float32)
    executor.write_slot(1, adapter)
    assert [*executor._model.slot_ranks] == [0, adapter.rank]
