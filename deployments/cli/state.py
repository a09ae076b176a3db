"""The command ``lorafleet state``: copies a stopped cluster's journal out and in."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.config import ClusterSettings
from deployments.errors import JournalUnavailableError
from deployments.journal_setup import open_journal, read_journal
from deployments.state_transfer import describe, export_state, import_state

FAILED = 1

state_app = typer.Typer(no_args_is_help=True, help="Export and import what adapter names mean.")

Model = Annotated[str, typer.Option(help="the base model's public id")]
StateDir = Annotated[
    str | None, typer.Option(help="the deployment's state_dir, a directory or s3://bucket/prefix")
]
EndpointUrl = Annotated[
    str | None, typer.Option(help="the deployment's state_endpoint_url, for S3 that is not AWS's")
]


@state_app.command("export")
def export_command(
    model: Model,
    state_dir: StateDir = None,
    endpoint_url: EndpointUrl = None,
    output: Annotated[Path | None, typer.Option(help="a file instead of the terminal")] = None,
) -> None:
    """Write names, versions and aliases as JSON. A journal on a disk must be free.

    Exit status: 0 done, 1 not done, 2 wrong usage.
    """
    settings = ClusterSettings(state_dir=state_dir, state_endpoint_url=endpoint_url)
    with _told():
        document = asyncio.run(_export(settings, model))
        text = json.dumps(document, indent=2)
        if output is not None:
            output.write_text(text + "\n")
    if output is None:
        typer.echo(text)
    else:
        typer.echo(f"exported {_count(document)} to {output}")


@state_app.command("import")
def import_command(
    model: Model,
    source: Annotated[Path, typer.Argument(help="a file that export wrote; - for standard input")],
    state_dir: StateDir = None,
    endpoint_url: EndpointUrl = None,
    replace: Annotated[bool, typer.Option("--replace", help="drop what is there now")] = False,
) -> None:
    """Read what export wrote into a journal. The controller must be stopped.

    Exit status: 0 done, 1 not done, 2 wrong usage.
    """
    settings = ClusterSettings(state_dir=state_dir, state_endpoint_url=endpoint_url)
    with _told():
        text = sys.stdin.read() if str(source) == "-" else source.read_text()
        document = asyncio.run(_import(settings, model, text, replace=replace))
    typer.echo(f"imported {_count(document)}")


def _count(document: dict[str, object]) -> str:
    counts = describe(document)
    return f"{counts['adapters']} adapters and {counts['aliases']} aliases"


async def _export(settings: ClusterSettings, model: str) -> dict[str, Any]:
    journal = await read_journal(settings, model)
    try:
        return export_state(journal)
    finally:
        journal.close()


async def _import(
    settings: ClusterSettings, model: str, text: str, *, replace: bool
) -> dict[str, Any]:
    store = await open_journal(settings, model)
    try:
        await store.write(lambda: import_state(store.journal, text, replace=replace))
        return export_state(store.journal)
    finally:
        await store.close()


@contextmanager
def _told() -> Iterator[None]:
    """Say what went wrong in one line."""
    try:
        yield
    except (JournalUnavailableError, OSError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED) from error
