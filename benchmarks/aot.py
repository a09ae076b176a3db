"""Compiles every Triton kernel for GPUs that need not be present, and reports what each takes.

    python -m benchmarks.aot --json OUT

Exits with status 1 if a kernel spills registers, needs more shared memory than its target has, or
lacks the matrix instruction it is built on.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from kernels.aot import TARGETS, CompiledKernel, all_cases, compile_all


def main() -> int:
    """Print a table, write it as JSON if asked to, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--case", nargs="+", choices=all_cases(), default=[*all_cases()])
    arguments = parser.parse_args()
    cases = {name: all_cases()[name] for name in arguments.case}
    rows = []
    for target in arguments.target:
        for row in compile_all(target, cases):
            rows.append(row)
            _print_row(row)
    defects = sum(len(row.defects) for row in rows)
    print(f"{len(rows)} kernels compiled, {defects} defects")
    if arguments.json:
        report = [dataclasses.asdict(row) | {"defects": row.defects} for row in rows]
        arguments.json.write_text(json.dumps(report, indent=1))
    return 1 if defects else 0


def _print_row(row: CompiledKernel) -> None:
    unit = "matrix" if row.tensor_core else "vector"
    print(
        f"{row.target:7} {row.kernel:21} {row.dtype:8} {row.registers:4} registers "
        f"{row.spills:4} spills {row.shared_bytes:7} shared {unit}  {row.config}",
        *row.defects,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
