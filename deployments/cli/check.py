"""The command ``lorafleet check``: would this adapter be served exactly?

Knows options and exit statuses. The verdict is made in ``check_report``, whose imports take
seconds, so it is imported when the command runs.
"""

from typing import Annotated

import typer
from rich.console import Console

REFUSED = 1
UNDECIDED = 2


def check(
    source: Annotated[str, typer.Argument(help="directory, s3:// or hf:// URI of an adapter")],
    model: Annotated[str, typer.Option(help="base model: prepared name, directory or hub id")],
    max_lora_rank: Annotated[int, typer.Option(help="the deployment's limit")] = 64,
    allow_pickle: Annotated[bool, typer.Option(help="accept adapter_model.bin")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Say whether an adapter would be served exactly, and if not, why.

    Exit status: 0 served, 1 not served, 2 cannot tell (no such model, source not reachable).
    """
    from deployments.cli.check_report import check_source
    from engine.config import LoRAConfig
    from engine.errors import UnsupportedModelError
    from resolvers.base import ResolverError

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
