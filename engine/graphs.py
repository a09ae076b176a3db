"""Decode steps as recorded graphs: a step of few launches for the host, whatever the model's depth.

A graph reads and writes fixed addresses. So there is one set of input buffers, which each step
fills; a step of fewer tokens than its graph pads it with tokens that write nowhere, see nothing and
use no adapter. Slots of adapters have fixed places: their contents change between steps, and a
graph that was recorded before sees what is there now.

Graphs differ in the number of tokens and in how many adapters they make room for: none, so that the
base model alone runs no LoRA code, or a power of two. Knows steps and buffers. How a graph is
recorded is the recorder's: `CudaRecorder` on a GPU.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from engine.models.paged_model import PagedModel
from engine.step_batch import LoRARuns, StepBatch
from kernels.metadata import AttentionBatch, LoRABatch

logger = logging.getLogger(__name__)

_NO_SLOT = -1
# Every size costs a recording for each number of adapters. From 16 on, at most a third of a step's
# tokens are padding; below, a step's time is that of reading the weights.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Which graph: of so many tokens, one for each sequence, with room for so many adapters."""

    num_tokens: int
    max_adapters: int


class GraphPlan:
    """Which graphs there are, and which of them runs a step."""

    def __init__(self, max_num_seqs: int, max_loras: int) -> None:
        top = min(max_num_seqs, _SIZES[-1])
        self._sizes = [size for size in _SIZES if size < top] + [top]
        self._adapters = [0]
        while max_loras and self._adapters[-1] < max_loras:
            self._adapters.append(max(1, 2 * self._adapters[-1]))

    @property
    def max_tokens(self) -> int:
        return self._sizes[-1]

    @property
    def max_adapters(self) -> int:
        return self._adapters[-1]

    @property
    def keys(self) -> list[GraphKey]:
        """Every graph, the largest first: later ones then fit into its memory."""
        return [
            GraphKey(size, adapters)
            for size in reversed(self._sizes)
            for adapters in reversed(self._adapters)
            # A step has no more adapters than tokens.
            if adapters == 0 or adapters < 2 * size
        ]

    def key_of(self, step: StepBatch, is_plain: Callable[[int], bool]) -> GraphKey | None:
        """The graph for a step, None for one that is not recorded.

        Recorded are steps that decode one token of each sequence and sample after each, with
        adapters that only add B @ A, which ``is_plain`` says of a slot.
        """
        num_tokens = step.num_tokens
        if num_tokens > self.max_tokens or step.num_decodes != num_tokens:
            return None
        if step.num_decodes != len(step.context_lens) or len(step.logits_rows) != num_tokens:
            return None
        slots = {slot for _, slot in step.lora_runs if slot is not None}
        if not all(map(is_plain, slots)):
            return None
        size = next(size for size in self._sizes if size >= num_tokens)
        adapters = next(count for count in self._adapters if count >= len(slots))
        # Equal slots are side by side, the base model's tokens first; anything else is not planned.
        if len(step.lora_runs) > len(slots) + 1:
            return None
        return GraphKey(size, adapters)


