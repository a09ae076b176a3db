"""The commands ``lorafleet adapters``: see and change what a running deployment serves."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from adapters import CONFIG_FILE, WEIGHTS_FILE, find_adapter_files
from deployments.backend import AdapterState
from deployments.cli import adapter_tables as tables
from deployments.cli.admin_client import (
    AdminClient,
    Json,
    adapter_path,
    alias_path,
    new_operation_id,
)
from deployments.cli.connection import (
    DEFAULT_URL,
    EXIT_STATUSES,
    AdminKey,
    AsJson,
    Url,
    connected,
    print_json,
)
from deployments.cli.operation_progress import follow
from deployments.operations import OperationPhase

adapters_app = typer.Typer(
    no_args_is_help=True, help=f"See and change what is served.\n\n{EXIT_STATUSES}"
)
alias_app = typer.Typer(no_args_is_help=True, help="Names that stand for adapters.")
adapters_app.add_typer(alias_app, name="alias")

Name = Annotated[str, typer.Argument(help="the adapter's name")]
Pin = Annotated[
    bool, typer.Option("--pin", help="keep its weights in memory everywhere; else it is unpinned")
]
Source = Annotated[
    str | None,
    typer.Argument(help="path or URI as the replicas see it; left out, resolvers are asked"),
]


@adapters_app.command("list")
def list_command(
    prefix: Annotated[str, typer.Option(help="only names that begin so")] = "",
    state: Annotated[AdapterState | None, typer.Option(help="only in this state")] = None,
    pinned: Annotated[bool | None, typer.Option(help="only (un)pinned ones")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="at most so many")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """List adapters by name, with where their weights are."""
    filters: Json = {"prefix": prefix}
    if state is not None:
        filters["state"] = state.value
    if pinned is not None:
        filters["pinned"] = pinned
    with connected(url, admin_key) as client:
        document = client.pages("/v1/adapters", filters, limit)
    print_json(document) if as_json else tables.print_adapters(document)


@adapters_app.command()
def show(
    name: Name, url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False
) -> None:
    """Show one adapter: version, replicas, and the versions that can be rolled back to."""
    with connected(url, admin_key) as client:
        adapter = client.get(adapter_path(name))
    print_json(adapter) if as_json else tables.print_adapter(adapter)


@adapters_app.command()
def load(
    name: Name,
    source: Source = None,
    pin: Pin = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Put an adapter in service on every replica, under a name that means nothing yet."""
    body = {"name": name, "source": source, "pin": pin}
    with connected(url, admin_key) as client:
        version = _change(client, "POST", "/v1/adapters", body)
    _print_version(version, "loaded", as_json=as_json)


@adapters_app.command()
def replace(
    name: Name,
    source: Source = None,
    pin: Pin = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Load, also if the name is in use: requests that start afterwards get the new version."""
    body = {"name": name, "source": source, "pin": pin, "replace": True}
    with connected(url, admin_key) as client:
        version = _change(client, "POST", "/v1/adapters", body)
    _print_version(version, "now serving", as_json=as_json)


@adapters_app.command()
def push(
    name: Name,
    directory: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    pin: Pin = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Send an adapter's files from this machine and put them in service, replacing the name's."""
    paths = files_to_push(directory)
    op_id = new_operation_id()
    with connected(url, admin_key) as client, ExitStack() as stack:
        files = {part: stack.enter_context(path.open("rb")) for part, path in paths.items()}
        version = follow(
            client,
            op_id,
            lambda: client.push(adapter_path(name), op_id=op_id, files=files, pin=pin),
        )
    _print_version(version, "now serving", as_json=as_json)


@adapters_app.command()
def unload(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="abort requests that run on it")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.1, max=3600, help="seconds")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Take a name out of service; requests in flight finish."""
    params = {"force": force, "timeout_s": timeout_s}
    op_id = new_operation_id()
    with connected(url, admin_key) as client:
        version = follow(
            client,
            op_id,
            lambda: client.change("DELETE", adapter_path(name), op_id=op_id, params=params),
        )
    _print_version(version, "unloaded", as_json=as_json)


@adapters_app.command()
def pin(
    name: Name,
    off: Annotated[bool, typer.Option("--off", help="let its weights go again")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Keep an adapter's weights in memory on every replica."""
    with connected(url, admin_key) as client:
        version = _change(client, "POST", adapter_path(name, "unpin" if off else "pin"))
    _print_version(version, "unpinned" if off else "pinned", as_json=as_json)


