"""What a cold adapter costs: first-token latency by source, and the download rate against boto3.

    python -m benchmarks.resolvers --model .cache/models/smollm2-135m-instruct --json OUT

Cold means that the node's store has never seen the adapter: it is found by name, brought to the
store, checked and given to the engine. Warm means that its weights are in a slot. The S3 server is
a local process with Python's speed, so its share of a figure is large; the comparison with boto3's
own parallel download is of the same object from the same server, in turns.
"""

import argparse
import asyncio
import io
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from adapters import LoRARequest
from benchmarks.adapters import write_random_adapters
from benchmarks.machine import measure_machine
from deployments.sources import AdapterSources
from engine import EngineConfig, LoRAConfig, SamplingParams
from engine.async_engine import AsyncEngine
from resolvers.base import Resolver
from resolvers.filesystem import FilesystemResolver
from resolvers.s3 import S3Resolver
from resolvers.store import AdapterStore
from tests.resolvers.s3_server import CREDENTIALS, Bucket, s3_server

DEFAULT_MODEL = Path(".cache/models/smollm2-135m-instruct")
PROMPT_TOKENS = 32


def main() -> None:
    """Measure and write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--object-bytes", type=int, default=128 << 20)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= CREDENTIALS
    with s3_server() as port, tempfile.TemporaryDirectory() as scratch:
        bucket = Bucket(port, "adapters")
        bucket.create()
        result = {
            "machine": asdict(measure_machine(torch.device("cpu"), torch.bfloat16)),
            "first_token_ms": asyncio.run(
                first_tokens(args.model.resolve(), Path(scratch), bucket, args.repeats)
            ),
            "download": downloads(Path(scratch), bucket, args.object_bytes, args.repeats),
        }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


async def first_tokens(model: Path, root: Path, bucket: Bucket, repeats: int) -> dict[str, Any]:
    """Time from a name to the first token, for an adapter that is warm or cold."""
    paths = write_random_adapters(model, root / "local", num_adapters=repeats + 1)
    for path in paths:
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        config, weights = files["adapter_config.json"], files["adapter_model.safetensors"]
        bucket.put_adapter(f"team/{path.name}", weights, config)
    engine = AsyncEngine(EngineConfig(model=model, max_model_len=512, lora=LoRAConfig(max_loras=4)))
    await engine.start()
    times: dict[str, list[float]] = {"warm": [], "cold local": [], "cold S3": []}
    for turn, path in enumerate(paths):
        for kind in times:
            store = AdapterStore(root / "stores" / f"{turn} {kind}")
            resolver = await make_resolver(kind, store, path.parent, bucket)
            sources = AdapterSources("base", store, resolver=resolver)
            started = time.perf_counter()
            request = await bring(engine, sources, path.name)
            if kind == "warm":
                await first_token(engine, request)
                started = time.perf_counter()
            await first_token(engine, request)
            if turn:  # the first turn warms caches up
                times[kind].append(time.perf_counter() - started)
            await engine.remove_lora(request.digest or "")
    await engine.stop()
    size = sum(file.stat().st_size for file in paths[0].iterdir())
    over_warm = {
        f"{kind}, over warm": summary(
            [s - w for s, w in zip(times[kind], times["warm"], strict=True)]
        )
        for kind in ("cold local", "cold S3")
    }
    by_kind = {kind: summary(seconds) for kind, seconds in times.items()}
    return {"adapter_bytes": size, **by_kind, **over_warm}


async def make_resolver(kind: str, store: AdapterStore, local: Path, bucket: Bucket) -> Resolver:
    """A resolver whose connection is open, as after any earlier request."""
    if kind != "cold S3":
        # Waiting until a directory is at rest is not what is measured.
        return FilesystemResolver([str(local)], settle_s=0)
    resolver = make_s3(store, bucket)
    await resolver.resolve_lora("base", "unknown")
    return resolver


def make_s3(store: AdapterStore, bucket: Bucket) -> S3Resolver:
    """The S3 resolver with its defaults."""
    endpoint = f"http://127.0.0.1:{bucket.port}"
    uri = f"s3://{bucket.name}/team"
    return S3Resolver(store, uri, endpoint_url=endpoint, region_name="us-east-1")


async def bring(engine: AsyncEngine, sources: AdapterSources, name: str) -> LoRARequest:
    """Do what a first request does before it can run."""
    request = await sources.find(name)
    assert request is not None
    await engine.load_lora(request)
    return request


async def first_token(engine: AsyncEngine, request: LoRARequest) -> None:
    """Generate one token; every prompt is new, so that no prefix is cached."""
    prompt = random.choices(range(1000, 20000), k=PROMPT_TOKENS)
    params = SamplingParams(max_tokens=1, temperature=0)
    async for _ in engine.generate(str(time.perf_counter_ns()), prompt, params, lora=request):
        pass


def downloads(root: Path, bucket: Bucket, size: int, repeats: int) -> dict[str, Any]:
    """Rate of the resolver and of boto3's transfer manager for one large object, in turns."""
    bucket.put_adapter("team/large", b"")
    # In parts, as every tool uploads what is large: its ETag is no MD5 that would be checked.
    weights = io.BytesIO(os.urandom(size))
    bucket.client.upload_fileobj(weights, bucket.name, "team/large/adapter_model.safetensors")
    times: dict[str, list[float]] = {"resolver": [], "boto3": []}
    by_resolver(root / "large" / "first", bucket)  # reads what boto3 knows of S3
    for turn in range(repeats):
        ways = {"resolver": by_resolver, "boto3": by_boto3}
        # Whoever comes second finds caches warmer or a disk busier, so they take turns at that too.
        for name in sorted(ways, reverse=bool(turn % 2)):
            times[name].append(ways[name](root / "large" / f"{turn} {name}", bucket))
    rates = {name: size / statistics.median(seconds) / 1e6 for name, seconds in times.items()}
    # Of two runs one after the other, so that a machine that slows down slows both.
    pairs = zip(times["boto3"], times["resolver"], strict=True)
    share = statistics.median(boto3 / resolver for boto3, resolver in pairs)
    return {"object_bytes": size, "mb_per_s": rates, "share_of_boto3": share, "seconds": times}


def by_resolver(place: Path, bucket: Bucket) -> float:
    """Seconds until the resolver has the object: verified, synced, in the store."""
    resolver = make_s3(AdapterStore(place), bucket)
    asyncio.run(resolver.resolve_lora("base", "unknown"))
    started = time.perf_counter()
    assert asyncio.run(resolver.resolve_lora("base", "large")) is not None
    return time.perf_counter() - started


def by_boto3(place: Path, bucket: Bucket) -> float:
    """Seconds until boto3's transfer manager has written it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    bucket.client.download_file(bucket.name, "team/large/adapter_model.safetensors", str(place))
    return time.perf_counter() - started


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and extremes in milliseconds."""
    milliseconds = [1000 * value for value in seconds]
    return {
        "median": statistics.median(milliseconds),
        "min": min(milliseconds),
        "max": max(milliseconds),
    }


if __name__ == "__main__":
    main()
