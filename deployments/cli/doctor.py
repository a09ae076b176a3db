"""The command ``lorafleet doctor``: looks for known causes of trouble on this machine."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

from deployments.cli import doctor_checks as checks
from deployments.cli.connection import print_json
from deployments.cli.doctor_checks import Finding, Level
from deployments.config import DeploymentConfig, load_config

FOUND = 1

_SIGNS = {
    Level.OK: "[green]ok  [/]",
    Level.WARN: "[yellow]warn[/]",
    Level.FAIL: "[bold red]fail[/]",
}


def doctor(
    config: Annotated[Path, typer.Option(help="the Serve configuration to check for")] = Path(
        "serve_config.yaml"
    ),
    url: Annotated[str | None, typer.Option(help="a running server to compare clocks with")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON array")] = False,
) -> None:
    """Look for what would keep a deployment from starting, or slow it down.

    Exit status: 0 nothing stands in the way, 1 something does.
    """
    found = []
    console = Console()
    for finding in examine(config, url):
        found.append(finding)
        if not as_json:
            _print(console, finding)
    if as_json:
        print_json([asdict(finding) for finding in found])
    if any(finding.level is Level.FAIL for finding in found):
        raise typer.Exit(FOUND)


def examine(config: Path, url: str | None) -> Iterator[Finding]:
    """Run every check, the quick ones first."""
    yield checks.check_kernels_name()
    yield checks.check_shared_memory()
    if url is not None:
        yield checks.check_clock(url)
    try:
        document = yaml.safe_load(config.read_text())
        deployment = read_deployment(document)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        yield Finding("configuration", Level.FAIL, f"{config}: {error}", "see configs/")
    else:
        yield Finding("configuration", Level.OK, str(config))
        address = document.get("http_options") or {}
        yield checks.check_port(address.get("host", "127.0.0.1"), address.get("port", 8000))
        yield checks.check_model(deployment)
        yield from checks.check_directories(deployment)
        yield from checks.check_resolvers(deployment)
    yield checks.check_torch()
    yield checks.check_cpu_kernels()


def read_deployment(document: dict[str, Any]) -> DeploymentConfig:
    """The settings of lorafleet's application in a Serve configuration."""
    [application] = [
        each
        for each in document["applications"]
        if each["import_path"] == "deployments.app:build_app"
    ]
    return load_config(application.get("args") or {})


def _print(console: Console, finding: Finding) -> None:
    console.print(
        f"{_SIGNS[finding.level]} {finding.check}: {escape(finding.text)}",
        highlight=False,
        soft_wrap=True,
    )
    if finding.advice:
        console.print(f"     {finding.advice}", markup=False, highlight=False, soft_wrap=True)
