"""PagedModel against the plain transformers model: same logits, however the work is cut up."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import CacheConfig, EngineConfig
from engine.models.paged_model import PagedModel
from kernels.metadata import AttentionBatch
from tests.tiny_models import TINY_MODELS, MakeModel

BLOCK_SIZE = 4
NUM_BLOCKS = 64
PROMPT_LENGTHS = (1, 5, 19, 12, 4)
NUM_DECODES = 9
CHUNK = 3


class Sequences:
    """Token ids of several sequences, their shuffled blocks, and how far each was computed."""

    def __init__(self, lengths: Sequence[int], vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]
        self.done = [0] * len(lengths)
        blocks = torch.randperm(NUM_BLOCKS, generator=generator)
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        self.blocks = blocks[: sum(counts)].split(counts)

    def step(self, model: PagedModel, num_new: dict[int, int]) -> dict[int, torch.Tensor]:
        """Compute the next ``num_new[i]`` tokens of sequence i; return all their logits."""
        order = sorted(num_new, key=lambda i: num_new[i] > 1)
        spans = [range(self.done[i], self.done[i] + num_new[i]) for i in order]
        ids = torch.cat([self.tokens[i][list(span)] for i, span in zip(order, spans, strict=True)])
        positions = torch.tensor([p for span in spans for p in span])
        logits = model.forward(
            ids, positions, self._batch(order, spans), None, torch.arange(len(ids)), None
        )
        for i in order:
            self.done[i] += num_new[i]
        return dict(zip(order, logits.split([len(s) for s in spans]), strict=True))

    def _batch(self, order: list[int], spans: list[range]) -> AttentionBatch:
        tables = torch.full((len(order), max(map(len, self.blocks))), 10_000, dtype=torch.int32)
        slots = []
        for row, (i, span) in enumerate(zip(order, spans, strict=True)):
            used = -(-span.stop // BLOCK_SIZE)
            tables[row, :used] = self.blocks[i][:used]
            slots += [
                int(self.blocks[i][p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in span
            ]
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


def load(path: Path, **settings: object) -> PagedModel:
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    model = PagedModel(EngineConfig(model=path, lora=None, device="cpu", cache=cache, **settings))
    model.allocate_cache(model.num_blocks_that_fit())
    return model


def expected_logits(path: Path, sequences: Sequences) -> list[torch.Tensor]:
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        return [
            plain(tokens[None], use_cache=False).logits[0].float() for tokens in sequences.tokens
        ]


@pytest.mark.parametrize("model_type", TINY_MODELS)
def test_logits_equal_transformers_for_chunked_prefill_then_decode(
    make_model: MakeModel, model_type: str
) -> None:
    path = make_model(model_type)
    model = load(path)
    sequences = Sequences([n + NUM_DECODES for n in PROMPT_LENGTHS], model.spec.vocab_size)
    got: list[list[torch.Tensor]] = [[] for _ in PROMPT_LENGTHS]
    while num_new := {
        i: min(CHUNK, prompt - done) if done < prompt else 1
        for i, (prompt, done) in enumerate(zip(PROMPT_LENGTHS, sequences.done, strict=True))
        if done < prompt + NUM_DECODES
    }:
        for i, logits in sequences.step(model, num_new).items():
            got[i].append(logits)
    for expected, parts in zip(expected_logits(path, sequences), got, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-4)
