"""Adapters as directories under given roots, found by their name."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from adapters import LoRARequest, adapter_digest, find_adapter_files, validate_adapter_name


class FilesystemResolver:
    """Looks for ``<root>/<name>/adapter_config.json``, root by root."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root) for root in roots]

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the directory of that name, or None if no root has one."""
        validate_adapter_name(lora_name)
        return await asyncio.to_thread(self._find, lora_name)

    def _find(self, lora_name: str) -> LoRARequest | None:
        for root in self._roots:
            path = (root / lora_name).resolve()
            if not (path / "adapter_config.json").is_file():
                continue
            # A link may lead anywhere; only what lies under the root is the root's to give.
            if not path.is_relative_to(root.resolve()):
                raise PermissionError(f"adapter {lora_name!r} is a link that leaves {root}")
            return LoRARequest(
                lora_name=lora_name,
                lora_path=str(path),
                digest=adapter_digest(find_adapter_files(path)),
                source_uri=path.as_uri(),
            )
        return None
