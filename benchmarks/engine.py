"""The engine in this process: base against many adapters, PEFT's mixed batch, and the floor.

    python -m benchmarks.engine --model .cache/models/smollm2-135m-instruct --json OUT

Every figure of one run comes from the same machine, model and prompts; cases take turns over the
repeats and medians are reported. The floor of a decode step is the time to read the base weights
and the KV cache once, at the read bandwidth measured in the same run.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from adapters import LoRARequest
from benchmarks.adapters import write_random_adapters
from benchmarks.floor import kv_bytes, read_bandwidth, weight_bytes
from benchmarks.machine import measure_machine
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
    """One engine with adapters loaded into host memory."""

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


class PeftUnderTest:
    """PEFT's own mixed batch: generate with adapter_names."""

    def __init__(
        self, model: Path, paths: Sequence[Path], threads: int, dtype: torch.dtype
    ) -> None:
        from peft import PeftModel

        self._threads = threads

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
            self._model = PeftModel.from_pretrained(base, str(paths[0]), adapter_name="0")
            for index, path in enumerate(paths[1:], 1):
                self._model.load_adapter(str(path), adapter_name=str(index))
        self._model.to(dtype)
        self._model.eval()

    def run(self, workload: Workload) -> Measured:
        # The engine leaves torch one thread, PEFT has all.
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return self._run(workload)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _run(self, workload: Workload) -> Measured:
        input_ids = torch.tensor(workload.prompts())
        names = [str(index % workload.num_adapters) for index in range(workload.batch)]
        start = time.perf_counter()
        output = self._model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            adapter_names=names,
            max_new_tokens=workload.output_tokens,
            min_new_tokens=workload.output_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        elapsed = time.perf_counter() - start
        assert output.shape[1] == workload.prompt_tokens + workload.output_tokens
        rate = workload.batch * workload.output_tokens / elapsed
        return Measured(rate, float("nan"), float("nan"), float("nan"))


def fastest_peft(model: Path, paths: Sequence[Path], threads: int) -> PeftUnderTest:
    """PEFT in the dtype that is faster on this machine, by a short probe."""
    probe = Workload(batch=8, num_adapters=8, output_tokens=8)
    candidates = [
        PeftUnderTest(model, paths, threads, dtype) for dtype in (torch.bfloat16, torch.float32)
    ]
    rates = [candidate.run(probe).tokens_per_s for candidate in candidates]
    print(f"PEFT probe: bfloat16 {rates[0]:.1f}, float32 {rates[1]:.1f} tok/s")
    return candidates[rates.index(max(rates))]


def run_cases(
    cases: dict[str, Callable[[], Measured]], repeats: int
) -> dict[str, dict[str, float]]:
    """Run all cases in turn, ``repeats`` times after a warm-up each, and take medians."""
    runs: dict[str, list[Measured]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            result = case()
            if turn:
                runs[name].append(result)
            print(f"{turn}/{repeats} {name:28} {result.tokens_per_s:8.1f} tok/s", flush=True)
    return {
        name: {
            field: statistics.median(getattr(run, field) for run in results)
            for field in Measured.__slots__
        }
        for name, results in runs.items()
    }


def measure(
    model: Path,
    root: Path,
    *,
    repeats: int,
    threads: int,
    peft: bool,
    only: Container[str] | None = None,
) -> dict[str, Any]:
    """Run everything, or the cases named in `only`, and return figures and ratios."""
    torch.set_num_threads(threads)
    machine = measure_machine(torch.device("cpu"), torch.bfloat16)
    bandwidth = read_bandwidth()
    paths = write_random_adapters(model, root, num_adapters=64)
    plain = EngineUnderTest(model, None, [], threads, "auto")
    many = LoRAConfig(max_loras=64, max_cpu_loras=64, max_lora_rank=16)
    mixed = EngineUnderTest(model, many, paths, threads, "auto")
    few = EngineUnderTest(
        model, LoRAConfig(max_loras=8, max_cpu_loras=64), paths[:16], threads, "auto"
    )
    cases: dict[str, Callable[[], Measured]] = {}

    def add(name: str, engine: "EngineUnderTest | PeftUnderTest", *shape: int) -> None:
        workload = Workload(*shape)
        if only is None or name in only:
            cases[name] = lambda: engine.run(workload)

    for batch in (1, 8, 16):
        add(f"base_b{batch}_lora_disabled", plain, batch, 0)
        add(f"base_b{batch}", mixed, batch, 0)
    for batch, adapters in ((1, 1), (8, 1), (8, 8), (16, 8), (16, 16), (64, 64)):
        add(f"mixed{adapters}_b{batch}", mixed, batch, adapters)
    add("base_b64", mixed, 64, 0)
    add("slots8_adapters16_b16", few, 16, 16)
    if peft:
        faster = fastest_peft(model, paths[:16], threads)
        for batch in (8, 16):
            add(f"peft_mixed{batch}_b{batch}", faster, batch, batch)
    figures = run_cases(cases, repeats)
    floors = {
        f"b{batch}": (weight_bytes(model) + kv_bytes(model, batch, 75 + 32)) / bandwidth
        for batch in (1, 8)
    }
    return {
        "machine": asdict(machine),
        "model": model.name,
        "repeats": repeats,
        "read_bandwidth_bytes_per_s": bandwidth,
        "decode_step_floor_s": floors,
        "figures": figures,
        "ratios": ratios(figures, floors),
    }


def ratios(
    figures: Mapping[str, Mapping[str, float]], floors: Mapping[str, float]
) -> dict[str, float]:
    """The comparisons that matter, each within this run. PEFT runs in its faster dtype."""
    rates = [
        ("mixed1_over_base_b8", "mixed1_b8", "base_b8"),
        ("mixed8_over_base", "mixed8_b8", "base_b8"),
        ("mixed16_over_base", "mixed16_b16", "base_b16"),
        ("mixed64_over_base", "mixed64_b64", "base_b64"),
        ("slots_thrash_throughput", "slots8_adapters16_b16", "mixed16_b16"),
        ("mixed8_over_peft", "mixed8_b8", "peft_mixed8_b8"),
        ("mixed16_over_peft", "mixed16_b16", "peft_mixed16_b16"),
    ]
    found = {
        name: figures[case]["tokens_per_s"] / figures[other]["tokens_per_s"]
        for name, case, other in rates
        if case in figures and other in figures
    }
    disabled = [name for name in figures if name.endswith("_lora_disabled")]
    found["lora_enabled_base_over_disabled"] = statistics.fmean(
        figures[name.removesuffix("_lora_disabled")]["tokens_per_s"] / figures[name]["tokens_per_s"]
        for name in disabled
    )
    for batch, floor in floors.items():
        step = figures[f"base_{batch}"]["decode_step_s"]
        found[f"decode_step_over_floor_{batch}"] = step / floor
    few, enough = figures["slots8_adapters16_b16"], figures["mixed16_b16"]
    found["slots_thrash_ttft"] = few["ttft_p50_s"] / enough["ttft_p50_s"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peft", action="store_true", help="skip the comparison with PEFT")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        result = measure(
            args.model,
            Path(root),
            repeats=args.repeats,
            threads=args.threads,
            peft=not args.no_peft,
        )
    for name, figure in result["figures"].items():
        print(f"{name:28} {figure['tokens_per_s']:9.1f} tok/s", end="")
        print(f"  step {figure['decode_step_s'] * 1e3:7.2f} ms" if figure["decode_step_s"] else "")
    for name, value in result["ratios"].items():
        print(f"{name:34} {value:7.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
