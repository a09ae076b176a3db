"""Settings of one engine: frozen, checked once, never written back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. ``num_blocks`` wins over ``memory_bytes`` when given.

    ``kv_cache_dtype`` "auto" keeps keys and values in the model's dtype; "fp8" takes half the
    memory of that for an error that docs/performance-gpu.md states.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int = 1 << 30
    enable_prefix_caching: bool = True
    kv_cache_dtype: KVCacheDType = "auto"

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {self.block_size}")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if self.memory_bytes < 1:
            raise ValueError(f"memory_bytes must be positive, got {self.memory_bytes}")
        if self.kv_cache_dtype not in get_args(KVCacheDType):
            raise ValueError(f"kv_cache_dtype must be auto or fp8, got {self.kv_cache_dtype!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queues.

    A prompt longer than ``max_num_batched_tokens`` is prefilled in chunks over several steps.
    ``max_adapter_wait_s`` bounds how long other adapters' later requests may overtake one that
    waits for a slot.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 2048
    max_adapter_wait_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_adapter_wait_s < 0:
            raise ValueError(f"max_adapter_wait_s must not be negative, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """How many adapters fit where, and which are accepted.

    ``base_model_names`` are what adapters may call the base model that they were trained on; when
    empty, whatever they call it, their tensors' names and shapes decide.
    """

    max_loras: int = 8
    max_cpu_loras: int = 64
    max_lora_rank: int = 64
    allow_pickle: bool = False
    base_model_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.max_loras <= self.max_cpu_loras:
            raise ValueError(f"need 0 < max_loras <= max_cpu_loras, got {self}")
        if not 0 < self.max_lora_rank <= 512:
            raise ValueError(f"max_lora_rank must be in 1..512, got {self.max_lora_rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine.

    ``lora`` None builds an engine without any LoRA code. ``seed`` fixes the random numbers of
    requests that bring no seed; without it they differ from run to run.

    With ``tensor_parallel_size`` above 1 the model is split among so many devices of this machine,
    each run by a process; ``num_threads`` and the cache's ``memory_bytes`` are then each one's.

    A GPU's decode steps are recorded at start as CUDA graphs; ``enforce_eager`` does without.
    """

    model: Path
    dtype: DType = "auto"
    device: Device = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoRAConfig | None = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}"
            )
