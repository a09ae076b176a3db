"""The engine's sections of the GPU check: decode rates of many adapters, PEFT's, and uploads.

Random weights of a real model's shape. Rates are of decode steps alone: a step's median time.
Every loop asks the budget before its next case, and says what it left out.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adapters import LoRARequest
from benchmarks.random_model import RandomModel, write_adapters
from benchmarks.roofline import DEVICES, Workload, predict
from engine import CacheConfig, Engine, EngineConfig, LoRAConfig, SamplingParams, SchedulerConfig

MODULES = {
    "q and v": ("q_proj", "v_proj"),
    "all linears": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. PEFT is measured at ``peft``: batch and adapters."""

    batches: tuple[int, ...]
    adapters: tuple[int, ...]
    rank: int
    prompt_tokens: int
    decode_steps: int
    cache_bytes: int
    max_model_len: int
    peft: tuple[int, int]
    peft_tokens: tuple[int, int]
    uploads: int


FULL = Plan((1, 32, 128), (1, 8, 32, 64), 16, 128, 32, 16 << 30, 2048, (32, 32), (2, 8), 8)
SMALL = Plan((1, 4), (1, 4), 4, 8, 4, 1 << 20, 256, (4, 4), (1, 3), 2)

# Seconds left, by the script's clock.
TimeLeft = Callable[[], float]


