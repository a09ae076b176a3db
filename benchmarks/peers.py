"""Several running servers under the same loads, in turns: who is faster, by what factor.

    python -m benchmarks.peers --json out.json \
        --server lorafleet=http://127.0.0.1:8000 --server vllm=http://127.0.0.1:8001 \
        --base base --adapter r0 --adapter r1 ...

All servers serve the same base model and adapters under the same names and are idle when it is not
their turn. A cell is a load; every turn sends each cell to every server once, and medians over the
turns are compared. Ratios are of the first server to each other one: above one means more tokens
each second, or less time.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import Load, run_load

PROMPT_TOKENS = 75
OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Cell:
    """One load: which models take turns, from how many clients."""

    name: str
    models: Sequence[str]
    concurrency: int

    def load(self, url: str, seed: int, rounds: int) -> Load:
        """The load on one server; every seed brings prompts that no server has seen."""
        return Load(
            url=url,
            models=self.models,
            concurrency=self.concurrency,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
            num_requests=rounds * self.concurrency,
            seed=seed,
        )


def cells(base: str, adapters: Sequence[str]) -> list[Cell]:
    """The base alone and up to eight and sixteen adapters, at a few concurrencies."""
    found = [Cell(f"base_c{clients}", [base], clients) for clients in (1, 8, 16)]
    found.append(Cell("adapters1_c1", adapters[:1], 1))
    found += [Cell(f"adapters8_c{clients}", adapters[:8], clients) for clients in (8, 16)]
    if len(adapters) >= 16:
        found.append(Cell("adapters16_c16", adapters[:16], 16))
    return found


async def run_turns(
    servers: Mapping[str, str], loads: Sequence[Cell], turns: int, rounds: int
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return the results by cell and server; turn 0 warms up and is not kept."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        cell.name: {name: [] for name in servers} for cell in loads
    }
    for turn in range(turns + 1):
        for cell in loads:
            for name, url in servers.items():
                result = await run_load(cell.load(url, seed=turn, rounds=rounds if turn else 1))
                if result["errors"]:
                    raise RuntimeError(f"{name}, {cell.name}: {result['error_samples']}")
                if turn:
                    results[cell.name][name].append(result)
                rate = result["output_tokens_per_s"]
                print(f"{turn}/{turns} {cell.name:16} {name:12} {rate:8.1f} tok/s", flush=True)
    return results


def medians(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the turns of what users feel."""
    return {
        "output_tokens_per_s": statistics.median(run["output_tokens_per_s"] for run in results),
        "ttft_p50_ms": statistics.median(run["ttft_ms"]["p50"] for run in results),
        "itl_p50_ms": statistics.median(run["itl_ms"]["p50"] for run in results),
    }


def ratios(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """How many times better the first server is than each other one."""
    first, *others = figures
    ours = figures[first]
    return {
        other: {
            "output_tokens_per_s": ours["output_tokens_per_s"] / theirs["output_tokens_per_s"],
            "ttft_p50": theirs["ttft_p50_ms"] / ours["ttft_p50_ms"],
            "itl_p50": theirs["itl_p50_ms"] / ours["itl_p50_ms"],
        }
        for other in others
        for theirs in [figures[other]]
    }


def main() -> None:
    """Measure, print the ratios and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", required=True, action="append", metavar="NAME=URL")
    parser.add_argument("--base", required=True, help="the base model's name on all servers")
    parser.add_argument("--adapter", required=True, action="append")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client in a turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    servers = {name: url.rstrip("/") for name, _, url in (s.partition("=") for s in args.server)}
    loads = cells(args.base, args.adapter)
    results = asyncio.run(run_turns(servers, loads, args.turns, args.rounds))
    figures = {
        cell: {name: medians(runs) for name, runs in by_server.items()}
        for cell, by_server in results.items()
    }
    report = {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "turns": args.turns,
        "figures": figures,
        "ratios": {cell: ratios(by_server) for cell, by_server in figures.items()},
        "runs": results,
    }
    print(json.dumps(report["ratios"], indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
