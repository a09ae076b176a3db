"""Guards the committed ratios: a short run of the engine benchmark that fails on a loss.

    python -m benchmarks.guard            # make bench-quick, one to two minutes

Ratios and not times, as machines differ. A ratio may be ``TOLERANCE`` worse than the committed one:
two runs on a quiet machine differ by half of that. Traffic of a thousand names is left out: it
takes longer than all of the rest.
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
# Memory that others share is at times twice as fast; a step then waits less for it, but the rest of
# the step stays, and the ratio to the floor is half as large again.
FLOOR_TOLERANCE = 0.6

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
_OVER_FLOOR = "decode_step_over_floor"
_LESS_IS_BETTER = (_OVER_FLOOR, "slots_thrash_ttft")


def losses(committed: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """By what share each measured ratio is worse than the committed one, below zero if better."""
    return {
        name: value / committed[name] - 1
        if name.startswith(_LESS_IS_BETTER)
        else committed[name] / value - 1
        for name, value in measured.items()
        if name in committed
    }


def is_lost(name: str, loss: float) -> bool:
    """Whether a ratio is worse than any quiet machine would make it."""
    return loss > (FLOOR_TOLERANCE if name.startswith(_OVER_FLOOR) else TOLERANCE)


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
        verdict = "LOST" if is_lost(name, loss) else "ok"
        print(
            f"{name:34} {committed[name]:7.3f} -> {measured[name]:7.3f}  {-loss:+7.1%}  {verdict}"
        )
    sys.exit(any(is_lost(name, loss) for name, loss in found.items()))


if __name__ == "__main__":
    main()
