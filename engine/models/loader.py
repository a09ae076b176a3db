"""Reads a transformers model from a local directory, ready to run.

Knows files, dtypes and devices. Knows nothing of attention, LoRA or batches.

On a CPU whose dtype is the checkpoint's, weights stay where safetensors memory-mapped them: the
replicas of one node share one copy in the page cache, and start without reading it twice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.config import Device, DType
from engine.errors import UnsupportedModelError

_SHOWN_KEYS = 5


def resolve_device(device: Device) -> torch.device:
    """Return the device meant: "auto" is a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def load_model(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    path: Path,
    *,
    dtype: DType,
    device: torch.device,
    attention: str,
) -> PreTrainedModel:
    """Load `path` as `cls` for inference; every weight must come from the checkpoint.

    The model is built without memory and then given the checkpoint's tensors. ``dtype`` "auto" is
    the checkpoint's own.
    """
    if (path / "adapter_config.json").exists():
        # transformers would merge it into the base model without a word.
        raise UnsupportedModelError(f"{path} holds an adapter next to the base model")
    try:
        with _silent_progress():
            model, report = cls.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
            )
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"{path}: weights cannot be loaded: {error}") from error
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        keys = sorted(str(key) for key in report.get(problem, ()))
        if keys:
            shown = ", ".join(keys[:_SHOWN_KEYS])
            raise UnsupportedModelError(f"{path}: {len(keys)} {problem.replace('_', ' ')}: {shown}")
    model.requires_grad_(False).eval()
    return model.to(device)


@contextmanager
def _silent_progress() -> Iterator[None]:
    """Keep transformers' progress bars out of a server's log."""
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
