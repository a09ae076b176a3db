"""What hundreds of slow clients and dozens that vanish cost the others, and what they leave behind.

    python -m benchmarks.slow_clients --url http://127.0.0.1:8000 --model base --model sql \
        --json benchmarks/results/slow_clients.json

The load of ``benchmarks.serving`` runs alone and then beside them, in turns. Half of the slow
clients send their body a byte at a time, half read a stream through a tiny socket buffer a little
at a time; both last as long as the load does. What they ask for is generated before the load
begins, so that the figures are of connections and not of the model's work. Those that vanish reset
their connection in the middle of a stream that the model is at work on, one after another.
"""

import argparse
import asyncio
import json
import re
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.serving import Load, run_load

_COMPLETIONS = "/v1/completions"
_PAUSE_S = 0.5
_READ_BYTES = 64
_BUFFER_BYTES = 2048
_SETTLE_TIMEOUT_S = 120
# What must be as before once everybody has left.
_GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "lorafleet_slots_in_use",
)


class SlowClients:
    """Connections that are open until ``leave`` is called."""

    def __init__(self, url: str, models: Sequence[str]) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._models = models
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = 0

    async def enter(self, count: int) -> None:
        """Open the connections; returns when every reader's stream has begun."""
        for index in range(count):
            work = self._send_slowly if index % 2 else self._read_slowly
            self._tasks.append(asyncio.create_task(work(self._models[index % len(self._models)])))
        while self._ready < count:
            await self._look(0.05)

    async def _look(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        for task in self._tasks:
            if task.done():
                task.result()

    async def leave(self) -> None:
        """Close them all; raises if one had been refused or cut off."""
        await self._look(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._ready = 0

    async def vanish(self, pause_s: float, count: int) -> None:
        """One client after another begins a long stream and resets its connection."""
        for index in range(count):
            model = self._models[index % len(self._models)]
            reader, writer = await self._connect(None)
            writer.write(_request(_body(model, max_tokens=200)))
            await reader.readuntil(b"data: ")
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            await asyncio.sleep(pause_s)

    async def _read_slowly(self, model: str) -> None:
        reader, writer = await self._connect(_BUFFER_BYTES)
        try:
            # Alternatives make the answer much larger than the buffers.
            writer.write(_request(_body(model, max_tokens=32, logprobs=20)))
            await reader.readuntil(b"data: ")
            self._ready += 1
            while await reader.read(_READ_BYTES):  # noqa: ASYNC110 -- the pause is the point
                await asyncio.sleep(_PAUSE_S)
            raise RuntimeError("a slow reader was cut off, or its answer was too short")
        finally:
            writer.transport.abort()

    async def _send_slowly(self, model: str) -> None:
        _, writer = await self._connect(None)
        request = _request(_body(model, max_tokens=1, user="x" * 10_000))
        start = request.index(b"{")
        try:
            writer.write(request[:start])
            self._ready += 1
            for position in range(start, len(request)):
                writer.write(request[position : position + 1])
                await writer.drain()
                await asyncio.sleep(_PAUSE_S)
        finally:
            writer.transport.abort()

    async def _connect(
        self, buffer_bytes: int | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        return await asyncio.open_connection(sock=sock, limit=buffer_bytes or 1 << 16)


def _body(model: str, **fields: object) -> bytes:
    body = {"model": model, "prompt": "Once", "stream": True, "ignore_eos": True, **fields}
    return json.dumps(body).encode()


def _request(body: bytes) -> bytes:
    head = f"POST {_COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def read_gauges(url: str) -> dict[str, float]:
    """What the replicas say that requests hold, all together."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {
        name: sum(map(float, re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M)))
        for name in _GAUGES
    }


async def until_idle(url: str) -> dict[str, float]:
    """Wait until nothing runs or waits; returns what is still held then."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        gauges = await read_gauges(url)
        if not gauges[_GAUGES[0]] + gauges[_GAUGES[1]]:
            return gauges
        await asyncio.sleep(0.2)
    raise RuntimeError(f"requests still run: {gauges}")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Alone and beside the others, in turns."""
    load = Load(
        url=args.url,
        models=args.model,
        concurrency=args.concurrency,
        prompt_tokens=32,
        output_tokens=32,
        num_requests=args.requests,
    )
    await run_load(load)
    before = await until_idle(args.url)
    clients = SlowClients(args.url, args.model)
    rounds = []
    for _ in range(args.rounds):
        alone = await run_load(load)
        await clients.enter(args.slow)
        await until_idle(args.url)
        pause_s = alone["elapsed_s"] / max(args.vanishing, 1)
        beside, _ = await asyncio.gather(run_load(load), clients.vanish(pause_s, args.vanishing))
        await clients.leave()
        after = await until_idle(args.url)
        rounds.append({"alone": alone, "beside": beside, "held_after": after})
    ratios = {
        figure: statistics.median(
            each["beside"][figure]["p50"] / each["alone"][figure]["p50"] for each in rounds
        )
        for figure in ("ttft_ms", "itl_ms", "request_ms")
    }
    return {
        "num_slow": args.slow,
        "num_vanishing": args.vanishing,
        "concurrency": args.concurrency,
        "p50_ratio": ratios,
        "held_before": before,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Slow clients and those that vanish.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, action="append")
    parser.add_argument("--slow", type=int, default=300)
    parser.add_argument("--vanishing", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.url = args.url.rstrip("/")
    text = json.dumps(asyncio.run(measure(args)), indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
