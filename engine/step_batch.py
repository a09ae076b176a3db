"""One step as plain arrays: what every device that runs it has to know.

Knows tokens, positions, blocks and slots. Knows nothing of requests beyond the share of the step
that the scheduler gave them, of devices or of models. Small, and pickled whole for other processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.outputs import ScheduledRequest

# Numbers of consecutive tokens and the slot of each, None for the base model.
LoRARuns = tuple[tuple[int, int | None], ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of a step, in the order of `AttentionBatch`, whose fields have its meaning here.

    token_ids, positions   [T] int64
    query_starts           [seqs + 1] int32
    context_lens           [seqs] int32
    block_tables           [seqs, max_blocks] int32    0 past the context
    slot_mapping           [T] int64
    logits_rows            [R] int64    the tokens whose logits are wanted
    lora_runs              the slots of the T tokens
    logits_lora_runs       the slots of the R tokens
    hidden_rows            [H] int64    the tokens whose final hidden states are wanted
    hidden_lora_runs       the slots of the H tokens
    """

    token_ids: np.ndarray
    positions: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    slot_mapping: np.ndarray
    num_decodes: int
    max_query_len: int
    max_context_len: int
    logits_rows: np.ndarray
    lora_runs: LoRARuns
    logits_lora_runs: LoRARuns
    hidden_rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    hidden_lora_runs: LoRARuns = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_step(
    scheduled: Sequence[ScheduledRequest],
    logits_ranges: Sequence[range],
    block_size: int,
    hidden_ranges: Sequence[range] = (),
) -> StepBatch:
    """Lay out what was scheduled; the ranges count from each item's first token."""
    lengths = np.array([item.num_tokens for item in scheduled], dtype=np.int32)
    contexts = lengths + np.array([item.num_computed_tokens for item in scheduled], np.int32)
    starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    tables = _block_tables(scheduled, -(-contexts // block_size))
    ids: list[int] = []
    for item in scheduled:
        stop = item.num_computed_tokens + item.num_tokens
        ids += item.request.token_slice(item.num_computed_tokens, stop)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(ids)) - np.repeat(starts[1:] - contexts, lengths)
    blocks = tables[sequence, positions // block_size].astype(np.int64)
    spans = [(item, range(item.num_tokens)) for item in scheduled]
    return StepBatch(
        token_ids=np.array(ids, dtype=np.int64),
        positions=positions,
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables,
        # Flat KV position of each token: its block's start plus its place in the block.
        slot_mapping=blocks * block_size + positions % block_size,
        num_decodes=int((lengths == 1).sum()),
        max_query_len=int(lengths.max()),
        max_context_len=int(contexts.max()),
        logits_rows=_rows(starts, logits_ranges),
        lora_runs=_lora_runs(spans),
        logits_lora_runs=_lora_runs(list(zip(scheduled, logits_ranges, strict=True))),
        hidden_rows=_rows(starts, hidden_ranges),
        hidden_lora_runs=_lora_runs(list(zip(scheduled, hidden_ranges, strict=False))),
    )


def _rows(starts: np.ndarray, ranges: Sequence[range]) -> np.ndarray:
    spans = zip(starts.tolist(), ranges, strict=False)
    return np.array([start + row for start, span in spans for row in span], dtype=np.int64)


def _block_tables(scheduled: Sequence[ScheduledRequest], widths: np.ndarray) -> np.ndarray:
    tables = np.zeros((len(scheduled), int(widths.max())), dtype=np.int32)
    for row, (item, width) in enumerate(zip(scheduled, widths.tolist(), strict=True)):
        tables[row, :width] = item.block_ids[:width]
    return tables


def _lora_runs(spans: Sequence[tuple[ScheduledRequest, range]]) -> LoRARuns:
    """Neighbours of one slot are one run; () when no token has an adapter."""
    runs: list[tuple[int, int | None]] = []
    for item, span in spans:
        for length, slot in _split_at_start(item, span):
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0] + length, slot)
            elif length:
                runs.append((length, slot))
    return tuple(runs) if any(slot is not None for _, slot in runs) else ()


def _split_at_start(item: ScheduledRequest, span: range) -> Iterator[tuple[int, int | None]]:
    """Split a span of the item's tokens where its adapter starts."""
    num_base = item.request.adapter_start - item.num_computed_tokens - span.start
    num_base = min(max(num_base, 0), len(span))
    yield num_base, None
    yield len(span) - num_base, item.slot
