"""A quantised KV cache: half the memory, nearly the same answers, the same whatever the batch."""

import random
from pathlib import Path

import pytest
import torch

from adapters import LoRARequest
from engine import LLM, CacheConfig, SamplingParams, SchedulerConfig
from engine.config import EngineConfig
from engine.models.paged_model import PagedModel
from tests.tiny_models import MakeModel

PARAMS = SamplingParams(temperature=0, max_tokens=10, logprobs=1)


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, 131) for _ in range(length)] for length in (1, 9, 40, 90, 33)]


def run(
    checkpoint: Path, loras: list[LoRARequest | None], *, together: bool, **settings: object
) -> list[tuple[list[int], list[float]]]:
    """Return each prompt's tokens and their log probabilities."""
    llm = LLM(checkpoint, dtype="float32", num_threads=1, **settings)
    groups = [range(len(prompts()))] if together else [[row] for row in range(len(prompts()))]
    found = []
    for rows in groups:
        results = llm.generate(
            [prompts()[row] for row in rows], PARAMS, lora=[loras[row] for row in rows]
        )
        for result in results:
            completion = result.completions[0]
            logprobs = [position.chosen.logprob for position in completion.logprobs]
            found.append((completion.token_ids, logprobs))
    return found


@pytest.fixture(scope="module")
def loras(adapter_paths: dict[str, Path]) -> list[LoRARequest | None]:
    names = ["attention", None, "mlp", "rslora", "attention"]
    return [
        name and LoRARequest(lora_name=name, lora_path=str(adapter_paths[name])) for name in names
    ]  # type: ignore[misc]


def test_answers_are_near_those_of_the_whole_cache(
    checkpoint: Path, loras: list[LoRARequest | None]
) -> None:
    exact = run(checkpoint, loras, together=True, cache=CacheConfig(num_blocks=64))
    cache = CacheConfig(num_blocks=64, kv_cache_dtype="fp8")
    rounded = run(checkpoint, loras, together=True, cache=cache)
    differences = []
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(exact, rounded, strict=True):
        for place in range(len(tokens)):
            differences.append(abs(logprobs[place] - other_logprobs[place]))
            if tokens[place] != other_tokens[place]:
                break
    # Not nothing: the cache is in use. Not much: a token's log probability moves by a few percent.
    assert 0 < max(differences) < 0.3
    assert sum(differences) / len(differences) < 0.05


def test_answers_do_not_depend_on_the_batch_or_on_chunks(
    checkpoint: Path, loras: list[LoRARequest | None]
) -> None:
    cache = CacheConfig(num_blocks=64, block_size=8, kv_cache_dtype="fp8")
    alone = run(checkpoint, loras, together=False, cache=cache)
    chunked = run(
        checkpoint,
        loras,
        together=True,
        cache=cache,
        scheduler=SchedulerConfig(max_num_batched_tokens=16),
    )
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(alone, chunked, strict=True):
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=1e-3)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_memory_holds_more_blocks(make_model: MakeModel, model_type: str) -> None:
    path = make_model(model_type)

    def num_blocks(dtype: str) -> int:
        cache = CacheConfig(memory_bytes=1 << 20, kv_cache_dtype=dtype)  # type: ignore[arg-type]
        model = PagedModel(EngineConfig(model=path, dtype="float32", cache=cache))
        count = model.num_blocks_that_fit()
        model.allocate_cache(2)
        return count

    # Heads of 8 in float32: 32 bytes become 8 and a scale of 4.
    assert num_blocks("fp8") == pytest.approx(num_blocks("auto") * 32 / 12, rel=0.01)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto or fp8, got 'int4'"):
        CacheConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]
    assert torch.float8_e4m3fn.itemsize == 1
