"""Figures that an engine tells about itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges now, and counters (``total_``) since the start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    max_loras: int
    num_slots_in_use: int
    total_steps: int
    total_prompt_tokens: int
    total_cached_prompt_tokens: int
    total_output_tokens: int
    total_preemptions: int
    total_slot_loads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAResidency:
    """Where one adapter is: in host memory, in a device slot, and how many requests use it."""

    digest: str
    lora_name: str
    host: bool
    slot: int | None
    num_running: int
    pinned: bool
    size_bytes: int
