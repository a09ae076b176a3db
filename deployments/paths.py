"""Where things are on this machine: LoRAFleet's own directory, relative paths, models by name.

Relative paths are taken from the working directory, else from the checkout, so that the same file
works with ``serve run`` and on a cluster.
"""

import os
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent


def home() -> Path:
    """Where models, state and caches are kept."""
    return Path(os.environ.get("LORAFLEET_HOME") or _CHECKOUT / ".cache").resolve()


def absolute(path: str) -> Path:
    """A path from the working directory, else from the checkout."""
    candidates = (Path(path).expanduser().absolute(), _CHECKOUT / path)
    return next((found for found in candidates if found.exists()), candidates[0]).resolve()


def is_directory(model: str) -> bool:
    """Whether a model is given as a directory rather than by a name."""
    return model.startswith((".", "/", "~")) or absolute(model).is_dir()


def find_prepared(model: str) -> Path | None:
    """Return the directory of a model that is on this machine under its name or path."""
    prepared = home() / "models" / model
    if prepared.is_dir():
        return prepared
    return absolute(model) if is_directory(model) else None


def find_model(model: str) -> Path:
    """Bring a model's files to this machine and return their directory."""
    if (path := find_prepared(model)) is not None:
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