class DecodeBench:
    """One engine with adapters of one kind in host memory."""

    def __init__(self, model: RandomModel, plan: Plan, paths: Sequence[Path]) -> None:
        self._plan = plan
        self._vocab = model.shape.vocab
        config = EngineConfig(
            model=model.path,
            dtype=str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            device=model.device.type,  # type: ignore[arg-type]
            max_model_len=plan.max_model_len,
            cache=CacheConfig(memory_bytes=plan.cache_bytes, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=max(plan.batches), max_num_batched_tokens=8192),
            lora=LoRAConfig(
                max_loras=min(max(plan.adapters), len(paths)),
                max_cpu_loras=len(paths),
                max_lora_rank=plan.rank,
            ),
        )
        with model.replacing_checkpoints():
            self._engine = Engine(config, ThreadPoolExecutor(2))
        assert self._engine.adapters is not None
        self._loras = []
        for path in paths:
            lora = LoRARequest(lora_name=path.name, lora_path=str(path))
            info = self._engine.adapters.load(lora)
            self._loras.append(replace(lora, digest=info.digest))
        self._count = 0

    def decode_step_s(self, batch: int, num_adapters: int) -> float:
        """Return the median time of a step in which the whole batch decodes."""
        steps = self._plan.decode_steps
        # Sequences start together only if no adapter is still on its way to its slot.
        for index in range(num_adapters):
            self._add(index, 1)
        self._finish(0)
        for row in range(batch):
            self._add(row % num_adapters if num_adapters else None, steps + 2)
        times = self._finish(batch)
        return statistics.median(times[: steps + 1])

    def arrivals(self, batch: int, adapters: range) -> list[dict[str, float]]:
        """Return what a decoding batch notices of each adapter that is asked for and in no slot.

        Compared with its usual step, and with the first step of a request whose adapter is there.
        """
        running = [self._add(None, self._plan.max_model_len // 2) for _ in range(batch - 1)]
        self._arrival_s(0)
        found = []
        for index in adapters:
            usual = statistics.median(self._step_s() for _ in range(6))
            _, resident_s = self._arrival_s(0)
            while_uploading, first_s = self._arrival_s(index)
            found.append(
                {
                    "usual_step_s": usual,
                    "steps_while_uploading": len(while_uploading),
                    "stall_while_uploading_s": max((*while_uploading, usual)) - usual,
                    "slot_write_s": first_s - resident_s,
                }
            )
        for request_id in running:
            self._engine.abort_request(request_id)
        self._finish(0)
        return found

    def _arrival_s(self, adapter: int) -> tuple[list[float], float]:
        """Ask for an adapter; return the times of steps without it, and of the first with it."""
        request_id = self._add(adapter, 2)
        times = []
        while True:
            start = time.perf_counter()
            outputs = self._engine.step()
            times.append(time.perf_counter() - start)
            if any(output.request_id == request_id for output in outputs):
                return times[:-1], times[-1]

    def _step_s(self) -> float:
        start = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - start

    def _add(self, adapter: int | None, output_tokens: int) -> str:
        """Queue a request of tokens that no other request has."""
        self._count += 1
        length = self._plan.prompt_tokens if adapter is None or output_tokens > 2 else 2
        prompt = [3 + (self._count * 31 + place) % (self._vocab - 3) for place in range(length)]
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        lora = None if adapter is None else self._loras[adapter]
        self._engine.add_request(str(self._count), prompt, params, lora=lora)
        return str(self._count)

    def _finish(self, batch: int) -> list[float]:
        """Step to the end; return the times of steps that gave `batch` outputs, but the first."""
        times = []
        seen = 0
        while self._engine.has_work:
            start = time.perf_counter()
            outputs = self._engine.step()
            if len(outputs) == batch and seen >= batch:
                times.append(time.perf_counter() - start)
            seen += len(outputs)
        return times


def measure_engine(
    model: RandomModel, plan: Plan, root: Path, left: TimeLeft
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each batch, number and kind of adapters, and what there was no time for."""
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for targets, modules in MODULES.items():
        if left() <= 0:
            skipped.append(f"adapters on {targets}")
            continue
        paths = write_adapters(model, root / targets, max(plan.adapters), plan.rank, modules)
        bench = DecodeBench(model, plan, paths)
        for batch in plan.batches:
            base_s = None
            for num_adapters in (0, *(count for count in plan.adapters if count <= batch)):
                if left() <= 0:
                    skipped.append(f"batch {batch}, {num_adapters} adapters on {targets}")
                    continue
                step_s = bench.decode_step_s(batch, num_adapters)
                base_s = step_s if num_adapters == 0 else base_s
                rows.append(_row(model, plan, targets, (batch, num_adapters), step_s, base_s))
                _print_row(rows[-1])
        del bench
        _release(model.device)
    return rows, skipped


def _row(
    model: RandomModel,
    plan: Plan,
    targets: str,
    size: tuple[int, int],
    step_s: float,
    base_s: float | None,
) -> dict[str, Any]:
    batch, num_adapters = size
    context = plan.prompt_tokens + plan.decode_steps // 2
    work = Workload(batch, num_adapters, plan.rank, targets, context)
    predicted = {device.name: predict(model.shape, work, device) for device in DEVICES}
    return {
        "batch": batch,
        "num_adapters": num_adapters,
        "targets": targets,
        "rank": plan.rank,
        "step_s": step_s,
        "tokens_per_s": batch / step_s,
        "ratio_to_base": None if base_s is None else base_s / step_s,
        "predicted_ratio": {name: found.ratio_to_base for name, found in predicted.items()},
        "predicted_step_s": {name: found.step_s for name, found in predicted.items()},
    }


def _print_row(row: dict[str, Any]) -> None:
    device = DEVICES[-1].name
    ratio = "" if row["ratio_to_base"] is None else f"{row['ratio_to_base']:6.3f} of base"
    print(
        f"  batch {row['batch']:3} adapters {row['num_adapters']:2} on {row['targets']:11} "
        f"{row['tokens_per_s']:9.1f} tok/s {ratio}  (predicted for {device}: "
        f"{row['batch'] / row['predicted_step_s'][device]:.0f} tok/s, "
        f"{row['predicted_ratio'][device]:.3f})",
        flush=True,
    )


def measure_peft(model: RandomModel, plan: Plan) -> dict[str, Any]:
    """Return the decode rate of PEFT's own mixed batch over transformers' model.

    From two generations that differ in length alone, so that the prompt's time falls out.
    """
    from peft import LoraConfig, get_peft_model

    batch, num_adapters = plan.peft
    modules = list(MODULES["q and v"])

    def config(index: int) -> LoraConfig:
        return LoraConfig(r=plan.rank, lora_alpha=plan.rank + index, target_modules=modules)

    base = model.build("sdpa")
    with torch.device(model.device):
        tuned = get_peft_model(base, config(0), adapter_name="0")
        for index in range(1, num_adapters):
            tuned.add_adapter(str(index), config(index))
    tuned.to(device=model.device, dtype=model.dtype).eval()
    ids = torch.arange(batch * plan.prompt_tokens, device=model.device)
    ids = (3 + ids % (model.shape.vocab - 3)).view(batch, plan.prompt_tokens)
    names = [str(row % num_adapters) for row in range(batch)]

    def generate(num_tokens: int) -> float:
        _synchronize(model.device)
        start = time.perf_counter()
        tuned.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            adapter_names=names,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
        _synchronize(model.device)
        return time.perf_counter() - start

    short, long = plan.peft_tokens
    generate(short)
    step_s = (generate(long) - generate(short)) / (long - short)
    return {
        "batch": batch,
        "num_adapters": num_adapters,
        "targets": "q and v",
        "step_s": step_s,
        "tokens_per_s": batch / step_s,
    }


def measure_uploads(model: RandomModel, plan: Plan, root: Path) -> dict[str, Any]:
    """Return how much longer a running batch's steps get while adapters come, and when they do."""
    modules = MODULES["all linears"]
    paths = write_adapters(model, root / "uploads", plan.uploads + 1, plan.rank, modules)
    bench = DecodeBench(model, plan, paths)
    rows = bench.arrivals(plan.peft[0], range(1, plan.uploads + 1))
    del bench
    _release(model.device)

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return {
        "batch": plan.peft[0],
        "adapter_bytes": (paths[0] / "adapter_model.safetensors").stat().st_size,
        "rows": rows,
        **{name: median(name) for name in rows[0]},
        "largest_stall_s": max(
            max(row["stall_while_uploading_s"], row["slot_write_s"]) for row in rows
        ),
    }


def describe(plan: Plan) -> dict[str, Any]:
    """Return the plan for a report."""
    return dataclasses.asdict(plan)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _release(device: torch.device) -> None:
    """Give freed memory back, so that the next model finds it: engines refer to themselves."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
