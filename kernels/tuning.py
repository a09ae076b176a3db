"""Which block sizes a launch uses: the choice among the rows of the device's table.

Every choice is made from Python integers that the host already has, so none of them waits for the
device. Nothing is timed here: ``python -m kernels.tune`` does that, ahead of serving.
"""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from triton.runtime.driver import driver

from kernels.tuning_table import (
    AttentionConfig,
    BlockConfig,
    LoRARowsConfig,
    LoRATilesConfig,
    TuningTable,
    load_table,
    table_for,
)

# Streaming multiprocessors assumed where no device can be asked (the interpreter).
_DEFAULT_NUM_SMS = 132
# The table of the interpreter, which has no device.
_INTERPRETER_CLASS = "sm_80"
# A split of a decode's context shorter than this costs more to merge than it saves.
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
# Parts into which a shrink's inputs are cut at most: each is summed by every program that expands.
MAX_SHRINK_SPLITS = 8
# Input features below which a part costs more to add up than it saves.
MIN_SPLIT_FEATURES = 256
# Runs of a ragged batch that one search step compares.
SEARCH = 512

_override: list[TuningTable] = []


def table() -> TuningTable:
    """Return the table in use: that of the current device's class, read once per process."""
    if _override:
        return _override[-1]
    if triton.knobs.runtime.interpret:
        return load_table(_INTERPRETER_CLASS)
    return _table_of(driver.active.get_current_device())


@functools.cache
def _table_of(device: object) -> TuningTable:
    """Return the current device's table; `device` is only its key."""
    target = driver.active.get_current_target()
    return table_for(target.backend, target.arch)


@contextmanager
def use_table(replacement: TuningTable) -> Iterator[None]:
    """Launch with this table while the block runs: for the tuner and for tests."""
    _override.append(replacement)
    try:
        yield
    finally:
        _override.pop()


def pad_head_size(head_size: int) -> int:
    """Return the power of two that a kernel's head axis has."""
    return max(16, next_power_of_two(head_size))


def next_power_of_two(value: int) -> int:
    """Return the least power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def block(family: str) -> BlockConfig:
    """Return the one row of an elementwise kernel."""
    config: BlockConfig = table().row(family, "all")
    return config


def rms_norm(width: int) -> tuple[int, BlockConfig]:
    """Return the padded width, and the row for it."""
    padded = next_power_of_two(width)
    name = "narrow" if padded <= 2048 else "wide" if padded <= 8192 else "widest"
    return padded, table().row("rms_norm", name)


def lora_by_rows(num_tokens: int, max_segment_len: int) -> bool:
    """Return whether each token is its own program.

    So when no segment would share its weights, and for few tokens, where reading the weights again
    from cache costs less than leaving most of the device idle.
    """
    return max_segment_len == 1 or num_tokens <= 32


def shrink_rows(num_programs: int) -> LoRARowsConfig:
    """Choose by the programs that one rank row each would give."""
    name = "few" if num_programs <= 4 * _DEFAULT_NUM_SMS else "many"
    config: LoRARowsConfig = table().row("shrink_rows", name)
    return config


def expand_rows(num_tokens: int, widths: list[int]) -> LoRARowsConfig:
    """Choose by the programs that the wide stripes would give."""
    many: LoRARowsConfig = table().row("expand_rows", "many")
    num_programs = num_tokens * sum(-(-width // many.block_features) for width in widths)
    if num_programs >= 2 * _DEFAULT_NUM_SMS:
        return many
    few: LoRARowsConfig = table().row("expand_rows", "few")
    return few


def shrink_tiles(max_segment_len: int) -> LoRATilesConfig:
    """Choose by the longest segment."""
    name = "short" if max_segment_len <= 256 else "long"
    config: LoRATilesConfig = table().row("shrink_tiles", name)
    return config


def expand_tiles(max_segment_len: int) -> LoRATilesConfig:
    """Choose by the longest segment."""
    name = "short" if max_segment_len <= 64 else "long"
    config: LoRATilesConfig = table().row("expand_tiles", name)
    return config


def shrink_splits(num_programs: int, in_size: int, device: torch.device) -> int:
    """Return into how many parts the inputs are cut so that `num_programs` fill the device."""
    wanted = 2 * _num_sms(device) // max(num_programs, 1)
    allowed = min(in_size // MIN_SPLIT_FEATURES, MAX_SHRINK_SPLITS)
    return _floor_power_of_two(min(wanted, allowed))


def decode_config(head_size: int, element_size: int, *, fp8: bool) -> AttentionConfig:
    """Choose by head size: a decode streams its context whatever else the batch holds."""
    family = "decode_fp8" if fp8 else "decode"
    return _fit_elements(table().row(family, str(pad_head_size(head_size))), element_size)


def prefill_config(
    head_size: int, max_query_rows: int, element_size: int, *, fp8: bool
) -> AttentionConfig:
    """Choose by head size and by the query rows of the longest sequence."""
    family = "prefill_short" if max_query_rows <= 64 else "prefill_long"
    family = "prefill_fp8" if fp8 else family
    return _fit_elements(table().row(family, str(pad_head_size(head_size))), element_size)


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
    return _floor_power_of_two(min(wanted, allowed, MAX_SPLITS))


def _floor_power_of_two(value: int) -> int:
    """Return the largest power of two up to `value`: one compiled kernel for many values."""
    return 1 << (max(value, 1).bit_length() - 1)


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
