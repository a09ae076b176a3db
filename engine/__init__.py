"""The LoRA engine: continuous batching of one base model and many adapters. No Ray, no HTTP.

Names are loaded when first used, so that ``import engine.errors`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapters import LoRARequest
    from engine.async_engine import AsyncEngine
    from engine.config import CacheConfig, EngineConfig, LoRAConfig, SchedulerConfig
    from engine.engine import Engine
    from engine.llm import LLM
    from engine.outputs import FinishReason, RequestOutput
    from engine.sampling_params import SamplingParams

_MODULES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "CacheConfig": "engine.config",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "FinishReason": "engine.outputs",
    "LoRAConfig": "engine.config",
    "LoRARequest": "adapters",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
    "SchedulerConfig": "engine.config",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "LoRAConfig",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
