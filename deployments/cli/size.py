"""The command ``lorafleet size``: will it fit, and with which settings?"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deployments.cli.adapter_tables import print_table, size
from deployments.cli.connection import print_json
from deployments.paths import find_prepared

if TYPE_CHECKING:
    from deployments.sizing import Load, ModelSize, Sizing

TOO_LITTLE_MEMORY = 1
UNDECIDED = 2

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size_command(
    model: Annotated[str, typer.Option(help="base model: prepared name, directory or hub id")],
    adapters: Annotated[int, typer.Option(min=0, help="how many are registered")],
    rank: Annotated[int, typer.Option(min=1, help="the largest rank among them")],
    memory: Annotated[str, typer.Option(help="of one replica's device, as in 80GiB")] = "80GiB",
    targets: Annotated[str, typer.Option(help="as in q_proj,v_proj; default: all linear")] = "",
    context: Annotated[int | None, typer.Option(min=1, help="tokens of one request")] = None,
    max_loras: Annotated[int, typer.Option(min=1, help="adapters active at the same time")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Say how one replica's memory is divided, and which settings to deploy with.

    Exit status: 0 it fits, 1 it does not, 2 cannot tell (no such model, wrong options).
    """
    from deployments.sizing import Load, measure_model, plan
    from engine.errors import UnsupportedModelError

    try:
        measured = measure_model(find_config(model))
        load = Load(
            num_adapters=adapters,
            rank=rank,
            max_loras=max_loras,
            memory_bytes=parse_bytes(memory),
            context=context or measured.max_model_len,
            targets=tuple(filter(None, map(str.strip, targets.split(",")))),
        )
        sizing = plan(measured, load)
    except (UnsupportedModelError, ValueError, OSError) as error:
        Console(stderr=True).print(f"cannot tell: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(UNDECIDED) from error
    print_json(asdict(sizing)) if as_json else _print(measured, load, sizing)
    if not sizing.fits:
        raise typer.Exit(TOO_LITTLE_MEMORY)


def find_config(model: str) -> Path:
    """The directory of a model's config.json; of a hub's model nothing else is downloaded."""
    if (path := find_prepared(model)) is not None:
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=["config.json"]))


def parse_bytes(text: str) -> int:
    """Bytes from a number with a unit of powers of 1024: 80GiB, 80G, 512M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 80GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _print(model: "ModelSize", load: "Load", sizing: "Sizing") -> None:
    rows = [
        ("device memory", size(load.memory_bytes), "of which 90% is planned with"),
        ("base model", size(sizing.weight_bytes), ""),
        ("adapter slots", size(sizing.slot_bytes), f"{load.max_loras} of rank {load.rank}"),
        ("working memory", size(sizing.working_bytes), "estimated, with default batch settings"),
        ("KV cache", size(sizing.kv_cache_bytes), f"{sizing.kv_tokens:,} tokens"),
        ("requests at once", f"{sizing.concurrent_requests:,}", f"of {load.context:,} tokens"),
        ("one adapter", size(sizing.adapter_bytes), "in host memory and in the node's store"),
        ("all adapters", size(sizing.all_adapters_bytes), f"{load.num_adapters:,} of them"),
    ]
    print_table(("one replica", "takes", ""), rows)
    console = Console(highlight=False)
    if not sizing.fits:
        console.print("[bold red]does not fit[/]: too little is left for one request")
        return
    console.print("[bold green]fits[/]; in the deployment's args:")
    console.print(
        f"engine:\n"
        f"  kv_cache_bytes: {sizing.kv_cache_bytes}\n"
        f"  max_model_len: {min(load.context, model.max_model_len)}\n"
        f"  max_loras: {load.max_loras}\n"
        f"  max_cpu_loras: {max(load.max_loras, load.num_adapters)}  "
        f"# {size(sizing.all_adapters_bytes)} of host memory; fewer, if that is too much\n"
        f"  max_lora_rank: {sizing.max_lora_rank}",
        markup=False,
        soft_wrap=True,
    )