class StaticInputs:
    """The buffers that every graph reads, a prefix of each."""

    def __init__(self, plan: GraphPlan, max_blocks: int, max_rank: int, device: torch.device):
        tokens, segments = plan.max_tokens, plan.max_adapters + 2

        def buffer(*shape: int, fill: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        self._max_rank = max_rank
        self.token_ids = buffer(tokens, fill=0, dtype=torch.int64)
        self.positions = buffer(tokens, fill=0, dtype=torch.int64)
        self.slot_mapping = buffer(tokens, fill=-1, dtype=torch.int64)
        self.rows = torch.arange(tokens, device=device)
        self._query_starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        self._context_lens = buffer(tokens, fill=0, dtype=torch.int32)
        self._block_tables = buffer(tokens, max_blocks, fill=0, dtype=torch.int32)
        self._token_slots = buffer(tokens, fill=_NO_SLOT, dtype=torch.int32)
        self._segment_starts = buffer(segments + 1, fill=0, dtype=torch.int32)
        self._segment_slots = buffer(segments, fill=_NO_SLOT, dtype=torch.int32)

    def fill(self, step: StepBatch, key: GraphKey) -> None:
        """Write a step, and after it tokens without effect."""
        size = key.num_tokens
        _put(self.token_ids[:size], step.token_ids, 0)
        _put(self.positions[:size], step.positions, 0)
        _put(self.slot_mapping[:size], step.slot_mapping, -1)
        _put(self._context_lens[:size], step.context_lens, 0)
        num_seqs, width = step.block_tables.shape
        self._block_tables[:num_seqs, :width].copy_(torch.from_numpy(step.block_tables))
        if key.max_adapters:
            slots, starts, segment_slots = _segments(step, key)
            _put(self._token_slots[:size], slots, _NO_SLOT)
            self._segment_starts[: len(starts)].copy_(torch.from_numpy(starts))
            self._segment_slots[: len(segment_slots)].copy_(torch.from_numpy(segment_slots))

    def attention(self, key: GraphKey, max_context_len: int) -> AttentionBatch:
        """What a graph's attention reads; kernels divide their work for the longest context."""
        size = key.num_tokens
        return AttentionBatch(
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self.slot_mapping[:size],
            num_decodes=size,
            max_query_len=1,
            max_context_len=max_context_len,
        )

    def lora(self, key: GraphKey) -> LoRABatch | None:
        """What a graph's adapters read, None for the base model alone."""
        if not key.max_adapters:
            return None
        num_segments = key.max_adapters + 2
        return LoRABatch(
            token_slots=self._token_slots[: key.num_tokens],
            segment_starts=self._segment_starts[: num_segments + 1],
            segment_slots=self._segment_slots[:num_segments],
            # With room for an adapter for each token, tokens share no weights.
            max_segment_len=1 if key.max_adapters >= key.num_tokens else key.num_tokens,
            max_active_rank=self._max_rank,
            num_active=key.max_adapters,
        )


class Recorder(Protocol):
    """Records what a function launches."""

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return a function that launches it again and returns the same tensor, filled anew."""


class GraphRunner:
    """A model's recorded steps."""

    def __init__(self, model: PagedModel, plan: GraphPlan, inputs: StaticInputs) -> None:
        self._model = model
        self._plan = plan
        self._inputs = inputs
        self._graphs: dict[GraphKey, Callable[[], torch.Tensor]] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def record_all(self, recorder: Recorder) -> None:
        """Record every graph of the plan; afterwards the cache and the slots must stay in place.

        Where one cannot be recorded, that is logged, and all steps run eagerly.
        """
        for key in self._plan.keys:
            try:
                self._graphs[key] = recorder.record(partial(self._forward, key))
            except RuntimeError as error:
                logger.warning("no graph is used, since %s cannot be recorded: %s", key, error)
                self._graphs.clear()
                return

    def run(self, step: StepBatch) -> torch.Tensor | None:
        """Return the logits [R, vocab] of a step, None when it has no graph.

        They are overwritten by the next step.
        """
        key = self._plan.key_of(step, self._model.is_plain)
        if key is None or key not in self._graphs:
            return None
        self._inputs.fill(step, key)
        return self._graphs[key]()[: step.num_tokens]

    def _forward(self, key: GraphKey) -> torch.Tensor:
        inputs, size = self._inputs, key.num_tokens
        lora = inputs.lora(key)
        return self._model.forward(
            inputs.token_ids[:size],
            inputs.positions[:size],
            attention=inputs.attention(key, self._model.spec.max_model_len),
            lora=lora,
            logits_rows=inputs.rows[:size],
            logits_lora=lora,
        )


class CudaRecorder:
    """CUDA graphs in one memory pool; they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        # Kernels are compiled, and libraries set up, before anything is recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


def _put(buffer: torch.Tensor, values: np.ndarray, padding: int) -> None:
    buffer[: len(values)].copy_(torch.from_numpy(values), non_blocking=True)
    buffer[len(values) :].fill_(padding)


def _segments(step: StepBatch, key: GraphKey) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots of the tokens, starts of all segments, and their slots; the rest is empty."""
    num_segments = key.max_adapters + 2
    starts = np.full(num_segments + 1, key.num_tokens, dtype=np.int32)
    segment_slots = np.full(num_segments, _NO_SLOT, dtype=np.int32)
    lengths, slots = _runs(step.lora_runs)
    starts[0] = 0
    starts[1 : len(lengths) + 1] = np.cumsum(lengths)
    segment_slots[: len(slots)] = slots
    return np.repeat(slots, lengths).astype(np.int32), starts, segment_slots


def _runs(runs: LoRARuns) -> tuple[Sequence[int], Sequence[int]]:
    return [length for length, _ in runs], [_NO_SLOT if s is None else s for _, s in runs]
