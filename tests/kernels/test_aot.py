"""Kernels compile for GPUs that are not here, and fit them.

In a process of its own, without the interpreter. ``python -m benchmarks.aot`` compiles all of them;
here one of each kernel, at its largest.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from kernels import tuning
from kernels.aot import SHARED_LIMITS, CompiledKernel

ROOT = Path(__file__).resolve().parent.parent.parent
CASES = ["store_kv", "lora_rows_many", "lora_tiles_long", "decode_split", "prefill_window_128"]
TARGETS = ["sm_80", "sm_90", "gfx942"]
# Every kernel, and whether its products run on matrix units.
KERNELS = {
    "_store_kv_kernel": False,
    "_shrink_rows_kernel": False,
    "_shrink_tiles_kernel": True,
    "_expand_rows_kernel": False,
    "_expand_tiles_kernel": True,
    "_decode_kernel": True,
    "_merge_kernel": False,
    "_prefill_kernel": True,
}


@pytest.mark.timeout(900)
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    report = tmp_path / "aot.json"
    options = ["--target", *TARGETS, "--case", *CASES, "--json", str(report)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.aot", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(report.read_text())
    assert {(row["target"], row["kernel"]) for row in rows} == {*product(TARGETS, KERNELS)}
    assert all(row["registers"] > 0 for row in rows)
    matrix = {row["kernel"] for row in rows if row["tensor_core"]}
    assert matrix == {kernel for kernel, has_matrix_unit in KERNELS.items() if has_matrix_unit}


def test_a_kernel_that_does_not_fit_is_a_defect() -> None:
    fits = CompiledKernel("_decode_kernel", "", "bfloat16", "sm_90", 64, 0, 1024, True)
    assert fits.defects == []
    too_large = SHARED_LIMITS["sm_90"] + 1
    bad = CompiledKernel("_decode_kernel", "", "bfloat16", "sm_90", 255, 8, too_large, False)
    assert len(bad.defects) == 3


def test_every_padded_head_size_up_to_256_has_a_row() -> None:
    sizes = {tuning.pad_head_size(size) for size in range(1, 257)}
    for table in (tuning.DECODE, tuning.PREFILL_SHORT, tuning.PREFILL_LONG):
        assert set(table) == sizes
