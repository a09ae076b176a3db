"""Embeddings equal the final hidden states of transformers and PEFT, however the steps are cut."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import LoRARequest
from engine import CacheConfig, Engine, EngineConfig, LoRAConfig, SamplingParams, SchedulerConfig
from engine.errors import InvalidRequestError
from engine.outputs import FinishReason, RequestOutput, ScheduledRequest
from engine.pooling import Pooler
from engine.request import Request
from tests.engine.conftest import ADAPTERS
from tests.engine.oracle import PeftOracle
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.tiny_models import MakeModel

NAMES: list[str | None] = [None, *ADAPTERS]
LAST, MEAN = (SamplingParams(pooling=pooling, max_tokens=1) for pooling in ("last", "mean"))


@pytest.fixture
def loaders() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def make_engine(checkpoint: Path, loaders: ThreadPoolExecutor, **settings: object) -> Engine:
    settings.setdefault("cache", CacheConfig(num_blocks=512, block_size=8))
    settings.setdefault("lora", LoRAConfig(max_loras=4, max_cpu_loras=8))
    config = EngineConfig(model=checkpoint, dtype="float32", num_threads=1, **settings)
    return Engine(config, loaders)


def run(engine: Engine) -> dict[str, RequestOutput]:
    """Everything that is still to come, of each request the last output."""
    found = {}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] = output
    return found


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    lengths = [1, 2, 8, 9, *(rng.randint(3, 90) for _ in range(count - 4))]
    return [[rng.randrange(3, 131) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("budget", [2048, 16])
def test_vectors_equal_pefts_in_batches_chunks_and_beside_generation(
    checkpoint: Path,
    adapter_paths: dict[str, Path],
    oracle: PeftOracle,
    loaders: ThreadPoolExecutor,
    budget: int,
) -> None:
    engine = make_engine(
        checkpoint, loaders, scheduler=SchedulerConfig(max_num_batched_tokens=budget)
    )
    assert engine.adapters is not None
    lora: dict[str | None, LoRARequest | None] = {None: None}
    for name, path in adapter_paths.items():
        asked = LoRARequest(lora_name=name, lora_path=str(path))
        lora[name] = replace(asked, digest=engine.adapters.load(asked).digest)
    cases = [
        (name, pooling, prompt)
        for number, prompt in enumerate(prompts(10))
        for name in (NAMES[number % len(NAMES)], NAMES[(number + 3) % len(NAMES)])
        for pooling in ("last", "mean")
    ]
    for number, (name, pooling, prompt) in enumerate(cases):
        params = LAST if pooling == "last" else MEAN
        engine.add_request(f"e{number}", prompt, params, lora=lora[name])
        engine.add_request(f"g{number}", prompt, SamplingParams(max_tokens=3), lora=lora[name])
    found = run(engine)
    for number, (name, pooling, prompt) in enumerate(cases):
        states = oracle.hidden_states(name, prompt)
        expected = states[-1] if pooling == "last" else states.mean(dim=0)
        output = found[f"e{number}"]
        assert output.embedding is not None
        torch.testing.assert_close(torch.tensor(output.embedding), expected, rtol=1e-4, atol=1e-4)
        assert (output.token_ids, output.text, output.finish_reason) == ((), "", FinishReason.STOP)
        assert (output.num_prompt_tokens, output.request_finished) == (len(prompt), True)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.total_prompt_tokens == 2 * sum(len(prompt) for _, _, prompt in cases)


def test_a_cached_prefix_changes_no_vector(
    checkpoint: Path, oracle: PeftOracle, loaders: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, loaders)
    prompt = prompts(5)[4] + [7] * 40
    states = oracle.hidden_states(None, prompt)
    for params, expected in ((LAST, states[-1]), (MEAN, states.mean(dim=0))):
        for repeat in range(2):
            engine.add_request("r", prompt, params)
            output = run(engine)["r"]
            torch.testing.assert_close(torch.tensor(output.embedding), expected)
            # A mean needs the states of every token.
            assert bool(output.num_cached_tokens) is (params is LAST and repeat == 1)


@pytest.mark.parametrize("model_type", ["gemma2", "phi3", "gpt2", "qwen3"])
def test_other_models_give_transformers_vectors_as_well(
    make_model: MakeModel, loaders: ThreadPoolExecutor, model_type: str
) -> None:
    path = make_model(model_type)
    save_tiny_tokenizer(path, vocab_size=131)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = prompts(5)[4]
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    engine = make_engine(path, loaders, lora=None)
    engine.add_request("last", prompt, LAST)
    engine.add_request("mean", prompt, MEAN)
    found = run(engine)
    for name, expected in (("last", states[-1]), ("mean", states.mean(dim=0))):
        vector = torch.tensor(found[name].embedding)
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-4)


def test_an_aborted_embedding_leaves_nothing_behind(
    checkpoint: Path, loaders: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, loaders, scheduler=SchedulerConfig(max_num_batched_tokens=8))
    engine.add_request("r", [5] * 50, MEAN)
    engine.step()
    (output,) = engine.abort_request("r")
    assert (output.finish_reason, output.embedding) == (FinishReason.ABORT, None)
    # The next one of this id starts from nothing.
    engine.add_request("r", [5] * 3, MEAN)
    first = run(engine)["r"].embedding
    engine.add_request("s", [5] * 3, MEAN)
    assert run(engine)["s"].embedding == first


def test_a_prompt_that_starts_again_is_not_counted_twice() -> None:
    pooler = Pooler()
    request = Request(request_id="r", prompt_token_ids=[1, 2, 3], params=MEAN)

    def item(start: int, count: int) -> ScheduledRequest:
        return ScheduledRequest(
            request=request,
            num_tokens=count,
            num_computed_tokens=start,
            block_ids=(),
            slot=None,
            samples=start + count == 3,
        )

    states = torch.tensor([[1.0], [2.0], [6.0]])
    assert pooler.add([item(0, 2)], states[:2]) == {}
    assert pooler.add([item(0, 1)], states[:1]) == {}
    assert pooler.add([item(1, 2)], states[1:]) == {("r", 0): (3.0,)}


def test_what_gives_no_vector_is_refused(
    checkpoint: Path, loaders: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequestError, match="n must be 1"):
        SamplingParams(pooling="last", n=2)
    engine = make_engine(checkpoint, loaders)
    blind: Callable[[], object] = lambda self: SimpleNamespace(hidden_size=None)  # noqa: E731
    monkeypatch.setattr(type(engine._executor), "spec", property(blind))
    with pytest.raises(InvalidRequestError, match="does not give embeddings") as refused:
        engine.validate([1], LAST, None)
    assert refused.value.param == "model"
