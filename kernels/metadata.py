"""What a step tells the kernels about its batch: built once a step, read by every layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each sequence's tokens and KV blocks are.

    Tokens of one sequence are contiguous; sequences with exactly one new token ("decodes") come
    first. ``num_decodes`` sequences own the first ``num_decodes`` tokens.

    query_starts   [seqs + 1]           int32  first token of each sequence
    context_lens   [seqs]               int32  KV length after this step (cached + new tokens)
    block_tables   [seqs, max_blocks]   int32  block ids; entries past the context are undefined
    slot_mapping   [tokens]             int64  flat KV position of each token, -1 writes nothing
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Which adapter slot each token uses, as runs of equal slots.

    Built only when at least one token has an adapter. Consecutive tokens of one slot form a
    segment; tokens of the base model form segments with slot -1.

    token_slots     [tokens]        int32  slot of each token, -1 for the base model
    segment_starts  [segments + 1]  int32  first token of each segment
    segment_slots   [segments]      int32  slot of each segment, -1 for the base model
    segments        the same on the host: (first token, end, slot) of each segment with an adapter
    """

    token_slots: torch.Tensor
    segment_starts: torch.Tensor
    segment_slots: torch.Tensor
    max_segment_len: int
    max_active_rank: int
    num_active: int
    segments: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KVScales:
    """What the quantised vectors of one layer's caches are multiplied by.

    key, value    [num_blocks, block_size, Hkv]    float32, one for each position and head
    """

    key: torch.Tensor
    value: torch.Tensor
