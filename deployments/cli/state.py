"""The command ``lorafleet state``: copies a stopped cluster's journal out and in."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from deployments.config import ClusterSettings
from deployments.errors import JournalUnavailableError
from deployments.state_store import SqliteStateStore
from deployments.state_transfer import describe, export_state, import_state

FAILED = 1

state_app = typer.Typer(no_args_is_help=True, help="Export and import what adapter names mean.")

Model = Annotated[str, typer.Option(help="the base model's public id")]
StateDir = Annotated[str | None, typer.Option(help="the deployment's state_dir")]


@state_app.command("export")
def export_command(
    model: Model,
    state_dir: StateDir = None,
    output: Annotated[Path | None, typer.Option(help="a file instead of the terminal")] = None,
) -> None:
    """Write names, versions and aliases as JSON. The controller must be stopped."""
    with _journal(model, state_dir, must_exist=True) as store:
        document = export_state(store)
    text = json.dumps(document, indent=2)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n")
        typer.echo(f"exported {_count(document)} to {output}")


@state_app.command("import")
def import_command(
    model: Model,
    source: Annotated[Path, typer.Argument(help="a file that export wrote; - for standard input")],
    state_dir: StateDir = None,
    replace: Annotated[bool, typer.Option("--replace", help="drop what is there now")] = False,
) -> None:
    """Read what export wrote into a journal. The controller must be stopped."""
    text = sys.stdin.read() if str(source) == "-" else source.read_text()
    with _journal(model, state_dir, must_exist=False) as store:
        import_state(store, text, replace=replace)
        document = export_state(store)
    typer.echo(f"imported {_count(document)}")


def _count(document: dict[str, object]) -> str:
    counts = describe(document)
    return f"{counts['adapters']} adapters and {counts['aliases']} aliases"


@contextmanager
def _journal(model: str, state_dir: str | None, *, must_exist: bool) -> Iterator[SqliteStateStore]:
    path = ClusterSettings(state_dir=state_dir).journal_path(model)
    try:
        if must_exist and not path.is_file():
            raise ValueError(f"there is no journal {path}")
        store = SqliteStateStore(path)
        try:
            yield store
        finally:
            store.close()
    except (JournalUnavailableError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED) from error
