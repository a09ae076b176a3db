"""What every command shares that talks to a running deployment: its options and exit statuses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console

from deployments.cli.admin_client import AdminClient, NoAnswerError, RefusedError

REFUSED = 1
NO_ANSWER = 3

EXIT_STATUSES = (
    "Exit status: 0 done, 1 the server refused, 2 wrong usage, 3 no answer or a server error "
    "(whether a change was made can be asked with `operations`)."
)

Url = Annotated[str, typer.Option(envvar="LORAFLEET_URL", help="where the deployment listens")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar="LORAFLEET_ADMIN_API_KEY", show_envvar=True, help="its admin key, if it has one"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print the server's JSON, for scripts")]

DEFAULT_URL = "http://127.0.0.1:8000"


@contextmanager
def connected(url: str, key: str | None) -> Iterator[AdminClient]:
    """A client; what goes wrong is told on standard error and becomes the exit status."""
    client = AdminClient(url, key)
    try:
        yield client
    except (RefusedError, NoAnswerError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        status = REFUSED if isinstance(error, RefusedError) else NO_ANSWER
        raise typer.Exit(status) from error
    finally:
        client.close()


def print_json(document: Any) -> None:
    """For scripts: never coloured, never wrapped."""
    typer.echo(json.dumps(document, indent=2))
