"""Load on any OpenAI-compatible server: throughput and latency as its clients see them.

    python -m benchmarks.serving --url http://127.0.0.1:8000 --model base --model sql \
        --concurrency 8 --prompt-tokens 75 --output-tokens 64 --json out.json

Closed loop: each of ``--concurrency`` clients sends its next streaming completion when the last one
has ended; models take turns. Prompts are random token ids, so every server sees the same length,
and ``ignore_eos`` makes every answer as long as asked for.

A server may put several tokens in one chunk. ``ttft_ms`` is the time to the first chunk with a
token, ``itl_ms`` the gap before a chunk divided by the tokens it brings, ``chunk_gap_ms`` the gap
itself: what a reader sees, ``request_ms`` the time to the last token. Tokens are those of the
server's own usage report.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

# Ids that are plain words or word pieces in every common vocabulary.
_TOKEN_IDS = range(1000, 20000)


@dataclass(slots=True)
class Timeline:
    """When one request's tokens came: seconds since it was sent, and tokens known by then."""

    chunks: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1][1] if self.chunks else 0

    @property
    def ttft_s(self) -> float:
        return self.chunks[0][0]

    def gaps(self) -> list[tuple[float, int]]:
        """Seconds before each later chunk and the tokens it brought."""
        pairs = zip(self.chunks, self.chunks[1:], strict=False)
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send."""

    url: str
    models: Sequence[str]
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    api_key: str | None = None
    seed: int = 0


async def run_load(load: Load) -> dict[str, Any]:
    """Send the load and return its figures."""
    rng = random.Random(load.seed)
    bodies = [
        {
            "model": load.models[index % len(load.models)],
            "prompt": rng.choices(_TOKEN_IDS, k=load.prompt_tokens),
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        for index in range(load.num_requests)
    ]
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    timelines: list[Timeline] = []
    turns = count()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:

        async def client() -> None:
            while (turn := next(turns)) < len(bodies):
                timelines.append(await send(session, f"{load.url}/v1/completions", bodies[turn]))

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.concurrency)))
        elapsed = time.perf_counter() - start
    return summarize(timelines, elapsed)


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Timeline:
    """Stream one completion and note when its tokens came."""
    timeline = Timeline()
    start = time.perf_counter()
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                timeline.error = f"{response.status}: {(await response.text())[:200]}"
                return timeline
            async for line in response.content:
                now = time.perf_counter() - start
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    _note(timeline, json.loads(line[6:]), now)
    except (aiohttp.ClientError, TimeoutError) as error:
        timeline.error = f"{type(error).__name__}: {error}"
    if timeline.error is None and timeline.num_tokens != body["max_tokens"]:
        timeline.error = f"{timeline.num_tokens} tokens instead of {body['max_tokens']}"
    return timeline


def _note(timeline: Timeline, chunk: dict[str, Any], now: float) -> None:
    if "error" in chunk:
        timeline.error = str(chunk["error"])
    usage = chunk.get("usage")
    if usage is not None and usage["completion_tokens"] > timeline.num_tokens:
        timeline.chunks.append((now, usage["completion_tokens"]))


def summarize(timelines: Sequence[Timeline], elapsed: float) -> dict[str, Any]:
    """Work the figures out; failed requests count as errors and for nothing else."""
    good = [timeline for timeline in timelines if timeline.error is None]
    gaps = [gap for timeline in good for gap in timeline.gaps()]
    errors = sorted({timeline.error for timeline in timelines if timeline.error is not None})
    return {
        "output_tokens_per_s": sum(timeline.num_tokens for timeline in good) / elapsed,
        "requests_per_s": len(good) / elapsed,
        "ttft_ms": _percentiles([timeline.ttft_s for timeline in good]),
        "itl_ms": _percentiles([seconds / tokens for seconds, tokens in gaps]),
        "chunk_gap_ms": _percentiles([seconds for seconds, _ in gaps]),
        "request_ms": _percentiles([timeline.chunks[-1][0] for timeline in good]),
        "errors": len(timelines) - len(good),
        "error_samples": errors[:3],
        "num_requests": len(timelines),
        "elapsed_s": elapsed,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.array(seconds) * 1000, [50, 99]).tolist()
    return {"p50": p50, "p99": p99}


def main() -> None:
    parser = argparse.ArgumentParser(description="Load on any OpenAI-compatible server.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, action="append")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=75)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, help="default: four for each client")
    parser.add_argument("--warmup", type=int, help="requests not counted; default: one each model")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_requests = args.requests or 4 * args.concurrency
    num_warmup = len(args.model) if args.warmup is None else args.warmup

    def load(num: int, seed: int) -> Load:
        return Load(
            url=args.url.rstrip("/"),
            models=args.model,
            concurrency=args.concurrency,
            prompt_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            num_requests=num,
            api_key=args.api_key,
            seed=seed,
        )

    if num_warmup:
        asyncio.run(run_load(load(num_warmup, args.seed + 1)))
    result = asyncio.run(run_load(load(num_requests, args.seed)))
    result["load"] = {
        "models": args.model,
        "concurrency": args.concurrency,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
