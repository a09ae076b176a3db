"""Guards the committed ratios: a short run of the engine benchmark that fails on a loss.

    python -m benchmarks.guard            # make bench-quick, some two minutes

Ratios and not times, as machines differ. A ratio may be ``TOLERANCE`` worse than the committed one:
two runs on a quiet machine differ by half of that.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.engine import measure
from benchmarks.engine_under_test import DEFAULT_MODEL

COMMITTED = Path(__file__).with_name("results") / "engine.json"
TOLERANCE = 0.15

_CASES = frozenset(
    {
        "base_b1",
        "base_b8",
        "base_b8_lora_disabled",
        "mixed8_b8",
        "mixed16_b16",
        "slots8_adapters16_b16",
        "prefill512",
    }
)
# All others are throughputs over throughputs.
_LESS_IS_BETTER = ("decode_step_over_floor", "slots_thrash_ttft")


def losses(committed: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """By what share each measured ratio is worse than the committed one, below zero if better."""
    return {
        name: value / committed[name] - 1
        if name.startswith(_LESS_IS_BETTER)
        else committed[name] / value - 1
        for name, value in measured.items()
        if name in committed
    }


def main() -> None:
    """Measure, print a line for each ratio, and exit with 1 if one lost too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    committed = json.loads(COMMITTED.read_text())["ratios"]
    with tempfile.TemporaryDirectory() as root:
        measured = measure(
            args.model,
            Path(root),
            repeats=args.repeats,
            threads=args.threads,
            peft=False,
            only=_CASES,
        )["ratios"]
    found = losses(committed, measured)
    for name, loss in found.items():
        verdict = "LOST" if loss > TOLERANCE else "ok"
        print(
            f"{name:34} {committed[name]:7.3f} -> {measured[name]:7.3f}  {-loss:+7.1%}  {verdict}"
        )
    sys.exit(any(loss > TOLERANCE for loss in found.values()))


if __name__ == "__main__":
    main()
