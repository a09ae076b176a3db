"""What a caller of the synchronous engine sees: endings, refusals, and nothing left behind."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters import LoRARequest
from engine import CacheConfig, Engine, EngineConfig, LoRAConfig, SamplingParams, SchedulerConfig
from engine.errors import (
    EngineDeadError,
    InvalidAdapterError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from engine.outputs import FinishReason, RequestOutput

PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def make_engine(checkpoint: Path, executor: ThreadPoolExecutor, **settings: object) -> Engine:
    settings.setdefault("cache", CacheConfig(num_blocks=64, block_size=8))
    settings.setdefault("lora", LoRAConfig(max_loras=2, max_cpu_loras=3))
    return Engine(
        EngineConfig(model=checkpoint, dtype="float32", num_threads=1, **settings), executor
    )


def run(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def load(engine: Engine, path: Path, name: str = "a") -> LoRARequest:
    assert engine.adapters is not None
    info = engine.adapters.load(LoRARequest(lora_name=name, lora_path=str(path)))
    return LoRARequest(lora_name=name, lora_path=str(path), digest=info.digest)


def assert_nothing_is_held(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_slots_in_use == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_length_and_usage(checkpoint: Path, executor: ThreadPoolExecutor) -> None:
    engine = make_engine(checkpoint, executor)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("r", PROMPT, params)
    outputs = run(engine)
    assert [len(output.token_ids) for output in outputs] == [1, 1, 1, 1]
    last = outputs[-1]
    assert last.finish_reason is FinishReason.LENGTH and last.request_finished
    assert (last.num_prompt_tokens, last.num_output_tokens) == (5, 4)
    assert_nothing_is_held(engine)


def test_eos_stops_without_a_stop_reason_and_stop_token_names_itself(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor)
    force_eos = SamplingParams(temperature=0, logit_bias=((2, 100.0),))
    engine.add_request("eos", PROMPT, force_eos)
    force_stop = SamplingParams(temperature=0, logit_bias=((9, 100.0),), stop_token_ids=(9,))
    engine.add_request("id", PROMPT, force_stop)
    outputs = {output.request_id: output for output in run(engine)}
    assert outputs["eos"].finish_reason is FinishReason.STOP
    assert (outputs["eos"].stop_reason, outputs["eos"].text) == (None, "")
    assert (outputs["id"].finish_reason, outputs["id"].stop_reason) == (FinishReason.STOP, 9)
    assert_nothing_is_held(engine)


def test_ignore_eos_and_min_tokens_generate_past_the_eos(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor)
    bias = ((2, 50.0),)
    engine.add_request(
        "ignore", PROMPT, SamplingParams(max_tokens=3, ignore_eos=True, logit_bias=bias)
    )
    engine.add_request("min", PROMPT, SamplingParams(max_tokens=9, min_tokens=4, logit_bias=bias))
    last = {output.request_id: output for output in run(engine)}
    assert last["ignore"].num_output_tokens == 3
    assert last["ignore"].finish_reason is FinishReason.LENGTH
    assert last["min"].num_output_tokens == 5


def test_n_sequences_finish_as_one_request(checkpoint: Path, executor: ThreadPoolExecutor) -> None:
    engine = make_engine(checkpoint, executor)
    engine.add_request("r", PROMPT, SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True))
    outputs = run(engine)
    texts = {index: [] for index in range(3)}
    for output in outputs:
        texts[output.index] += output.token_ids
    assert len({tuple(ids) for ids in texts.values()}) > 1
    assert [output.request_finished for output in outputs].count(True) == 1
    assert outputs[-1].request_finished
    assert_nothing_is_held(engine)


def test_context_end_bounds_a_request_without_max_tokens(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor, max_model_len=16)
    engine.add_request("r", PROMPT, SamplingParams(max_tokens=None, ignore_eos=True))
    assert run(engine)[-1].num_output_tokens == 11


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], {}, "prompt"),
        ([131], {}, "prompt"),
        ([-1], {}, "prompt"),
        (PROMPT, {"stop_token_ids": (131,)}, "stop_token_ids"),
        (PROMPT, {"logit_bias": ((131, 1.0),)}, "logit_bias"),
    ],
)
def test_unservable_requests_are_refused_by_parameter(
    checkpoint: Path,
    executor: ThreadPoolExecutor,
    prompt: list[int],
    params: dict[str, object],
    param: str,
) -> None:
    engine = make_engine(checkpoint, executor)
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("r", prompt, SamplingParams(**params))
    assert caught.value.param == param
    assert_nothing_is_held(engine)


def test_prompt_over_the_context_names_both_lengths(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor, max_model_len=16)
    with pytest.raises(PromptTooLongError, match=r"16 tokens.*20 input tokens"):
        engine.add_request("r", [5] * 20, SamplingParams())


def test_full_queue_refuses_all_sequences_of_a_request(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    scheduler = SchedulerConfig(max_waiting=3)
    engine = make_engine(checkpoint, executor, scheduler=scheduler)
    engine.add_request("first", PROMPT, SamplingParams(n=2))
    with pytest.raises(QueueFullError):
        engine.add_request("second", PROMPT, SamplingParams(n=2))
    run(engine)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_frees_everything_at_any_time(
    checkpoint: Path,
    adapter_paths: dict[str, Path],
    executor: ThreadPoolExecutor,
    num_steps: int,
) -> None:
    engine = make_engine(checkpoint, executor, scheduler=SchedulerConfig(max_num_batched_tokens=4))
    lora = load(engine, adapter_paths["mlp"])
    engine.add_request("r", PROMPT, SamplingParams(n=2, max_tokens=50), lora=lora)
    for _ in range(num_steps):
        engine.step()
    ended = engine.abort_request("r")
    assert [output.finish_reason for output in ended] == [FinishReason.ABORT] * 2
    assert engine.abort_request("r") == []
    assert not engine.has_work
    assert_nothing_is_held(engine)


def test_removed_adapter_serves_who_began_with_it_and_is_freed_then(
    checkpoint: Path, adapter_paths: dict[str, Path], executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor)
    assert engine.adapters is not None
    lora = load(engine, adapter_paths["mlp"])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("before", PROMPT, params, lora=lora)
    expected = [output.token_ids for output in run(engine)]
    engine.add_request("during", PROMPT, params, lora=lora)
    engine.step()
    engine.adapters.remove(lora.digest or "")
    assert engine.adapters.resident()
    rest = [output.token_ids for output in run(engine)]
    assert rest == expected[1:]
    assert engine.adapters.resident() == []
    assert_nothing_is_held(engine)


def test_adapter_that_left_host_memory_is_read_again(
    checkpoint: Path, adapter_paths: dict[str, Path], executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor, lora=LoRAConfig(max_loras=1, max_cpu_loras=1))
    params = SamplingParams(temperature=0, max_tokens=3)
    for name in ("mlp", "rslora", "mlp", "patterns", "mlp"):
        engine.add_request(name, PROMPT, params, lora=load(engine, adapter_paths[name], name))
        assert all(output.error is None for output in run(engine))


def test_adapter_whose_files_vanished_fails_its_requests_only(
    checkpoint: Path, adapter_paths: dict[str, Path], executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor)
    good = load(engine, adapter_paths["mlp"])
    gone = LoRARequest(lora_name="gone", lora_path="/nowhere", digest="0" * 64)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add_request("good", PROMPT, params, lora=good)
    engine.add_request("gone", PROMPT, params, lora=gone)
    last = {output.request_id: output for output in run(engine)}
    assert last["good"].finish_reason is FinishReason.LENGTH
    assert last["gone"].finish_reason is FinishReason.ERROR
    assert isinstance(last["gone"].error, InvalidAdapterError)
    assert_nothing_is_held(engine)


def test_prefix_cache_is_never_shared_between_adapters(
    checkpoint: Path, adapter_paths: dict[str, Path], executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor)
    prompt = list(range(10, 50))
    params = SamplingParams(temperature=0, max_tokens=1)
    cached = {}
    for turn in range(2):
        for name in ("mlp", "rslora", None):
            lora = None if name is None else load(engine, adapter_paths[name], name)
            engine.add_request(f"{name}{turn}", prompt, params, lora=lora)
            cached[name, turn] = run(engine)[-1].num_cached_tokens
    assert [cached[name, 0] for name in ("mlp", "rslora", None)] == [0, 0, 0]
    assert [cached[name, 1] for name in ("mlp", "rslora", None)] == [32, 32, 32]


def test_engine_without_lora_refuses_adapters_and_serves_the_base(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor, lora=None)
    lora = LoRARequest(lora_name="a", lora_path="a", digest="0")
    with pytest.raises(InvalidRequestError):
        engine.add_request("r", PROMPT, SamplingParams(), lora=lora)
    engine.add_request("r", PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    assert run(engine)[-1].num_output_tokens == 2


def test_failed_step_ends_the_engine(
    checkpoint: Path, adapter_paths: dict[str, Path], executor: ThreadPoolExecutor
) -> None:
    engine = make_engine(checkpoint, executor)
    lora = load(engine, adapter_paths["mlp"])
    engine.add_request("r", PROMPT, SamplingParams(), lora=lora)

    def fail(slot: int, digest: str) -> None:
        raise MemoryError

    assert engine.adapters is not None
    engine.adapters.fill_slot = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        run(engine)
    with pytest.raises(EngineDeadError):
        engine.step()
