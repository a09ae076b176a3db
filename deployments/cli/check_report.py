"""What ``lorafleet check`` finds, for people and for programs."""

import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.cli.check_problems import find_problems
from deployments.model_profile import read_profile
from deployments.paths import find_model
from engine.adapter_check import check_adapter
from engine.config import LoRAConfig
from engine.errors import AdapterError
from engine.lora.adapter import AdapterInfo
from resolvers.base import AdapterSourceInvalidError, SourceFetcher
from resolvers.store import AdapterStore


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: ``info`` if the adapter is served, else its ``problems``."""

    source: str
    info: AdapterInfo | None = None
    problems: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One JSON object, for programs."""
        facts = {} if self.info is None else asdict(self.info)
        served = self.info is not None
        verdict = {"source": self.source, "served": served, "problems": self.problems}
        return json.dumps(verdict | facts)

    def print(self, console: Console) -> None:
        """A table and a sentence, for people."""
        if self.info is None:
            console.print(f"[bold red]not served[/]: {self.source}")
            for problem in self.problems:
                console.print(f"* {problem}", markup=False, soft_wrap=True)
            return
        table = Table(title=self.source, show_header=False, title_justify="left")
        table.add_column()
        table.add_column(overflow="fold")
        rows = {
            "rank": str(self.info.rank),
            "target modules": ", ".join(self.info.target_modules),
            "modules, tensors": f"{self.info.num_modules}, {self.info.num_tensors}",
            "bytes in a slot": f"{self.info.size_bytes:,}",
            "features": ", ".join(self.info.features) or "plain LoRA",
            "digest": self.info.digest,
        }
        for name, value in rows.items():
            table.add_row(name, value)
        console.print(table)
        for note in self.info.notes:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
        console.print("[bold green]served exactly[/]")


def check_source(source: str, model: str, limits: LoRAConfig) -> Verdict:
    """Check an adapter where it is; what is in S3 or on the Hub is downloaded first."""
    directory = find_model(model)
    with tempfile.TemporaryDirectory(prefix="lorafleet-check-") as downloads:
        try:
            request = _bring(source, Path(downloads))
        except (FileNotFoundError, PermissionError, AdapterSourceInvalidError) as error:
            return Verdict(source, problems=(str(error),))
        try:
            info = check_adapter(request, directory, limits)
            read_profile(Path(request.lora_path))
            return Verdict(source, info=info)
        except AdapterError as error:
            return Verdict(source, problems=find_problems(request, directory, limits, str(error)))


def _bring(source: str, downloads: Path) -> LoRARequest:
    name = source.rstrip("/").rpartition("/")[2] or source
    if source.startswith(("s3://", "hf://")):
        return asyncio.run(_fetcher(source, AdapterStore(downloads)).fetch(source, name, None))
    path = Path(source)
    return LoRARequest(
        lora_name=name, lora_path=str(path), digest=adapter_digest(find_adapter_files(path))
    )


def _fetcher(source: str, store: AdapterStore) -> SourceFetcher:
    # Each brings a library that takes a while to import.
    if source.startswith("hf://"):
        from resolvers.hub import HubResolver

        return HubResolver(store, [source.removeprefix("hf://").partition("/")[0]])
    from resolvers.s3 import S3Resolver

    return S3Resolver(store, source)
