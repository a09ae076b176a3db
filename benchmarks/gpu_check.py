"""Checks the kernels and the engine on this machine's GPU: right numbers, then how fast.

    python -m benchmarks.gpu_check --json OUT --markdown OUT
    python -m benchmarks.gpu_check --device cpu --tiny      # the script itself, where no GPU is

Needs no Ray and no downloads, and ends within its budget: what there is no time for is skipped and
said so. Exits with status 2 on a machine without a GPU, and with status 1 if a section fails. Speed
never fails a section; the targets that it missed are listed.
"""

import argparse
import dataclasses
import faulthandler
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_engine, gpu_kernels
from benchmarks.gpu_engine import Plan
from benchmarks.gpu_report import as_markdown, missed_targets, upload_line
from benchmarks.machine import Machine, measure_machine
from benchmarks.random_model import TINY, RandomModel, make_random_model
from benchmarks.roofline import LLAMA_8B

Findings = dict[str, Any]
# Past the budget by so much, something hangs: the process ends itself and says where it was.
_GRACE_S = 25.0


@dataclass(frozen=True, slots=True)
class Run:
    """What every section is given."""

    model: RandomModel
    machine: Machine
    plan: Plan
    root: Path
    is_tiny: bool
    ends_at: float

    @property
    def device(self) -> torch.device:
        return self.model.device

    def left(self) -> float:
        """Return the seconds until the script has to end."""
        return self.ends_at - time.monotonic()

    def left_before(self, reserve_s: float) -> Callable[[], float]:
        """Return a clock that keeps so many seconds for the sections to come."""
        return lambda: self.left() - reserve_s


def _numerics(run: Run) -> Findings:
    workers = 8 if run.device.type == "cuda" else 1
    return gpu_kernels.check_numerics(run.device, tiny=run.is_tiny, workers=workers)


def _bandwidth(run: Run) -> Findings:
    return gpu_kernels.check_bandwidth(
        run.device, run.machine, run.left_before(_RESERVE_S["bandwidth"]), tiny=run.is_tiny
    )


def _engine(run: Run) -> Findings:
    left = run.left_before(_RESERVE_S["engine"])
    rows, skipped = gpu_engine.measure_engine(run.model, run.plan, run.root, left)
    return {"passed": bool(rows), "rows": rows, "skipped": skipped}


def _uploads(run: Run) -> Findings:
    found = gpu_engine.measure_uploads(run.model, run.plan, run.root)
    print(f"  {upload_line(found)}")
    return {"passed": True, **found}


def _peft(run: Run) -> Findings:
    found = gpu_engine.measure_peft(run.model, run.plan)
    print(f"  PEFT: batch {found['batch']}: {found['tokens_per_s']:.1f} tok/s")
    return {"passed": True, **found}


# In order; with what a section needs at least, or it is skipped.
SECTIONS: dict[str, tuple[Callable[[Run], Findings], float]] = {
    "numerics": (_numerics, 60.0),
    "bandwidth": (_bandwidth, 30.0),
    "engine": (_engine, 60.0),
    "uploads": (_uploads, 25.0),
    "peft": (_peft, 35.0),
}
# Kept for the sections after one that can stop early.
_RESERVE_S = {"bandwidth": 190.0, "engine": 65.0}


def main() -> int:
    """Run the sections and return the exit status."""
    arguments = _parse()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no GPU that torch can use on this machine; nothing was checked")
        return 2
    faulthandler.dump_traceback_later(arguments.budget + _GRACE_S, exit=True)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ends_at = time.monotonic() + arguments.budget
    machine = measure_machine(device, dtype)
    print(
        f"{machine.device_name}: copy {machine.copy_bytes_per_s / 1e9:.0f} GB/s, "
        f"matmul {machine.matmul_flops_per_s / 1e12:.1f} TFLOP/s"
    )
    with tempfile.TemporaryDirectory() as root:
        shape = TINY if arguments.tiny else LLAMA_8B
        model = make_random_model(Path(root, "model"), shape, dtype, device)
        plan = gpu_engine.SMALL if arguments.tiny else gpu_engine.FULL
        run = Run(model, machine, plan, Path(root), arguments.tiny, ends_at)
        for report in run_sections(run):
            # After each section, since a later one may end this process.
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
            if arguments.markdown:
                arguments.markdown.write_text(as_markdown(report))
    faulthandler.cancel_dump_traceback_later()
    for missed in report["missed_targets"]:
        print(f"target missed: {missed}")
    return 0 if all(found["passed"] for found in report["sections"].values()) else 1


def run_sections(run: Run) -> Iterator[Findings]:
    """Run every section that there is time for; yield the report after each."""
    sections: dict[str, Findings] = {}
    for name, (section, needed_s) in SECTIONS.items():
        print(f"{name}:", flush=True)
        start = time.monotonic()
        if run.left() < (0 if run.is_tiny else needed_s):
            note = f"skipped: {run.left():.0f} s left of the budget, it needs {needed_s:.0f} s"
            print(f"  {note}")
            sections[name] = {"passed": True, "skipped": [note]}
        else:
            sections[name] = _run_section(section, run) | {"duration_s": time.monotonic() - start}
        report: Findings = {
            "setup": dataclasses.asdict(run.machine),
            "model": dataclasses.asdict(run.model.shape),
            "plan": gpu_engine.describe(run.plan),
            "sections": sections,
        }
        yield {**report, "missed_targets": missed_targets(report)}


def _run_section(section: Callable[[Run], Findings], run: Run) -> Findings:
    """Run one section. What it raises is its finding: the others are still worth running."""
    try:
        found = section(run)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is in the report
        traceback.print_exc()
        found = {"passed": False, "error": f"{type(error).__name__}: {error}"}
    for skipped in found.get("skipped", ()):
        print(f"  skipped for lack of time: {skipped}")
    print(f"  {'passed' if found['passed'] else 'FAILED'}", flush=True)
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few cases")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--markdown", type=Path, help="file for the tables")
    return parser.parse_args()


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
