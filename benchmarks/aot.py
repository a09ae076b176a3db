"""Compiles every Triton kernel for GPUs that need not be present, and reports what each takes.

    python -m benchmarks.aot --json OUT

Exits with status 1 if a kernel spills registers, needs more shared memory than its target has, or
lacks the matrix instruction it is built on. The rows of all kernels are committed as
``benchmarks/results/aot.json``.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.aot import TARGETS, CompiledKernel, compile_all
from kernels.aot_cases import all_cases


def main() -> int:
    """Print a table, write the rows as JSON if asked to, and return the exit status."""
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
    report = [dataclasses.asdict(row) | {"defects": row.defects} for row in rows]
    print("\n" + summary_table(report) + "\n")
    defects = sum(len(row.defects) for row in rows)
    print(f"{len(rows)} kernels compiled, {defects} defects")
    if arguments.json:
        # A line for a row: a change of one kernel is a change of its lines.
        lines = ",\n".join(json.dumps(row) for row in report)
        arguments.json.write_text(f"[\n{lines}\n]\n")
    return 1 if defects else 0


def summary_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return each kernel's most demanding variants as a table in Markdown: a column a target."""
    targets = [target for target in TARGETS if any(row["target"] == target for row in rows)]
    lines = [
        "| kernel | variants | " + " | ".join(targets) + " |",
        "| --- | --- |" + " --- |" * len(targets),
    ]
    for kernel in sorted({row["kernel"] for row in rows}):
        own = [row for row in rows if row["kernel"] == kernel]
        cells = [_cell([row for row in own if row["target"] == target]) for target in targets]
        lines.append(f"| `{kernel}` | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    registers, spills, shared = (
        max(row[name] for row in rows) for name in ("registers", "spills", "shared_bytes")
    )
    with_matrix_units = sum(row["tensor_core"] for row in rows)
    unit = f", matrix units in {with_matrix_units} of {len(rows)}" if with_matrix_units else ""
    return f"{registers} registers, {spills} spills, {shared / 1024:.0f} KiB{unit}"


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
