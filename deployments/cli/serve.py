"""The command ``lorafleet serve``: ``serve run`` with a port that can be chosen."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

WRONG_CONFIG = 2


def serve(
    config: Annotated[Path, typer.Argument(help="a Serve configuration")] = Path(
        "serve_config.yaml"
    ),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="instead of its own")] = None,
    host: Annotated[str | None, typer.Option(help="instead of its own")] = None,
) -> None:
    """Serve in the foreground until Ctrl-C. On a cluster, use `serve deploy` or KubeRay.

    Exit status: 2 if the configuration cannot be read, else that of `serve run`.
    """
    try:
        path = with_address(config, host=host, port=port)
    except (OSError, ValueError, yaml.YAMLError) as error:
        typer.echo(f"{config}: {error}", err=True)
        raise typer.Exit(WRONG_CONFIG) from error
    program = str(Path(sys.executable).with_name("serve"))
    os.execv(program, [program, "run", str(path)])


def with_address(config: Path, *, host: str | None, port: int | None) -> Path:
    """The configuration, or a copy of it that listens elsewhere."""
    document: Any = yaml.safe_load(config.read_text())
    if not isinstance(document, dict) or not document.get("applications"):
        raise ValueError("this is no Serve configuration: it has no 'applications'")
    asked = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    if not asked:
        return config
    document["http_options"] = {**(document.get("http_options") or {}), **asked}
    # It is read after this process has become another, so nobody could remove it.
    handle, name = tempfile.mkstemp(prefix="lorafleet-serve-", suffix=".yaml")
    with os.fdopen(handle, "w") as copy:
        yaml.safe_dump(document, copy)
    return Path(name)
