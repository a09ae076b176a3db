"""The engine in this process as benchmarks run it: so many prompts at once, or so many clients.

Knows engines, requests and clocks. Knows nothing of which cases are compared.
"""

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from adapters import LoRARequest, adapter_digest, find_adapter_files
from engine import CacheConfig, Engine, EngineConfig, LoRAConfig, SamplingParams, SchedulerConfig

DEFAULT_MODEL = Path(".cache/models/smollm2-135m-instruct")


@dataclass(frozen=True, slots=True)
class Workload:
    """``batch`` prompts at once; prompt i uses adapter i modulo ``num_adapters``."""

    batch: int
    num_adapters: int
    prompt_tokens: int = 75
    output_tokens: int = 64

    def prompts(self) -> list[list[int]]:
        rng = random.Random(self.batch)
        return [rng.choices(range(1000, 20000), k=self.prompt_tokens) for _ in range(self.batch)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run; ``decode_step_s`` is the median step in which every request decoded."""

    tokens_per_s: float
    ttft_p50_s: float
    ttft_max_s: float
    decode_step_s: float


class EngineUnderTest:
    """One engine with adapters that are in host memory and, as far as they fit, in slots."""

    def __init__(
        self, model: Path, lora: LoRAConfig | None, paths: Sequence[Path], threads: int, dtype: str
    ) -> None:
        config = EngineConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            num_threads=threads,
            max_model_len=2048,
            cache=CacheConfig(memory_bytes=512 << 20, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=64),
            lora=lora,
        )
        self._engine = Engine(config, ThreadPoolExecutor(2))
        self._loras = [self._load(path) for path in paths] if lora is not None else []
        if self._loras:
            self.run(Workload(len(paths), len(paths), prompt_tokens=4, output_tokens=1))

    def run(self, workload: Workload) -> Measured:
        """Add all requests at once and step until the last has ended."""
        params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
        start = time.perf_counter()
        for index, prompt in enumerate(workload.prompts()):
            lora = self._loras[index % workload.num_adapters] if workload.num_adapters else None
            self._engine.add_request(str(index), prompt, params, lora=lora)
        first: dict[str, float] = {}
        decode_steps = []
        while self._engine.has_work:
            before = time.perf_counter()
            outputs = self._engine.step()
            now = time.perf_counter()
            fresh = [output for output in outputs if output.request_id not in first]
            first |= {output.request_id: now - start for output in fresh}
            if len(outputs) == workload.batch and not fresh:
                decode_steps.append(now - before)
        elapsed = time.perf_counter() - start
        return Measured(
            tokens_per_s=workload.batch * workload.output_tokens / elapsed,
            ttft_p50_s=statistics.median(first.values()),
            ttft_max_s=max(first.values()),
            decode_step_s=statistics.median(decode_steps) if decode_steps else float("nan"),
        )

    def _load(self, path: Path) -> LoRARequest:
        assert self._engine.adapters is not None
        lora = LoRARequest(lora_name=path.name, lora_path=str(path))
        return replace(lora, digest=self._engine.adapters.load(lora).digest)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Clients that each send the next request when the last has ended.

    ``loras`` are chosen by Zipf's law, the first most often; without any, all want the base model.
    """

    loras: Sequence[LoRARequest]
    clients: int = 32
    num_requests: int = 96
    prompt_tokens: int = 75
    output_tokens: int = 64

    def requests(self, rng: random.Random) -> Iterator[tuple[list[int], LoRARequest | None]]:
        """Prompts with their adapters, without end."""
        weights = [1 / rank for rank in range(1, len(self.loras) + 1)]
        while True:
            prompt = rng.choices(range(1000, 20000), k=self.prompt_tokens)
            yield prompt, rng.choices(self.loras, weights)[0] if self.loras else None


class EngineUnderTraffic:
    """One engine with fewer slots and less host memory than there are adapters."""

    def __init__(self, model: Path, lora: LoRAConfig, clients: int, threads: int) -> None:
        config = EngineConfig(
            model=model,
            num_threads=threads,
            max_model_len=2048,
            cache=CacheConfig(memory_bytes=512 << 20, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=clients),
            lora=lora,
        )
        self._engine = Engine(config, ThreadPoolExecutor(2))
        self._rng = random.Random(0)

    def run(self, traffic: Traffic) -> Measured:
        """Serve the traffic. Two runs differ in their requests, as traffic does."""
        params = SamplingParams(temperature=0, max_tokens=traffic.output_tokens, ignore_eos=True)
        requests = islice(traffic.requests(self._rng), traffic.num_requests)
        sent: dict[str, float] = {}
        first: dict[str, float] = {}

        def send(number: int) -> None:
            for prompt, lora in islice(requests, number):
                request_id = str(len(sent))
                sent[request_id] = time.perf_counter()
                self._engine.add_request(request_id, prompt, params, lora=lora)

        start = time.perf_counter()
        send(traffic.clients)
        while self._engine.has_work:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                first.setdefault(output.request_id, now - sent[output.request_id])
            send(sum(output.finish_reason is not None for output in outputs))
        return Measured(
            tokens_per_s=len(sent) * traffic.output_tokens / (time.perf_counter() - start),
            ttft_p50_s=statistics.median(first.values()),
            ttft_max_s=max(first.values()),
            decode_step_s=float("nan"),
        )


def on_disk(path: Path) -> LoRARequest:
    """An adapter that nobody has loaded yet."""
    digest = adapter_digest(find_adapter_files(path))
    return LoRARequest(lora_name=path.name, lora_path=str(path), digest=digest)
