"""Block sizes of the Triton kernels: one table per kernel, and the choice among its rows.

Every choice is made from Python integers that the host already has, so none of them waits for the
device. The tables are what ``kernels.aot`` compiles.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
import triton
from triton.runtime.driver import driver

# Streaming multiprocessors assumed where no device can be asked (the interpreter).
_DEFAULT_NUM_SMS = 132
# A split of a decode's context shorter than this costs more to merge than it saves.
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
# Runs of a ragged batch that one search step compares.
SEARCH = 512


@dataclass(frozen=True, slots=True)
class StoreKVConfig:
    """Elements of one token that a program copies."""

    block: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class LoRARowsConfig:
    """A LoRA kernel's program for one token: dot products on the vector units.

    `block_rank` x `block_features` weights are in flight at once.
    """

    block_rank: int
    block_features: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class LoRATilesConfig:
    """A LoRA kernel's program for up to `block_tokens` tokens of one segment: matrix units."""

    block_tokens: int
    block_rank: int
    block_features: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Query rows (token x head) and context positions that an attention program holds."""

    block_rows: int
    block_context: int
    num_warps: int
    num_stages: int


STORE_KV = StoreKVConfig(block=1024, num_warps=4)

# One token: few programs exist, so each takes one rank row or a narrow stripe of the output; with
# many tokens a program takes more, and reads the activations less often.
SHRINK_ROWS = {
    "few": LoRARowsConfig(block_rank=1, block_features=2048, num_warps=4),
    "many": LoRARowsConfig(block_rank=4, block_features=1024, num_warps=4),
}
EXPAND_ROWS = {
    "few": LoRARowsConfig(block_rank=16, block_features=128, num_warps=4),
    "many": LoRARowsConfig(block_rank=8, block_features=512, num_warps=4),
}
SHRINK_TILES = {
    "short": LoRATilesConfig(16, 16, 256, num_warps=4, num_stages=3),
    "long": LoRATilesConfig(64, 32, 64, num_warps=4, num_stages=4),
}
EXPAND_TILES = {
    "short": LoRATilesConfig(16, 16, 128, num_warps=4, num_stages=2),
    "long": LoRATilesConfig(64, 32, 128, num_warps=4, num_stages=2),
}

# Keyed by the head size padded to a power of two.
DECODE = {
    16: AttentionConfig(16, 128, num_warps=4, num_stages=3),
    32: AttentionConfig(16, 128, num_warps=4, num_stages=3),
    64: AttentionConfig(16, 128, num_warps=4, num_stages=3),
    128: AttentionConfig(16, 64, num_warps=4, num_stages=3),
    256: AttentionConfig(16, 32, num_warps=4, num_stages=3),
}
PREFILL_SHORT = {
    16: AttentionConfig(64, 64, num_warps=4, num_stages=3),
    32: AttentionConfig(64, 64, num_warps=4, num_stages=3),
    64: AttentionConfig(64, 64, num_warps=4, num_stages=3),
    128: AttentionConfig(64, 64, num_warps=8, num_stages=2),
    256: AttentionConfig(32, 32, num_warps=4, num_stages=2),
}
PREFILL_LONG = {
    16: AttentionConfig(128, 64, num_warps=4, num_stages=3),
    32: AttentionConfig(128, 64, num_warps=4, num_stages=3),
    64: AttentionConfig(128, 64, num_warps=4, num_stages=3),
    128: AttentionConfig(128, 64, num_warps=8, num_stages=2),
    256: AttentionConfig(32, 32, num_warps=4, num_stages=2),
}


# For matrix units that take their operands from registers, which leaves fewer for the blocks.
PREFILL_LONG_REGISTERS = {
    **PREFILL_LONG,
    64: AttentionConfig(128, 64, num_warps=8, num_stages=3),
    128: AttentionConfig(128, 32, num_warps=8, num_stages=3),
}


def pad_head_size(head_size: int) -> int:
    """Return the power of two that a kernel's head axis has."""
    return max(16, next_power_of_two(head_size))


def next_power_of_two(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def lora_by_rows(num_tokens: int, max_segment_len: int) -> bool:
    """Return whether each token is its own program.

    So when no segment would share its weights, and for few tokens, where reading the weights again
    from cache costs less than leaving most of the device idle.
    """
    return max_segment_len == 1 or num_tokens <= 32


def shrink_rows(num_programs: int) -> LoRARowsConfig:
    """Choose by the programs that one rank row each would give."""
    return SHRINK_ROWS["few" if num_programs <= 4 * _DEFAULT_NUM_SMS else "many"]


def expand_rows(num_programs: int) -> LoRARowsConfig:
    """Choose by the programs that the wide stripes would give."""
    return EXPAND_ROWS["few" if num_programs < 2 * _DEFAULT_NUM_SMS else "many"]


def shrink_tiles(max_segment_len: int) -> LoRATilesConfig:
    """Choose by the longest segment."""
    return SHRINK_TILES["short" if max_segment_len <= 256 else "long"]


def expand_tiles(max_segment_len: int) -> LoRATilesConfig:
    """Choose by the longest segment."""
    return EXPAND_TILES["short" if max_segment_len <= 64 else "long"]


def decode_config(head_size: int, element_size: int) -> AttentionConfig:
    """Choose by head size: a decode streams its context whatever else the batch holds."""
    return _fit_elements(DECODE[pad_head_size(head_size)], element_size)


def prefill_config(head_size: int, max_query_rows: int, element_size: int) -> AttentionConfig:
    """Choose by head size and by the query rows of the longest sequence."""
    table = PREFILL_LONG if _feeds_matrix_units_from_shared_memory() else PREFILL_LONG_REGISTERS
    if max_query_rows <= 64:
        table = PREFILL_SHORT
    return _fit_elements(table[pad_head_size(head_size)], element_size)


def _fit_elements(config: AttentionConfig, element_size: int) -> AttentionConfig:
    """Shrink the blocks for 4-byte elements, which the tables are not made for."""
    if element_size <= 2:
        return config
    return dataclasses.replace(
        config,
        block_rows=max(16, config.block_rows // 4),
        block_context=max(16, config.block_context // 4),
    )


def decode_splits(num_programs: int, max_context_len: int, device: torch.device) -> int:
    """Return into how many parts each context is split so that `num_programs` fill the device."""
    wanted = 2 * _num_sms(device) // max(num_programs, 1)
    allowed = -(-max_context_len // MIN_SPLIT_TOKENS)
    splits = max(1, min(wanted, allowed, MAX_SPLITS))
    # Powers of two: one compiled kernel for many context lengths.
    return 1 << (splits.bit_length() - 1)


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _feeds_matrix_units_from_shared_memory() -> bool:
    """Return whether the current device is Hopper or later."""
    if triton.knobs.runtime.interpret:
        return False
    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)
