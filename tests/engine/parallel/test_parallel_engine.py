"""The engine on two processes: one's tokens, adapters coming and going, no rank left behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from adapters import LoRARequest
from engine import LLM, AsyncEngine, CacheConfig, EngineConfig, LoRAConfig, SamplingParams
from engine.config import SchedulerConfig
from engine.errors import EngineDeadError, UnsupportedModelError
from tests.engine.conftest import ADAPTERS
from tests.engine.oracle import PeftOracle
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.tiny_models import MakeModel

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
# Prompts longer than a step's tokens, and more tokens than the cache holds.
SETTINGS = {
    "dtype": "float32",
    "num_threads": 1,
    "device": "cpu",
    "max_model_len": 80,
    "scheduler": SchedulerConfig(max_num_batched_tokens=24, max_adapter_wait_s=0.01),
    "cache": CacheConfig(num_blocks=24, block_size=4),
    "lora": LoRAConfig(max_loras=2, max_cpu_loras=8),
}
CASES = [
    (name, [3 + (7 * start + 11 * place) % 128 for place in range(length)])
    for start, length in enumerate((1, 17, 40, 5))
    for name in (None, *ADAPTERS)
]


def children() -> list[psutil.Process]:
    """The processes of this one that are ranks."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "engine.parallel.worker" in child.cmdline()]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    before = children()
    with LLM(checkpoint, tensor_parallel_size=2, **SETTINGS) as made:
        assert len(children()) == len(before) + 1
        yield made
    assert children() == before


def lora(paths: dict[str, Path], name: str | None) -> LoRARequest | None:
    return None if name is None else LoRARequest(lora_name=name, lora_path=str(paths[name]))


def test_two_processes_give_pefts_tokens(
    llm: LLM, adapter_paths: dict[str, Path], oracle: PeftOracle
) -> None:
    prompts = [prompt for _, prompt in CASES]
    results = llm.generate(prompts, GREEDY, lora=[lora(adapter_paths, name) for name, _ in CASES])
    for (name, prompt), result in zip(CASES, results, strict=True):
        expected = oracle.generate(name, prompt, NUM_TOKENS)
        assert result.completions[0].token_ids[: len(expected)] == expected, (name, len(prompt))
    stats = llm.engine.stats()
    assert stats.total_preemptions > 0
    assert stats.total_slot_loads > len(ADAPTERS)


def test_adapters_are_replaced_and_removed_while_requests_run(
    llm: LLM, adapter_paths: dict[str, Path], oracle: PeftOracle
) -> None:
    engine = llm.engine
    assert engine.adapters is not None
    prompt = CASES[8][1]
    tokens: dict[str, list[int]] = {}
    names = ["attention", "mlp", "rslora", "attention"]
    for number, name in enumerate(names):
        request = lora(adapter_paths, name)
        info = engine.adapters.load(request)
        request = LoRARequest(lora_name=name, lora_path=request.lora_path, digest=info.digest)
        engine.add_request(str(number), prompt, GREEDY, lora=request)
        for _ in range(3):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        # It is forgotten with its last request, while others still run.
        engine.adapters.remove(info.digest)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    for number, name in enumerate(names):
        expected = oracle.generate(name, prompt, NUM_TOKENS)
        assert tokens[str(number)][: len(expected)] == expected
    assert not any(item.slot is not None for item in engine.adapters.resident())


async def test_death_of_a_rank_ends_the_engine_and_says_so(
    make_model: MakeModel,
) -> None:
    path = make_model("qwen2")
    save_tiny_tokenizer(path, vocab_size=131)
    before = children()
    engine = AsyncEngine(EngineConfig(model=path, tensor_parallel_size=2, **SETTINGS))
    await engine.start()
    (rank,) = (child for child in children() if child not in before)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    outputs = engine.generate("r", [5, 6, 7], params)
    assert (await anext(outputs))[0].token_ids
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 ended unexpectedly \(exit status -9\)"):
        async for _ in outputs:
            pass
    assert not engine.is_alive
    await engine.stop()


def test_unsplittable_model_is_refused_before_a_process_starts(checkpoint: Path) -> None:
    before = children()
    with pytest.raises(UnsupportedModelError, match="num_key_value_heads 2 cannot be divided"):
        LLM(checkpoint, tensor_parallel_size=6, **SETTINGS)
    assert children() == before
