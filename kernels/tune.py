"""Times block sizes on this machine's GPU and writes its class's table.

    python -m kernels.tune --output kernels/tuned/sm_90.json

Run by hand, ahead of serving: the table is committed, and a launch only reads it. Row by row, each
candidate of a family is launched at the shapes the row is for; it replaces the row when its results
agree with the row's and it is clearly faster. Knows candidates and timing. What is launched is in
``kernels.tune_cases``.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import triton
from triton.runtime.driver import driver

from kernels import tuning
from kernels.tuning_table import (
    AttentionConfig,
    BlockConfig,
    Config,
    LoRARowsConfig,
    LoRATilesConfig,
    TuningTable,
    parse_table,
    table_for,
    table_path,
)

_LOG = logging.getLogger(__name__)
# Gains below this are within what two runs of one kernel differ by.
_MIN_GAIN = 1.03
# Rounding in another order of summation.
_TOLERANCE = 3e-2

# Launches one row's kernel and returns its results.
Case = Callable[[], Sequence[torch.Tensor]]
# Returns the time of a call in milliseconds.
Timer = Callable[[Callable[[], object]], float]


def candidates(kind: type[Config]) -> list[Config]:
    """Return every configuration of a kind that is worth trying."""
    if kind is BlockConfig:
        return [BlockConfig(*sizes) for sizes in product((512, 1024, 2048, 4096, 8192), (4, 8, 16))]
    if kind is LoRARowsConfig:
        ranks, features = (1, 2, 4, 8, 16), (128, 256, 512, 1024, 2048)
        rows = [LoRARowsConfig(*sizes) for sizes in product(ranks, features, (4, 8))]
        return [row for row in rows if 512 <= row.block_rank * row.block_features <= 8192]
    schedule = ((4, 8), (2, 3, 4))
    if kind is LoRATilesConfig:
        blocks = ((16, 32, 64), (16, 32), (64, 128, 256))
        return [LoRATilesConfig(*sizes) for sizes in product(*blocks, *schedule)]
    attention = ((16, 32, 64, 128), (32, 64, 128))
    return [AttentionConfig(*sizes) for sizes in product(*attention, *schedule)]


def tune(table: TuningTable, cases: Mapping[tuple[str, str], Case], time: Timer) -> TuningTable:
    """Return the table with every row replaced that a candidate beats."""
    for (family, name), case in cases.items():
        table = _tune_row(table, family, name, case, time)
    return table


def _tune_row(table: TuningTable, family: str, name: str, case: Case, time: Timer) -> TuningTable:
    with tuning.use_table(table):
        expected = [result.clone() for result in case()]
        first_ms = best_ms = time(case)
    best = table
    for candidate in candidates(type(table.row(family, name))):
        changed = table.replaced(family, name, candidate)
        with tuning.use_table(changed):
            found_ms = _time_if_right(case, expected, time)
        if found_ms is not None and found_ms * _MIN_GAIN < best_ms:
            best, best_ms = changed, found_ms
    row = best.row(family, name)
    _LOG.info("%s[%s]: %.4f ms, was %.4f ms: %s", family, name, best_ms, first_ms, row)
    return best


def _time_if_right(case: Case, expected: Sequence[torch.Tensor], time: Timer) -> float | None:
    """Return the time of a candidate, None where it cannot run or computes something else."""
    try:
        results = case()
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=_TOLERANCE, atol=_TOLERANCE)
        return time(case)
    except (AssertionError, RuntimeError, ValueError, triton.OutOfResources) as error:
        _LOG.debug("refused: %s", error)
        return None
    except triton.CompilationError as error:
        _LOG.debug("does not compile: %s", error)
        return None


def _milliseconds(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median"))


def main() -> int:
    """Tune this machine's GPU and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="default: the class's table in this checkout")
    parser.add_argument("--family", nargs="+", help="only these families of kernels")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if not torch.cuda.is_available():
        _LOG.error("tune: no GPU that torch can use on this machine; no table was written")
        return 2
    from kernels.tune_cases import all_cases

    target = driver.active.get_current_target()
    found = table_for(target.backend, target.arch)
    cases = {
        row: case
        for row, case in all_cases(torch.device("cuda")).items()
        if arguments.family is None or row[0] in arguments.family
    }
    tuned = tune(found, cases, _milliseconds)
    is_cuda = target.backend == "cuda"
    device_class = f"sm_{target.arch}" if is_cuda else str(target.arch).partition(":")[0]
    source = {
        "kind": "timed",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "families": sorted({family for family, _ in cases}),
    }
    text = replace(tuned, device_class=device_class, source=source).as_json()
    parse_table(text, "the new table")
    path = arguments.output or table_path(device_class)
    path.write_text(text)
    _LOG.info("wrote %s", path)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
