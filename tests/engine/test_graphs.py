"""Recorded decode steps: which steps they are, that padding is inert, that nothing ever moves.

The recorder here runs the recorded function again on the same buffers, as a graph would.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters import LoRARequest
from engine import LLM, CacheConfig, LoRAConfig, SamplingParams, SchedulerConfig
from engine.config import EngineConfig
from engine.executor import LocalExecutor
from engine.graphs import GraphKey, GraphPlan
from engine.lora.adapter import load_adapter
from engine.step_batch import LoRARuns, StepBatch
from kernels.metadata import LoRABatch
from tests.engine.conftest import ADAPTERS
from tests.engine.oracle import train_like_adapter

LIMITS = LoRAConfig(max_loras=3, max_cpu_loras=12, max_lora_rank=16)
CACHE = CacheConfig(num_blocks=256, block_size=4)
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3)


class Rerun:
    """Records functions, and counts how often each runs again."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_runs = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.num_recorded += 1

        def replay() -> None:
            self.num_runs += 1
            run()

        return replay


class Unable:
    """A device that records no graph."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


def decode(runs: LoRARuns, contexts: list[int] | None = None, **changes: object) -> StepBatch:
    """A step that decodes one token of each of some sequences, in blocks of their own."""
    num_tokens = sum(length for length, _ in runs)
    lengths = np.array(contexts or [3] * num_tokens, dtype=np.int32)
    # Block 0 belongs to nobody.
    tables = np.arange(1, num_tokens * 4 + 1, dtype=np.int32).reshape(num_tokens, 4)
    last = lengths.astype(np.int64) - 1
    has_slots = any(slot is not None for _, slot in runs)
    fields: dict[str, object] = {
        "token_ids": np.arange(5, 5 + num_tokens, dtype=np.int64),
        "positions": last,
        "query_starts": np.arange(num_tokens + 1, dtype=np.int32),
        "context_lens": lengths,
        "block_tables": tables,
        "slot_mapping": tables[np.arange(num_tokens), last // 4].astype(np.int64) * 4 + last % 4,
        "num_decodes": num_tokens,
        "max_query_len": 1,
        "max_context_len": int(lengths.max()),
        "logits_rows": np.arange(num_tokens, dtype=np.int64),
        "lora_runs": runs if has_slots else (),
        "logits_lora_runs": runs if has_slots else (),
    }
    return StepBatch(**(fields | changes))  # type: ignore[arg-type]


def test_steps_of_sizes_between_share_a_graph_and_adapters_round_up_to_a_power_of_two() -> None:
    plan = GraphPlan(max_num_seqs=40, max_loras=6)

    def key(runs: LoRARuns) -> GraphKey | None:
        return plan.key_of(decode(runs), lambda slot: True)

    assert key(((3, None),)) == GraphKey(4, 0)
    assert key(((17, None), (1, 5))) == GraphKey(24, 1)
    assert key(((1, 0), (9, 2), (1, 4))) == GraphKey(16, 4)
    assert key(tuple((6, slot) for slot in range(6))) == GraphKey(40, 8)
    assert {key.max_adapters for key in plan.keys} == {0, 1, 2, 4, 8}
    assert max(key.num_tokens for key in plan.keys) == 40
    assert not any(key.max_adapters >= 2 * key.num_tokens for key in plan.keys)
    assert {key.max_adapters for key in GraphPlan(8, 0).keys} == {0}


@pytest.mark.parametrize(
    "step",
    [
        decode(((300, None),)),
        decode(((3, None),), num_decodes=2, max_query_len=2, context_lens=np.ones(2)),
        decode(((3, None),), logits_rows=np.arange(2)),
        decode(((1, None), (2, 1))),
        decode(((1, 0), (1, None), (1, 0), (1, None))),
    ],
    ids=["too many", "prefill", "no logits", "adapter that changes more", "adapters interleaved"],
)
def test_other_steps_have_no_graph(step: StepBatch) -> None:
    assert GraphPlan(512, 4).key_of(step, lambda slot: slot != 1) is None


@pytest.fixture(scope="module")
def executors(
    checkpoint: Path, adapter_paths: dict[str, Path]
) -> Iterator[tuple[LocalExecutor, LocalExecutor, Rerun]]:
    """Two executors of one model, recorded and eager, with adapters in slots 0 and 2."""
    scheduler = SchedulerConfig(max_num_seqs=8)
    config = EngineConfig(
        model=checkpoint, dtype="float32", device="cpu", cache=CACHE, lora=LIMITS,
        scheduler=scheduler,
    )  # fmt: skip
    recorder = Rerun()
    recorded, eager = LocalExecutor(config, recorder=recorder), LocalExecutor(config)
    for executor in (eager, recorded):
        executor.allocate_cache(64)
        write(executor, 0, adapter_paths["attention"])
        write(executor, 2, adapter_paths["mlp"])
    yield recorded, eager, recorder


def write(executor: LocalExecutor, slot: int, path: Path) -> None:
    request = LoRARequest(lora_name=path.name, lora_path=str(path))
    adapter = load_adapter(
        request, executor.targets, LIMITS, executor.spec.dtype, base_weight=executor.base_weight
    )
    executor.write_slot(slot, adapter)


def caches(executor: LocalExecutor) -> list[torch.Tensor]:
    attention = [paged for paged, _ in executor._model._attention]
    pairs = [(paged.key_cache, paged.value_cache) for paged in attention]
    return [cache for pair in pairs for cache in pair if cache is not None]


@pytest.mark.parametrize(
    "runs",
    [
        ((3, None),),
        ((1, 2),),
        ((2, None), (3, 0)),
        ((1, None), (1, 0), (3, 2)),
        ((5, 0), (3, 2)),
    ],
)
def test_a_recorded_step_is_the_eager_one_whatever_it_pads(
    executors: tuple[LocalExecutor, LocalExecutor, Rerun], runs: LoRARuns
) -> None:
    recorded, eager, recorder = executors
    num_tokens = sum(length for length, _ in runs)
    for executor in (recorded, eager):
        for cache in caches(executor):
            generator = torch.Generator().manual_seed(1)
            cache.copy_(torch.randn(cache.shape, generator=generator))
            # What padding would read if it read anything.
            cache[0] = torch.nan
    # A fuller step before leaves its traces in the buffers.
    recorded.execute(decode(((2, None), (3, 0), (3, 2)), [9] * 8))
    for cache, wanted in zip(caches(recorded), caches(eager), strict=True):
        cache.copy_(wanted)
    before = recorder.num_runs
    step = decode(runs, [3 + row for row in range(num_tokens)])
    found, expected = recorded.execute(step), eager.execute(step)
    assert recorder.num_runs == before + 1
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for cache, wanted in zip(caches(recorded), caches(eager), strict=True):
        torch.testing.assert_close(cache, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_slots_and_buffers_stay_in_place_while_adapters_come_and_go(
    executors: tuple[LocalExecutor, LocalExecutor, Rerun], adapter_paths: dict[str, Path]
) -> None:
    recorded, eager, _ = executors

    def places() -> list[int]:
        weights = recorded._model._lora_slots().weights
        groups = [group for group in weights._modules if group is not None]
        tensors = [t for g in groups for t in (g.lora_a, *g.lora_b, g.ranks)]
        assert recorded._graphs is not None
        inputs = recorded._graphs._inputs
        mirrors = (inputs._wide.device, inputs._narrow.device, inputs._tables.device)
        buffers = (*mirrors, inputs.rows, inputs._query_starts, recorded._graphs._logits)
        return [tensor.data_ptr() for tensor in (*tensors, *buffers, *caches(recorded))]

    before = places()
    step = decode(((2, None), (1, 0), (2, 1)))
    for slot, name in ((1, "rslora"), (1, "patterns"), (0, "one-layer"), (1, "rank-one")):
        for executor in (recorded, eager):
            executor.clear_slot(slot)
            write(executor, slot, adapter_paths[name])
        found, expected = recorded.execute(step), eager.execute(step)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert places() == before
    for executor in (recorded, eager):
        write(executor, 0, adapter_paths["attention"])


def test_base_model_alone_runs_no_lora(
    executors: tuple[LocalExecutor, LocalExecutor, Rerun], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, _, _ = executors
    seen: list[LoRABatch | None] = []
    forward = recorded._model.forward

    def spy(*args: object, lora: LoRABatch | None, **options: object) -> torch.Tensor:
        seen.append(lora)
        return forward(*args, lora=lora, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(recorded._model, "forward", spy)
    recorded.execute(decode(((3, None),)))
    recorded.execute(decode(((3, 2),)))
    assert seen[0] is None and seen[1] is not None
    assert seen[1].num_active == 1


def test_generation_with_graphs_is_generation_without(
    checkpoint: Path,
    adapter_paths: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_like_adapter(
        checkpoint, tmp_path / "dora", seed=9, r=4, target_modules=["q_proj"], use_dora=True
    )
    paths = {**adapter_paths, "dora": tmp_path / "dora"}
    names = [None, *ADAPTERS, "dora"] * 2
    prompts = [[3 + (5 * row + place) % 120 for place in range(1 + 3 * row)] for row in range(16)]
    loras = [
        None if name is None else LoRARequest(lora_name=name, lora_path=str(paths[name]))
        for name in names
    ]
    settings: dict[str, object] = {"dtype": "float32", "cache": CACHE, "lora": LIMITS}
    recorder = Rerun()
    results = []
    for made in (LocalExecutor, partial(LocalExecutor, recorder=recorder)):
        monkeypatch.setattr("engine.engine.LocalExecutor", made)
        llm = LLM(checkpoint, **settings)
        results.append(llm.generate(prompts, PARAMS, lora=loras))
        llm.close()
    assert 0 < recorder.num_runs < sum(len(r.completions[0].token_ids) for r in results[1])
    for eager, recorded in zip(*results, strict=True):
        assert recorded.completions[0].token_ids == eager.completions[0].token_ids
        for found, wanted in zip(
            recorded.completions[0].logprobs, eager.completions[0].logprobs, strict=True
        ):
            assert found.chosen.logprob == pytest.approx(wanted.chosen.logprob, abs=1e-5)


def test_where_nothing_can_be_recorded_steps_run_eagerly_and_the_log_says_so(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(model=checkpoint, dtype="float32", device="cpu", cache=CACHE, lora=None)
    executor = LocalExecutor(config, recorder=Unable())
    executor.allocate_cache(64)
    assert "not permitted when stream is capturing" in caplog.text
    assert executor.execute(decode(((3, None),))).isfinite().all()


def test_a_cpu_records_nothing(checkpoint: Path) -> None:
    executor = LocalExecutor(EngineConfig(model=checkpoint, dtype="float32", cache=CACHE))
    executor.allocate_cache(64)
    assert executor._graphs is None
