"""Restricted sequences in one batch with free ones: text that matches, neighbours unmoved."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine import CacheConfig, Engine, EngineConfig, SamplingParams, SchedulerConfig
from engine.async_engine import AsyncEngine
from engine.errors import InvalidRequestError
from engine.outputs import FinishReason, RequestOutput
from engine.structured import StructuredOutput

PROMPT = [10, 20, 30, 40, 50]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 99, "minimum": 0},
        "k": {"enum": ["a", "b"]},
    },
    "required": ["n", "k"],
    "additionalProperties": False,
}
AS_SCHEMA = StructuredOutput(kind="json_schema", source=json.dumps(SCHEMA))
AS_DIGITS = StructuredOutput(kind="regex", source="[0-9]{12}")


def config(checkpoint: Path, **settings: object) -> EngineConfig:
    settings.setdefault("cache", CacheConfig(num_blocks=64, block_size=8))
    return EngineConfig(model=checkpoint, dtype="float32", num_threads=1, **settings)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def texts(engine: Engine) -> dict[tuple[str, int], str]:
    """Run to the end; every sequence's text."""
    found: dict[tuple[str, int], str] = {}
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        assert output.error is None
        key = (output.request_id, output.index)
        found[key] = found.get(key, "") + output.text
    return found


def test_restricted_and_free_sequences_share_a_batch(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine = Engine(config(checkpoint), executor)
    engine.add_request("free", PROMPT, free)
    alone = texts(engine)

    engine.add_request("free", PROMPT, free)
    restricted = SamplingParams(seed=3, n=4, max_tokens=None, structured=AS_SCHEMA)
    engine.add_request("json", PROMPT, restricted)
    engine.add_request("digits", PROMPT, SamplingParams(temperature=0, structured=AS_DIGITS))
    found = texts(engine)

    assert found.pop(("free", 0)) == alone["free", 0]
    assert re.fullmatch("[0-9]{12}", found.pop(("digits", 0)))
    values = [json.loads(text) for text in found.values()]
    assert len(values) == 4 and len({json.dumps(value) for value in values}) > 1
    assert all(value.keys() == {"n", "k"} and 0 <= value["n"] <= 99 for value in values)
    assert {value["k"] for value in values} <= {"a", "b"}


def test_preempted_sequences_keep_their_place_in_the_grammar(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    small = CacheConfig(num_blocks=8, block_size=8)
    engine = Engine(config(checkpoint, cache=small, max_model_len=64), executor)
    pattern = StructuredOutput(kind="regex", source="(ab){20}")
    for index in range(3):
        params = SamplingParams(seed=index, max_tokens=None, structured=pattern)
        engine.add_request(str(index), PROMPT, params)
    assert set(texts(engine).values()) == {"ab" * 20}
    assert engine.stats().total_preemptions > 0


def test_the_length_limit_may_cut_a_restricted_text(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = Engine(config(checkpoint), executor)
    engine.add_request("r", PROMPT, SamplingParams(max_tokens=3, structured=AS_DIGITS))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert re.fullmatch("[0-9]{3}", "".join(output.text for output in outputs))


def test_a_grammar_that_outgrows_its_limits_ends_its_sequence_alone(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = Engine(config(checkpoint), executor)
    huge = StructuredOutput(kind="regex", source="(x?[a-z]{0,900}y?){0,900}z[^q]{500}")
    engine.add_request("huge", PROMPT, SamplingParams(max_tokens=60, structured=huge))
    engine.add_request("free", PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    last: dict[str, RequestOutput] = {}
    while engine.has_work:
        last.update({output.request_id: output for output in engine.step()})
    assert last["free"].finish_reason is FinishReason.LENGTH
    # Either it was within the limits or it failed by name, never as our own fault.
    assert last["huge"].error is None or isinstance(last["huge"].error, InvalidRequestError)


@pytest.mark.parametrize("params", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_an_end_that_must_not_come_does_not_go_with_structure(params: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(structured=AS_DIGITS, **params)
    assert caught.value.param in params


def test_a_full_queue_refuses_restricted_requests_too(
    checkpoint: Path, executor: ThreadPoolExecutor
) -> None:
    engine = Engine(config(checkpoint, scheduler=SchedulerConfig(max_waiting=1)), executor)
    engine.add_request("a", PROMPT, SamplingParams(structured=AS_DIGITS))
    with pytest.raises(Exception, match="full"):
        engine.add_request("b", PROMPT, SamplingParams(structured=AS_DIGITS))


async def test_the_async_engine_refuses_a_bad_grammar_before_it_starts(checkpoint: Path) -> None:
    engine = AsyncEngine(config(checkpoint))
    await engine.start()
    try:
        bad = SamplingParams(structured=StructuredOutput(kind="regex", source="("))
        with pytest.raises(InvalidRequestError):
            await anext(aiter(engine.generate("bad", PROMPT, bad)))
        good = SamplingParams(temperature=0, structured=AS_DIGITS)
        text = ""
        async for outputs in engine.generate("good", PROMPT, good):
            text += "".join(output.text for output in outputs)
        assert re.fullmatch("[0-9]{12}", text)
        assert engine.stats().num_running == 0
    finally:
        await engine.stop()
