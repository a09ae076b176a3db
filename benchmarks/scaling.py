"""How a decode step grows: with batch, context, resident adapters, rank and registered names.

    python -m benchmarks.scaling --threads 2 --json benchmarks/results/scaling.json

The engine alone, in this process. A point is the median of some steps; all points take turns, and
of a point's rounds the fastest counts, so that a machine whose speed changes bends no curve. Floors
are what theory gives: bytes that a step must read over the fastest read bandwidth of the same
rounds, or its products over the fastest matrix rate if that takes longer.
"""

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapters import AdapterVersion, LoRARequest
from benchmarks.adapters import write_random_adapters
from benchmarks.engine_under_test import DEFAULT_MODEL
from benchmarks.floor import Floor, Rates, measure_rates
from benchmarks.machine import measure_machine
from deployments.adapter_table import AdapterTable
from deployments.cluster_protocol import TableChange, TableUpdate
from engine import CacheConfig, Engine, EngineConfig, LoRAConfig, SamplingParams, SchedulerConfig

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)
CONTEXTS = (64, 256, 512, 1024, 2048, 4096)
RESIDENTS = (1, 2, 4, 8, 16, 32, 64)
RANKS = (1, 2, 4, 8, 16, 32, 64)
NAMES = (10, 100, 1000, 10_000)
CONTEXT = 64
_STEPS = 12
_ROUNDS = 10

Adapters = Sequence[LoRARequest | None]


@dataclass(frozen=True, slots=True)
class Point:
    """One point: ``run`` measures it once, in seconds."""

    curve: str
    x: int
    floor: Floor
    run: Callable[[], float]


