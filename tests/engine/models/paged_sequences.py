"""Feeds sequences to a PagedModel piece by piece, as the engine would: blocks, batches, slots."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.config import CacheConfig, EngineConfig, LoRAConfig
from engine.lora.batch import build_lora_batch
from engine.models.paged_model import PagedModel
from kernels.metadata import AttentionBatch, LoRABatch

BLOCK_SIZE = 4
NUM_BLOCKS = 64


def load_paged(path: Path, *, fuse: bool = True, lora: LoRAConfig | None = None) -> PagedModel:
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    config = EngineConfig(model=path, lora=lora, device="cpu", cache=cache)
    model = PagedModel(config, fuse=fuse)
    model.allocate_cache(model.num_blocks_that_fit())
    return model


def load_plain(path: Path) -> PreTrainedModel:
    """The oracle: transformers' own code, with its own eager attention."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return plain.eval()


class Sequences:
    """Random token ids of several sequences, their shuffled blocks, and how far each has come."""

    def __init__(self, lengths: Sequence[int], vocab_size: int, *, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]
        self.done = [0] * len(lengths)
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        blocks = torch.randperm(NUM_BLOCKS, generator=generator)
        self._blocks = blocks[: sum(counts)].split(counts)

    def step(
        self,
        model: PagedModel,
        num_new: Mapping[int, int],
        slots: Mapping[int, int] | None = None,
        *,
        last_only: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Compute the next ``num_new[i]`` tokens of each sequence i.

        ``slots`` names the adapter slot of sequences that have one. Returns the logits of all new
        tokens, or of each sequence's last one.
        """
        order = sorted(num_new, key=lambda i: num_new[i] > 1)
        spans = [range(self.done[i], self.done[i] + num_new[i]) for i in order]
        lengths = [len(span) for span in spans]
        ends = list(accumulate(lengths))
        num_rows = [1] * len(order) if last_only else lengths
        rows = [end - 1 for end in ends] if last_only else range(ends[-1])
        ids = [self.tokens[i][self.done[i] : self.done[i] + num_new[i]] for i in order]
        logits = model.forward(
            torch.cat(ids),
            torch.tensor([position for span in spans for position in span]),
            self.attention_batch(order, spans),
            _lora_batch(model, order, lengths, slots),
            torch.tensor(rows),
            _lora_batch(model, order, num_rows, slots),
        )
        for i in order:
            self.done[i] += num_new[i]
        return dict(zip(order, logits.split(num_rows), strict=True))

    def attention_batch(self, order: Sequence[int], spans: Sequence[range]) -> AttentionBatch:
        """Describe a step in which sequence ``order[k]`` computes its positions ``spans[k]``."""
        # Entries past a sequence's context are undefined: no such block exists.
        tables = torch.full((len(order), max(map(len, self._blocks))), 10_000, dtype=torch.int32)
        slots = []
        for row, (i, span) in enumerate(zip(order, spans, strict=True)):
            blocks = self._blocks[i][: -(-span.stop // BLOCK_SIZE)]
            tables[row, : len(blocks)] = blocks
            slots += [int(blocks[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in span]
        lengths = [len(span) for span in spans]
        return AttentionBatch(
            query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            context_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.tensor(slots),
            num_decodes=lengths.count(1),
            max_query_len=max(lengths),
            max_context_len=max(span.stop for span in spans),
        )


def run_in_chunks(
    model: PagedModel,
    sequences: Sequences,
    prompt_lens: Sequence[int],
    chunk: int,
    slots: Mapping[int, int] | None = None,
) -> list[torch.Tensor]:
    """Prefill each prompt in chunks, then decode the rest; return every token's logits."""
    parts: list[list[torch.Tensor]] = [[] for _ in prompt_lens]
    while num_new := {
        i: min(chunk, prompt_len - done) if done < prompt_len else 1
        for i, (prompt_len, done) in enumerate(zip(prompt_lens, sequences.done, strict=True))
        if done < len(sequences.tokens[i])
    }:
        for i, logits in sequences.step(model, num_new, slots).items():
            parts[i].append(logits)
    return [torch.cat(logits) for logits in parts]


def plain_logits(plain: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of every token from one plain forward pass."""
    with torch.no_grad():
        logits: torch.Tensor = plain(tokens[None], use_cache=False).logits[0].float()
    return logits


def _lora_batch(
    model: PagedModel, order: list[int], lengths: list[int], slots: Mapping[int, int] | None
) -> LoRABatch | None:
    if slots is None:
        return None
    runs = [(length, slots.get(i)) for i, length in zip(order, lengths, strict=True)]
    return build_lora_batch(runs, model.slot_ranks)
