"""The asyncio engine: streams, disconnects, adapters coming and going, an engine that ends."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from adapters import LoRARequest
from engine import AsyncEngine, CacheConfig, EngineConfig, LoRAConfig, SamplingParams
from engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedModelError,
)
from engine.outputs import FinishReason

PROMPT = [10, 20, 30, 40, 50]
ENDLESS = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)


@pytest_asyncio.fixture
async def engine(checkpoint: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(
        EngineConfig(
            model=checkpoint,
            dtype="float32",
            num_threads=1,
            cache=CacheConfig(num_blocks=128, block_size=8),
            lora=LoRAConfig(max_loras=2, max_cpu_loras=4),
        )
    )
    await engine.start()
    yield engine
    await engine.stop()


async def load(engine: AsyncEngine, path: Path, name: str) -> LoRARequest:
    info = await engine.load_lora(LoRARequest(lora_name=name, lora_path=str(path)))
    return LoRARequest(lora_name=name, lora_path=str(path), digest=info.digest)


async def collect(engine: AsyncEngine, request_id: str, **options: object) -> list[int]:
    params = options.pop("params", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    ids: list[int] = []
    async for outputs in engine.generate(request_id, PROMPT, params, **options):
        for output in outputs:
            assert output.error is None
            ids += output.token_ids
    return ids


async def until_idle(engine: AsyncEngine) -> None:
    for _ in range(500):
        stats = engine.stats()
        if not stats.num_running + stats.num_waiting + stats.num_slots_in_use:
            break
        await asyncio.sleep(0.01)
    assert stats.num_running + stats.num_waiting + stats.num_slots_in_use == 0
    assert stats.num_free_blocks == stats.num_blocks


async def test_concurrent_streams_of_several_adapters_equal_each_alone(
    engine: AsyncEngine, adapter_paths: dict[str, Path]
) -> None:
    loras = [await load(engine, path, name) for name, path in adapter_paths.items()]
    alone = [await collect(engine, f"alone{i}", lora=lora) for i, lora in enumerate(loras)]
    together = await asyncio.gather(
        *(collect(engine, f"mixed{i}", lora=lora) for i, lora in enumerate(loras))
    )
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == len(loras)


async def test_closing_a_stream_frees_its_blocks_and_slot(
    engine: AsyncEngine, adapter_paths: dict[str, Path]
) -> None:
    lora = await load(engine, adapter_paths["mlp"], "mlp")
    stream = engine.generate("r", PROMPT, ENDLESS, lora=lora)
    await anext(stream)
    await stream.aclose()
    await until_idle(engine)


async def test_cancelled_consumer_frees_everything(engine: AsyncEngine) -> None:
    tasks = [
        asyncio.create_task(collect(engine, f"r{index}", params=ENDLESS)) for index in range(8)
    ]
    for delay, task in enumerate(tasks):
        await asyncio.sleep(0.001 * delay)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    await until_idle(engine)


async def test_abort_ends_the_stream_with_its_reason(engine: AsyncEngine) -> None:
    stream = engine.generate("r", PROMPT, ENDLESS)
    await anext(stream)
    await engine.abort("r")
    await engine.abort("unknown")
    outputs = [output async for items in stream for output in items]
    assert outputs[-1].finish_reason is FinishReason.ABORT


async def test_what_is_not_finished_in_time_ends_waiting_or_running(engine: AsyncEngine) -> None:
    async def ended_by(request_id: str, timeout_s: float) -> Exception | None:
        stream = engine.generate(request_id, PROMPT, ENDLESS, timeout_s=timeout_s)
        return [output async for items in stream for output in items][-1].error

    errors = await asyncio.gather(*(ended_by(f"r{index}", 0.001) for index in range(100)))
    assert all(isinstance(error, DeadlineExceededError) for error in errors)
    assert await ended_by("free", 600.0) is None
    await until_idle(engine)


async def test_a_deadline_passes_while_every_request_waits_for_weights(
    engine: AsyncEngine, adapter_paths: dict[str, Path]
) -> None:
    """Nothing runs then, so nothing but the deadline wakes the engine."""
    lora = await load(engine, adapter_paths["mlp"], "mlp")
    for name in ("attention", "rslora", "patterns", "one-layer"):
        await load(engine, adapter_paths[name], name)
    assert lora.digest not in {each.digest for each in engine.loras() if each.host}
    is_over = threading.Event()
    for _ in range(4):
        engine._loaders.submit(is_over.wait)
    try:
        async with asyncio.timeout(60):
            stream = engine.generate("r", PROMPT, ENDLESS, lora=lora, timeout_s=0.05)
            (output,) = await anext(stream)
        assert isinstance(output.error, DeadlineExceededError)
    finally:
        is_over.set()


async def test_a_full_queue_is_told_before_any_work(engine: AsyncEngine) -> None:
    engine.check_room(2048)
    with pytest.raises(QueueFullError):
        engine.check_room(2049)


async def test_bad_request_is_raised_before_the_first_item(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError):
        await anext(engine.generate("r", [], SamplingParams()))
    assert await collect(engine, "r2")


async def test_id_in_use_does_not_disturb_its_owner(engine: AsyncEngine) -> None:
    stream = engine.generate("same", PROMPT, ENDLESS)
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="in use"):
        await anext(engine.generate("same", PROMPT, ENDLESS))
    assert await anext(stream)
    await stream.aclose()


async def test_forced_removal_ends_the_adapters_streams_only(
    engine: AsyncEngine, adapter_paths: dict[str, Path]
) -> None:
    lora = await load(engine, adapter_paths["mlp"], "mlp")
    base = engine.generate("base", PROMPT, ENDLESS)
    adapted = engine.generate("adapted", PROMPT, ENDLESS, lora=lora)
    await anext(base)
    await anext(adapted)
    await engine.remove_lora(lora.digest or "", force=True)
    outputs = [output async for items in adapted for output in items]
    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert engine.loras() == []
    assert await anext(base)
    await base.aclose()


async def test_pinned_adapter_survives_others(
    engine: AsyncEngine, adapter_paths: dict[str, Path]
) -> None:
    pinned = await load(engine, adapter_paths["mlp"], "mlp")
    await engine.pin_lora(pinned.digest or "", in_slot=True)
    for index, (name, path) in enumerate(adapter_paths.items()):
        lora = await load(engine, path, name)
        await collect(engine, f"r{index}", lora=lora)
    held = {item.digest: item for item in engine.loras()}
    assert held[pinned.digest or ""].pinned and held[pinned.digest or ""].slot is not None


async def test_stop_ends_open_streams_with_an_error(checkpoint: Path) -> None:
    engine = AsyncEngine(EngineConfig(model=checkpoint, dtype="float32", num_threads=1))
    await engine.start()
    stream = engine.generate("r", PROMPT, ENDLESS)
    await anext(stream)
    await engine.stop()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        await anext(engine.generate("later", PROMPT, ENDLESS))
    assert not engine.is_alive


async def test_start_raises_what_loading_raises(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    engine = AsyncEngine(EngineConfig(model=tmp_path))
    with pytest.raises(UnsupportedModelError):
        await engine.start()


async def test_later_tokens_of_a_stream_come_together(checkpoint: Path) -> None:
    # An interval that never ends in a test: only the first output and the last may go.
    engine = AsyncEngine(
        EngineConfig(model=checkpoint, dtype="float32", num_threads=1), stream_interval_s=1000
    )
    await engine.start()
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        items = [item async for item in engine.generate("r", PROMPT, params)]
        assert [len(output.token_ids) for item in items for output in item] == [1, 7]
        assert items[-1][-1].request_finished
    finally:
        await engine.stop()