@adapters_app.command()
def rollback(
    name: Name,
    generation: Annotated[
        int | None, typer.Option(min=1, help="which; else the last with other bytes")
    ] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Put an earlier version in service again, as a new generation."""
    body = {} if generation is None else {"generation": generation}
    with connected(url, admin_key) as client:
        version = _change(client, "POST", adapter_path(name, "rollback"), body)
    _print_version(version, "rolled back", as_json=as_json)


@adapters_app.command()
def operations(
    operation: Annotated[str | None, typer.Argument(help="the id of one")] = None,
    name: Annotated[str, typer.Option(help="only on this name")] = "",
    phase: Annotated[OperationPhase | None, typer.Option(help="only in this phase")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 50,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """List what was done and by whom, latest first, or show one operation."""
    filters: Json = {"name": name, "limit": limit}
    if phase is not None:
        filters["phase"] = phase.value
    path = "/v1/adapters/operations"
    with connected(url, admin_key) as client:
        if operation is not None:
            found = client.get(f"{path}/{operation}")
            print_json(found) if as_json else tables.print_operation(found)
        else:
            found = client.get(path, filters)
            print_json(found) if as_json else tables.print_operations(found)


@alias_app.command("list")
def list_aliases(
    url: Url = DEFAULT_URL, admin_key: AdminKey = None, as_json: AsJson = False
) -> None:
    """List aliases."""
    with connected(url, admin_key) as client:
        document = client.get("/v1/adapters/aliases")
    print_json(document) if as_json else tables.print_aliases(document)


@alias_app.command("set")
def set_alias(
    name: Annotated[str, typer.Argument(help="the alias")],
    targets: Annotated[
        list[str], typer.Argument(help="adapter, adapter@generation, or several as TARGET=WEIGHT")
    ],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Have a name stand for one adapter, or for several in shares of the requests."""
    body = alias_body(targets)
    with connected(url, admin_key) as client:
        alias = _change(client, "PUT", alias_path(name), body)
    print_json(alias) if as_json else tables.print_aliases({"data": [alias]})


@alias_app.command("delete")
def delete_alias(
    name: Annotated[str, typer.Argument(help="the alias")],
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
    as_json: AsJson = False,
) -> None:
    """Forget an alias; the adapters stay."""
    with connected(url, admin_key) as client:
        alias = _change(client, "DELETE", alias_path(name))
    print_json(alias) if as_json else typer.echo(f"forgot {alias['alias']}")


def files_to_push(directory: Path) -> dict[str, Path]:
    """The parts of a push; refuses a directory of which something would be left behind."""
    try:
        found = find_adapter_files(directory)
    except (FileNotFoundError, PermissionError) as error:
        raise typer.BadParameter(str(error)) from error
    pushed = {CONFIG_FILE, WEIGHTS_FILE}
    left = sorted(str(path) for path in found.all if path.name not in pushed)
    if left:
        raise typer.BadParameter(
            f"a push sends {CONFIG_FILE} and {WEIGHTS_FILE} only, and {left[0]} belongs to this "
            f"adapter too: put the directory where the replicas see it, and load it"
        )
    return {"config": directory / CONFIG_FILE, "weights": directory / WEIGHTS_FILE}


def alias_body(targets: list[str]) -> Json:
    """The request that sets an alias to what was given on the command line."""
    if len(targets) == 1 and "=" not in targets[0]:
        return {"target": targets[0]}
    weights = {}
    for target in targets:
        adapter, _, weight = target.partition("=")
        try:
            weights[adapter] = float(weight)
        except ValueError:
            raise typer.BadParameter(f"{target!r} is not TARGET=WEIGHT") from None
    if len(weights) < len(targets):
        raise typer.BadParameter("a target is given twice")
    return {"weights": weights}


def _change(client: AdminClient, method: str, path: str, body: Json | None = None) -> Json:
    op_id = new_operation_id()
    return follow(client, op_id, lambda: client.change(method, path, op_id=op_id, body=body))


def _print_version(version: Json, verb: str, *, as_json: bool) -> None:
    print_json(version) if as_json else tables.print_version(version, verb)