class Rig:
    """An engine whose decode steps are timed. All adapters are in slots from the start."""

    def __init__(
        self, model: Path, paths: Sequence[Path], *, threads: int, rank: int, max_context: int
    ) -> None:
        config = EngineConfig(
            model=model,
            num_threads=threads,
            max_model_len=max_context + 64,
            # Prompts are computed in the first round only.
            cache=CacheConfig(memory_bytes=max(256, max_context * 10 // 32) << 20),
            scheduler=SchedulerConfig(max_num_seqs=64),
            lora=LoRAConfig(max_loras=len(paths), max_cpu_loras=len(paths), max_lora_rank=rank),
        )
        self._engine = Engine(config, ThreadPoolExecutor(1))
        self._prompts: dict[int, list[int]] = {}
        self._max_context = max_context
        self.loras = [self._load(path) for path in paths]
        self.decode_step_s(self.loras, context=4, steps=1)

    def decode_step_s(self, adapters: Adapters, *, context: int, steps: int = _STEPS) -> float:
        """The median step in which one request for each adapter decodes."""
        params = SamplingParams(temperature=0, max_tokens=steps + 4, ignore_eos=True)
        for index, lora in enumerate(adapters):
            prompt = self._prompt(index)[:context]
            self._engine.add_request(str(index), prompt, params, lora=lora)
        waiting = {str(index) for index in range(len(adapters))}
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self._engine.step()
            times.append(time.perf_counter() - start)
        for index in range(len(adapters)):
            self._engine.abort_request(str(index))
        return statistics.median(times)

    def _prompt(self, index: int) -> list[int]:
        if index not in self._prompts:
            ids = random.Random(index).choices(range(1000, 20000), k=self._max_context)
            self._prompts[index] = ids
        return self._prompts[index]

    def _load(self, path: Path) -> LoRARequest:
        assert self._engine.adapters is not None
        lora = LoRARequest(lora_name=path.name, lora_path=str(path))
        return replace(lora, digest=self._engine.adapters.load(lora).digest)


class Names:
    """A replica's table with many names, of which the last ones mean adapters of a rig."""

    def __init__(self, rig: Rig, num_names: int, num_used: int) -> None:
        self._rig = rig
        self._loras = {lora.digest: lora for lora in rig.loras[:num_used]}
        made_up = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(num_names - num_used)]
        digests = [*made_up, *(digest for digest in self._loras if digest is not None)]
        versions = [
            AdapterVersion(
                name=f"team-{index % 40}/adapter-{index}",
                generation=index + 1,
                digest=digest,
                source_uri=f"s3://models/adapter-{index}",
                base_model="base",
                rank=8,
                size_bytes=1 << 20,
            )
            for index, digest in enumerate(digests)
        ]
        self._used = [version.name for version in versions[-num_used:]]
        self._table = AdapterTable(lambda digest: None)
        self._table.apply(
            TableUpdate(
                journal_id="benchmark",
                table_version=num_names,
                changes=tuple(TableChange(name=v.name, version=v) for v in versions),
                snapshot=True,
            )
        )

    def step_s(self) -> float:
        """A decode step whose requests came by name, with the finding of the names added."""
        start = time.perf_counter()
        with ExitStack() as holds:
            adapters = []
            for name in self._used:
                version = self._table.find(name)
                assert version is not None
                holds.enter_context(self._table.hold(version.digest))
                adapters.append(self._loras[version.digest])
            found_s = time.perf_counter() - start
            return found_s + self._rig.decode_step_s(adapters, context=CONTEXT)

    def report_s(self) -> float:
        """What a replica does about names once a second, besides requests: it reports its own."""
        start = time.perf_counter()
        self._table.names_of(digest for digest in self._loras if digest is not None)
        return time.perf_counter() - start


def make_points(model: Path, root: Path, threads: int) -> list[Point]:
    """Every point of every curve, with the engines that they need."""
    paths = write_random_adapters(model, root / "rank-8", num_adapters=64)
    main = Rig(model, paths, threads=threads, rank=8, max_context=max(CONTEXTS))
    floor = partial(Floor.of_step, model)
    points = []
    for batch in BATCHES:
        for curve, adapters in (("base", [None] * batch), ("mixed", main.loras[:batch])):
            run = partial(main.decode_step_s, adapters, context=CONTEXT)
            need = floor(batch, CONTEXT, batch if curve == "mixed" else 0, 8)
            points.append(Point(f"batch_{curve}", batch, need, run))
    for context in CONTEXTS:
        run = partial(main.decode_step_s, [None] * 4, context=context)
        points.append(Point("context", context, floor(4, context, 0, 0), run))
    for resident in RESIDENTS:
        rig = Rig(model, paths[:resident], threads=threads, rank=8, max_context=CONTEXT)
        # Sixteen requests, as many different adapters as there are; of many, spread over all slots.
        adapters = [rig.loras[index * max(resident, 16) // 16 % resident] for index in range(16)]
        run = partial(rig.decode_step_s, adapters, context=CONTEXT)
        points.append(Point("resident", resident, floor(16, CONTEXT, min(resident, 16), 8), run))
    by_rank = [
        path
        for rank in RANKS
        for path in write_random_adapters(model, root / f"{rank}", num_adapters=8, rank=rank)
    ]
    ranked = Rig(model, by_rank, threads=threads, rank=max(RANKS), max_context=CONTEXT)
    for index, rank in enumerate(RANKS):
        adapters = ranked.loras[8 * index : 8 * (index + 1)]
        run = partial(ranked.decode_step_s, adapters, context=CONTEXT)
        points.append(Point("rank", rank, floor(8, CONTEXT, 8, rank), run))
    for num_names in NAMES:
        names = Names(main, num_names, num_used=8)
        points.append(Point("names", num_names, floor(8, CONTEXT, 8, 8), names.step_s))
        points.append(Point("names_report", num_names, Floor(0, 0), names.report_s))
    return points


def measure(model: Path, root: Path, *, threads: int, rounds: int) -> dict[str, Any]:
    """Measure all points in turns, after one that is not counted."""
    torch.set_num_threads(threads)
    machine = measure_machine(torch.device("cpu"), torch.bfloat16)
    points = make_points(model, root, threads)
    samples: list[list[float]] = [[] for _ in points]
    rates = []
    for turn in range(rounds + 1):
        start = time.perf_counter()
        found = [point.run() for point in points]
        rates.append(measure_rates(threads))
        if turn:
            for sample, value in zip(samples, found, strict=True):
                sample.append(value)
        print(f"round {turn}/{rounds}: {time.perf_counter() - start:.1f} s", flush=True)
    best = Rates.fastest(rates)
    curves: dict[str, dict[str, list[float]]] = {}
    for point, sample in zip(points, samples, strict=True):
        curve = curves.setdefault(point.curve, {"x": [], "seconds": [], "floor_s": []})
        curve["x"].append(point.x)
        curve["seconds"].append(min(sample))
        curve["floor_s"].append(point.floor.seconds(best))
    return {
        "machine": asdict(machine),
        "model": model.name,
        "rounds": rounds,
        "rates": asdict(best),
        "curves": curves,
    }


def main() -> None:
    """Print the curves, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        report = measure(args.model, Path(root), threads=args.threads, rounds=args.rounds)
    for name, curve in report["curves"].items():
        for x, seconds, floor_s in zip(*curve.values(), strict=True):
            print(f"{name:14} {x:6} {seconds * 1e3:9.3f} ms, floor {floor_s * 1e3:7.3f} ms")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
