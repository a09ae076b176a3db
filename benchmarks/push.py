"""A trainer that replaces a policy adapter all the time, while rollouts stream from it.

    python -m benchmarks.push --url http://127.0.0.1:8000 --adapter examples/adapters/haiku \
        --streams 4 --seconds 30 --json out.json

Pushes variants of one adapter, each with other bytes, first while nothing else runs, then while
``--streams`` clients stream completions from it; between the two, the clients run alone. A gap is
the time between two chunks of one stream, what its reader sees of a replace. After every push one
request checks that the new generation answers: ``stale`` counts those that came from an older one.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from safetensors.torch import load_file, save

NAME = "bench-policy"
GENERATION_HEADER = "x-lorafleet-adapter-generation"
_ANSWER_TOKENS = 200


@dataclass(slots=True)
class Phase:
    """What was seen in one phase. Times in seconds."""

    pushes: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    first_chunks: list[float] = field(default_factory=list)
    num_streams: int = 0
    errors: list[str] = field(default_factory=list)
    stale: int = 0

    def document(self, seconds: float) -> dict[str, Any]:
        return {
            "pushes": len(self.pushes),
            "pushes_per_s": round(len(self.pushes) / seconds, 2),
            "push_ms": _quantiles(self.pushes),
            "streams": self.num_streams,
            "first_chunk_ms": _quantiles(self.first_chunks),
            "chunk_gap_ms": _quantiles(self.gaps),
            "stale": self.stale,
            "errors": self.errors[:5],
            "num_errors": len(self.errors),
        }


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p99, most = np.quantile(seconds, (0.5, 0.99, 1.0)) * 1000
    return {"p50": round(p50, 1), "p99": round(p99, 1), "max": round(most, 1)}


class Trainer:
    """Sends variants of an adapter."""

    def __init__(self, session: aiohttp.ClientSession, adapter: Path) -> None:
        self._session = session
        self._config = (adapter / "adapter_config.json").read_bytes()
        self._tensors = load_file(adapter / "adapter_model.safetensors")
        self._step = 0

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    async def push(self, phase: Phase) -> None:
        """Replace the adapter by another variant, and check that it answers."""
        form = aiohttp.FormData()
        form.add_field("config", self._config, filename="adapter_config.json")
        form.add_field("weights", self._variant(), filename="adapter_model.safetensors")
        began = time.perf_counter()
        async with self._session.put(f"/v1/adapters/{NAME}", data=form) as response:
            document = await response.json()
            if response.status != 200:
                phase.errors.append(f"push: {document}")
                return
        phase.pushes.append(time.perf_counter() - began)
        body = {"model": NAME, "prompt": "x", "max_tokens": 1}
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                phase.errors.append(f"check: {await response.text()}")
            elif int(response.headers[GENERATION_HEADER]) < document["generation"]:
                phase.stale += 1

    def _variant(self) -> bytes:
        self._step += 1
        name = min(self._tensors)
        tensor = self._tensors[name].clone()
        # Two digits, since bfloat16 cannot count far.
        tensor.view(-1)[0] = self._step % 100 * 1e-3
        tensor.view(-1)[1] = self._step // 100 * 1e-3
        return bytes(save({**self._tensors, name: tensor}))


async def stream(session: aiohttp.ClientSession, phase: Phase, until: float) -> None:
    """One rollout after another until the time is over."""
    body = {
        "model": NAME,
        "prompt": "The weather today",
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    while time.perf_counter() < until:
        last = began = time.perf_counter()
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                phase.errors.append(f"stream: {await response.text()}")
                continue
            is_done = False
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = time.perf_counter()
                (phase.first_chunks if last == began else phase.gaps).append(now - last)
                last = now
                is_done = line.strip() == b"data: [DONE]"
            if not is_done:
                phase.errors.append("stream: ended too early")
        phase.num_streams += 1


async def repeat(work: Callable[[Phase], Awaitable[None]], phase: Phase, until: float) -> None:
    """Do the work again and again until the time is over."""
    while time.perf_counter() < until:
        await work(phase)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(args.url, timeout=timeout) as session:
        trainer = Trainer(session, args.adapter)
        await trainer.push(Phase())
        phases = {}
        for name, pushes, streams in (
            ("pushes alone", True, 0),
            ("streams alone", False, args.streams),
            ("pushes and streams", True, args.streams),
        ):
            phase, until = Phase(), time.perf_counter() + args.seconds
            clients = [stream(session, phase, until) for _ in range(streams)]
            if pushes:
                clients.append(repeat(trainer.push, phase, until))
            await asyncio.gather(*clients)
            phases[name] = phase.document(args.seconds)
            print(name, json.dumps(phases[name]), flush=True)
        async with session.get("/v1/adapters", params={"limit": "1"}) as response:
            num_replicas = len((await response.json())["replicas"])
        await session.delete(f"/v1/adapters/{NAME}")
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "replicas": num_replicas,
        "adapter_bytes": trainer.size_bytes,
        "seconds": args.seconds,
        "streams": args.streams,
        "phases": phases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--adapter", type=Path, required=True, help="a PEFT adapter's directory")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = asyncio.run(measure(args))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
