"""Adapters from a plain web server, as an example of a lorafleet resolver."""

import asyncio
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from adapters import LoRARequest
from resolvers.base import SourceUnavailableError

FILES = ("adapter_config.json", "adapter_model.safetensors")


class HttpResolver:
    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")
        self._downloads = Path(tempfile.mkdtemp(prefix="lorafleet-http-"))

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        directory = self._downloads / lora_name
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for file in FILES:
                url = f"{self._base_url}/{lora_name}/{file}"
                await asyncio.to_thread(urllib.request.urlretrieve, url, directory / file)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise SourceUnavailableError(f"{self._base_url} answered {error.code}") from error
        return LoRARequest(lora_name=lora_name, lora_path=str(directory))
