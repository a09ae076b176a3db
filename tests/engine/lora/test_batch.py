"""A LoRABatch must say of every token exactly what its run said."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.lora.batch import build_lora_batch

RANKS = [8, 4, 0, 16]
RUNS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0, 1, 3])), max_size=12)


def test_a_step_without_adapters_needs_no_batch() -> None:
    assert build_lora_batch([(3, None), (1, None)], RANKS) is None
    assert build_lora_batch([], RANKS) is None
    assert build_lora_batch([(0, 1), (2, None)], RANKS) is None


def test_neighbouring_runs_of_one_slot_become_one_segment() -> None:
    batch = build_lora_batch([(1, 0), (1, 0), (0, 3), (2, None), (1, None), (4, 1)], RANKS)
    assert batch is not None
    assert batch.token_slots.tolist() == [0, 0, -1, -1, -1, 1, 1, 1, 1]
    assert batch.segment_starts.tolist() == [0, 2, 5, 9]
    assert batch.segment_slots.tolist() == [0, -1, 1]
    assert batch.max_segment_len == 4
    assert batch.max_active_rank == 8
    assert batch.num_active == 2


@settings(deadline=None)
@given(RUNS)
def test_segments_and_tokens_tell_the_same(runs: list[tuple[int, int | None]]) -> None:
    batch = build_lora_batch(runs, RANKS)
    slots = [-1 if slot is None else slot for length, slot in runs for _ in range(length)]
    used = {slot for slot in slots if slot >= 0}
    if batch is None:
        assert not used
        return
    assert batch.token_slots.tolist() == slots
    assert batch.token_slots.dtype == batch.segment_starts.dtype == torch.int32
    starts = batch.segment_starts.long()
    lengths = starts.diff()
    assert starts[0] == 0 and (lengths > 0).all() and lengths.max() == batch.max_segment_len
    assert torch.equal(batch.segment_slots.repeat_interleave(lengths), batch.token_slots)
    assert (batch.segment_slots.diff() != 0).all()
    assert batch.num_active == len(used)
    assert batch.max_active_rank == max(RANKS[slot] for slot in used)
