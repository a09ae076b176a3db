"""The command ``lorafleet bench``: load on a running deployment, and what its clients saw."""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.console import Console

from deployments.cli.adapter_tables import print_table
from deployments.cli.connection import DEFAULT_URL, NO_ANSWER, Url, print_json

if TYPE_CHECKING:
    from benchmarks.serving import Load

SOME_FAILED = 1

_PERCENTILES = (
    ("time to first token", "ttft_ms"),
    ("time between tokens", "itl_ms"),
    ("time between chunks", "chunk_gap_ms"),
)


def bench(
    url: Url = DEFAULT_URL,
    model: Annotated[
        list[str] | None, typer.Option(help="base model or adapter; repeat it to mix several")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="clients at the same time")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 75,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    requests: Annotated[int | None, typer.Option(min=1, help="default: four a client")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="LORAFLEET_API_KEY")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Send load and tell throughput and latency, as clients see them.

    Prompts are random tokens, answers are as long as asked for. Each model is asked once before.
    Exit status: 0 all were answered, 1 some were not, 3 no answer at all.
    """
    from benchmarks.serving import Load

    base = url.rstrip("/")
    try:
        models = model or [_first_model(base, api_key)]
    except (httpx.HTTPError, LookupError) as error:
        Console(stderr=True).print(f"{base}: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(NO_ANSWER) from error
    load = Load(
        url=base,
        models=models,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        num_requests=requests or 4 * concurrency,
        api_key=api_key,
    )
    result = asyncio.run(_run(load))
    print_json(result) if as_json else _print(result)
    if result["errors"]:
        all_failed = result["errors"] == result["num_requests"]
        raise typer.Exit(NO_ANSWER if all_failed else SOME_FAILED)


async def _run(load: "Load") -> dict[str, Any]:
    from benchmarks.serving import run_load

    await run_load(replace(load, num_requests=len(load.models), seed=load.seed + 1))
    return await run_load(load)


def _first_model(url: str, api_key: str | None) -> str:
    """The base model comes first in the list of models."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
    answer.raise_for_status()
    for model in answer.json()["data"]:
        return str(model["id"])
    raise LookupError("it serves no model")


def _print(result: dict[str, Any]) -> None:
    rows = [
        ("requests", f"{result['num_requests'] - result['errors']} of {result['num_requests']}"),
        ("output tokens a second", f"{result['output_tokens_per_s']:.1f}"),
        ("requests a second", f"{result['requests_per_s']:.2f}"),
    ]
    for name, key in _PERCENTILES:
        figures = result[key]
        if figures["p50"] is not None:
            rows.append((name, f"p50 {figures['p50']:.1f} ms, p99 {figures['p99']:.1f} ms"))
    print_table(("load", "figures"), rows)
    for sample in result["error_samples"]:
        Console(stderr=True).print(sample, style="red", markup=False, soft_wrap=True)
