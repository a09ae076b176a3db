"""The routes by which clients change what a name means, as requests to be sent."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request."""

    method: str
    url: str
    content: dict[str, Any] = field(default_factory=dict)


def load(name: str, path: Path, *, in_place: bool, pin: bool) -> Call:
    """Load from a directory by vLLM's route."""
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place, "pin": pin}
    return Call("POST", "/v1/load_lora_adapter", {"json": body})


def push(name: str, path: Path) -> Call:
    """Replace by a body that holds the adapter."""
    files = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
    content = {part: (path / file).read_bytes() for part, file in files.items()}
    return Call("PUT", f"/v1/adapters/{name}", {"files": content})


def unload(name: str) -> Call:
    """Unload by vLLM's route; what runs goes on."""
    return Call("POST", "/v1/unload_lora_adapter", {"json": {"lora_name": name}})


def force_out(name: str) -> Call:
    """Unload and abort what runs."""
    return Call("DELETE", f"/v1/adapters/{name}?force=true")


def point(alias: str, adapter: str) -> Call:
    """Have an alias stand for an adapter."""
    return Call("PUT", f"/v1/adapters/aliases/{alias}", {"json": {"target": adapter}})


def drop(alias: str) -> Call:
    """Forget an alias."""
    return Call("DELETE", f"/v1/adapters/aliases/{alias}")
