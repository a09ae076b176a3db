"""What HTTP, Serve and the hops between processes cost: a running server beside the bare engine.

    python -m benchmarks.layers --url http://127.0.0.1:8000 --name base \
        --model .cache/models/smollm2-135m-instruct --threads 2 --json OUT

The same closed loop is run on the server and on an engine in this process with the same settings,
in turns; only one of the two is at work at a time. The server should have one replica with as many
threads. Medians over the turns are compared.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.engine_under_test import DEFAULT_MODEL
from benchmarks.peers import OUTPUT_TOKENS, PROMPT_TOKENS, medians
from benchmarks.serving import Load, Timeline, run_load, summarize
from engine import AsyncEngine, CacheConfig, EngineConfig, LoRAConfig, SamplingParams


def make_engine(model: Path, threads: int) -> AsyncEngine:
    """An engine with LoRA, as a replica has it."""
    config = EngineConfig(
        model=model,
        num_threads=threads,
        max_model_len=2048,
        cache=CacheConfig(memory_bytes=512 << 20),
        lora=LoRAConfig(max_loras=8, max_cpu_loras=32, max_lora_rank=16),
    )
    return AsyncEngine(config)


async def run_engine(
    engine: AsyncEngine, concurrency: int, num_requests: int, seed: int
) -> dict[str, Any]:
    """The load of `benchmarks.serving.run_load`, without a server."""
    rng = random.Random(seed)
    prompts = [rng.choices(range(1000, 20000), k=PROMPT_TOKENS) for _ in range(num_requests)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    timelines: list[Timeline] = []
    turns = count()

    async def client() -> None:
        while (turn := next(turns)) < num_requests:
            timeline = Timeline()
            start = time.perf_counter()
            num_tokens = 0
            async for outputs in engine.generate(f"{seed} {turn}", prompts[turn], params):
                num_tokens += sum(len(output.token_ids) for output in outputs)
                timeline.chunks.append((time.perf_counter() - start, num_tokens))
            timelines.append(timeline)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return summarize(timelines, time.perf_counter() - start)


async def measure(
    url: str, name: str, model: Path, *, threads: int, turns: int, concurrencies: Sequence[int]
) -> dict[str, Any]:
    """Return the figures of both and the ratios."""
    engine = make_engine(model, threads)
    await engine.start()
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {
        f"c{clients}": {"engine": [], "server": []} for clients in concurrencies
    }
    for turn in range(turns + 1):
        for clients in concurrencies:
            num_requests = 4 * clients if clients > 1 else 8
            load = Load(
                url=url,
                models=[name],
                concurrency=clients,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                num_requests=num_requests,
                seed=turn,
            )
            by_server = await run_load(load)
            if by_server["errors"]:
                raise RuntimeError(str(by_server["error_samples"]))
            by_engine = await run_engine(engine, clients, num_requests, turn)
            if turn:
                runs[f"c{clients}"]["server"].append(by_server)
                runs[f"c{clients}"]["engine"].append(by_engine)
    await engine.stop()
    figures = {
        clients: {where: medians(results) for where, results in by_where.items()}
        for clients, by_where in runs.items()
    }
    return {"figures": figures, "ratios": {key: _ratios(**by) for key, by in figures.items()}}


def _ratios(*, engine: dict[str, float], server: dict[str, float]) -> dict[str, float]:
    return {
        "throughput": server["output_tokens_per_s"] / engine["output_tokens_per_s"],
        "added_ttft_p50_ms": server["ttft_p50_ms"] - engine["ttft_p50_ms"],
        "added_itl_p50_ms": server["itl_p50_ms"] - engine["itl_p50_ms"],
    }


def main() -> None:
    """Print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--name", required=True, help="the base model's name on the server")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report = asyncio.run(
        measure(
            args.url.rstrip("/"),
            args.name,
            args.model,
            threads=args.threads,
            turns=args.turns,
            concurrencies=(1, 8, 16),
        )
    )
    text = json.dumps(report, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
