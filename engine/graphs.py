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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from engine.models.paged_model import PagedModel
from engine.step_batch import LoRARuns, StepBatch
from kernels.metadata import AttentionBatch, LoRABatch

logger = logging.getLogger(__name__)

_Array = TypeVar("_Array", np.ndarray, torch.Tensor)
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
    """The buffers that every graph reads, a prefix of each.

    Each has a double in host memory where a step is laid out, so that it takes a few transfers,
    which on a GPU nothing waits for.
    """

    def __init__(self, plan: GraphPlan, max_blocks: int, max_rank: int, device: torch.device):
        tokens, segments = plan.max_tokens, plan.max_adapters + 2
        self._max_rank = max_rank
        self._wide = _Mirror((3, tokens), torch.int64, device)
        self._narrow = _Mirror((2 * tokens + 2 * segments + 1,), torch.int32, device)
        self._tables = _Mirror((tokens * max_blocks,), torch.int32, device)
        sizes = (tokens, tokens, segments + 1, segments)
        self._host: _Fields[np.ndarray] = _Fields(
            *self._wide.host.numpy(), *_cut(self._narrow.host.numpy(), sizes)
        )
        self._device: _Fields[torch.Tensor] = _Fields(
            *self._wide.device, *_cut(self._narrow.device, sizes)
        )
        self._block_tables = self._tables.device.view(tokens, max_blocks)
        self._query_starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(tokens, device=device)
        self._sent: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def token_ids(self) -> torch.Tensor:
        return self._device.token_ids

    @property
    def positions(self) -> torch.Tensor:
        return self._device.positions

    def fill(self, step: StepBatch, key: GraphKey) -> None:
        """Write a step, and after it tokens without effect."""
        if self._sent is not None:
            # The transfers of the step before have long ended: its tokens are known.
            self._sent.synchronize()
        host, size = self._host, key.num_tokens
        _put(host.token_ids[:size], step.token_ids, 0)
        _put(host.positions[:size], step.positions, 0)
        _put(host.slot_mapping[:size], step.slot_mapping, -1)
        _put(host.context_lens[:size], step.context_lens, 0)
        if key.max_adapters:
            slots, starts, segment_slots = _segments(step, key)
            _put(host.token_slots[:size], slots, _NO_SLOT)
            _put(host.segment_starts[: len(starts)], starts, 0)
            _put(host.segment_slots[: len(segment_slots)], segment_slots, _NO_SLOT)
        self._wide.send()
        self._narrow.send()
        num_seqs, width = step.block_tables.shape
        staged = self._tables.host[: num_seqs * width].view(num_seqs, width)
        staged.numpy()[:] = step.block_tables
        self._block_tables[:num_seqs, :width].copy_(staged, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def attention(self, key: GraphKey, max_context_len: int) -> AttentionBatch:
        """What a graph's attention reads; kernels divide their work for the longest context."""
        size = key.num_tokens
        return AttentionBatch(
            query_starts=self._query_starts[: size + 1],
            context_lens=self._device.context_lens[:size],
            block_tables=self._block_tables[:size],
            slot_mapping=self._device.slot_mapping[:size],
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
            token_slots=self._device.token_slots[: key.num_tokens],
            segment_starts=self._device.segment_starts[: num_segments + 1],
            segment_slots=self._device.segment_slots[:num_segments],
            # With room for an adapter for each token, tokens share no weights.
            max_segment_len=1 if key.max_adapters >= key.num_tokens else key.num_tokens,
            max_active_rank=self._max_rank,
            num_active=key.max_adapters,
        )


class Recorder(Protocol):
    """Records what a function launches."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that launches it again, on the same memory."""


class GraphRunner:
    """A model's recorded steps."""

    def __init__(self, model: PagedModel, plan: GraphPlan, inputs: StaticInputs) -> None:
        self._model = model
        self._plan = plan
        self._inputs = inputs
        self._graphs: dict[GraphKey, Callable[[], None]] = {}
        # One for all graphs: each of its own would take a vocabulary's width for every size.
        self._logits = torch.empty(
            plan.max_tokens, model.spec.vocab_size, dtype=torch.float32, device=model.spec.device
        )

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
        self._graphs[key]()
        return self._logits[: step.num_tokens]

    def _forward(self, key: GraphKey) -> None:
        inputs, size = self._inputs, key.num_tokens
        lora = inputs.lora(key)
        self._model.forward(
            inputs.token_ids[:size],
            inputs.positions[:size],
            attention=inputs.attention(key, self._model.spec.max_model_len),
            lora=lora,
            logits_rows=inputs.rows[:size],
            logits_lora=lora,
            out=self._logits[:size],
        )


class CudaRecorder:
    """CUDA graphs in one memory pool; they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        callers = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(callers)
        graph = torch.cuda.CUDAGraph()
        # Left again also where recording fails, which torch.cuda.graph does not see to.
        with torch.cuda.stream(self._stream):
            # Kernels are compiled, and libraries set up, before anything is recorded.
            run()
            # Other threads, such as those of another engine, may do what a recording must not.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                run()
        callers.wait_stream(self._stream)
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Fields(Generic[_Array]):
    """The parts of the buffers, in host memory or on the device."""

    token_ids: _Array
    positions: _Array
    slot_mapping: _Array
    context_lens: _Array
    token_slots: _Array
    segment_starts: _Array
    segment_slots: _Array


class _Mirror:
    """A tensor on the device and its double in host memory, which a GPU reads by itself."""

    __slots__ = ("device", "host")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

    def send(self) -> None:
        """Begin to copy the double to the device."""
        self.device.copy_(self.host, non_blocking=True)


def _cut(values: _Array, sizes: Sequence[int]) -> Iterator[_Array]:
    start = 0
    for size in sizes:
        yield values[start : start + size]
        start += size


def _put(buffer: np.ndarray, values: np.ndarray, padding: int) -> None:
    buffer[: len(values)] = values
    buffer[len(values) :] = padding


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
