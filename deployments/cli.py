"""The command ``lorafleet``: what people do before they deploy.

Knows how to present results in a terminal and as JSON. Knows nothing of running deployments.
"""

import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.config import find_model
from deployments.state_cli import state_app
from engine.adapter_check import check_adapter
from engine.config import LoRAConfig
from engine.errors import AdapterError, UnsupportedModelError
from engine.lora.adapter import AdapterInfo
from resolvers.base import ResolverError
from resolvers.store import AdapterStore

REFUSED = 1
UNDECIDED = 2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(state_app, name="state")


@app.callback()
def main() -> None:
    """One base model, thousands of LoRA adapters."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found: ``info`` if the adapter is served, else ``problem``."""

    source: str
    info: AdapterInfo | None = None
    problem: str | None = None

    def to_json(self) -> str:
        """One JSON object, for programs."""
        facts = {} if self.info is None else asdict(self.info)
        problems = [] if self.problem is None else [self.problem]
        served = self.info is not None
        return json.dumps({"source": self.source, "served": served, "problems": problems, **facts})

    def print(self, console: Console) -> None:
        """A table and a sentence, for people."""
        if self.info is None:
            console.print(f"[bold red]not served[/]: {self.source}")
            console.print(self.problem, markup=False, soft_wrap=True)
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


@app.command()
def check(
    source: Annotated[str, typer.Argument(help="directory or s3:// URI of an adapter")],
    model: Annotated[str, typer.Option(help="base model: prepared name, directory or hub id")],
    max_lora_rank: Annotated[int, typer.Option(help="the deployment's limit")] = 64,
    allow_pickle: Annotated[bool, typer.Option(help="accept adapter_model.bin")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Say whether an adapter would be served exactly, and if not, why.

    Exit status: 0 served, 1 not served, 2 cannot tell (no such model, source not reachable).
    """
    limits = LoRAConfig(max_lora_rank=max_lora_rank, allow_pickle=allow_pickle)
    try:
        verdict = check_source(source, model, limits)
    except (UnsupportedModelError, ResolverError, OSError) as error:
        Console(stderr=True).print(f"cannot tell: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(UNDECIDED) from error
    if as_json:
        typer.echo(verdict.to_json())
    else:
        verdict.print(Console())
    if verdict.info is None:
        raise typer.Exit(REFUSED)


def check_source(source: str, model: str, limits: LoRAConfig) -> Verdict:
    """Check an adapter where it is; an S3 URI is downloaded first."""
    directory = find_model(model)
    with tempfile.TemporaryDirectory(prefix="lorafleet-check-") as downloads:
        try:
            request = _bring(source, Path(downloads))
            return Verdict(source, info=check_adapter(request, directory, limits))
        except (AdapterError, FileNotFoundError, PermissionError) as error:
            return Verdict(source, problem=str(error))


def _bring(source: str, downloads: Path) -> LoRARequest:
    name = source.rstrip("/").rpartition("/")[2] or source
    if source.startswith("s3://"):
        from resolvers.s3 import S3Resolver

        resolver = S3Resolver(AdapterStore(downloads), source)
        return asyncio.run(resolver.fetch(source, name, None))
    path = Path(source)
    return LoRARequest(
        lora_name=name, lora_path=str(path), digest=adapter_digest(find_adapter_files(path))
    )
