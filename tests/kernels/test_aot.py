"""Kernels compile for GPUs that are not here, and fit them; and what they launch.

``benchmarks/results/aot.json`` has every kernel as compiled for every target; here it is compared
with what is launched now, and one of each kernel is compiled again, in a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aot import summary_table
from kernels import tuning, tuning_table
from kernels.aot import SHARED_LIMITS, TARGETS, CompiledKernel, Launch, launches_of
from kernels.aot_cases import all_cases, lora, sample, store
from tests.kernels.cases import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

ROOT = Path(__file__).resolve().parent.parent.parent
COMMITTED = ROOT / "benchmarks" / "results" / "aot.json"
# One of each kernel, at its largest.
CASES = [
    *("store_kv_rope_fp8", "rms_norm_16384", "silu_and_mul", "sample_tokens"),
    *("lora_rows_many", "lora_tiles_long", "lora_tiles_prompt_scaled"),
    *("decode_split", "prefill_window_128"),
]
COMPILED_TARGETS = ["sm_80", "sm_90", "gfx942"]
# Every kernel, and whether its products run on matrix units.
KERNELS = {
    "_store_kv_kernel": False,
    "_rms_norm_kernel": False,
    "_silu_and_mul_kernel": False,
    "_sample_tokens_kernel": False,
    "_shrink_rows_kernel": False,
    "_shrink_tiles_kernel": True,
    "_expand_rows_kernel": False,
    "_expand_tiles_kernel": True,
    "_decode_kernel": True,
    "_merge_kernel": False,
    "_prefill_kernel": True,
}


@pytest.fixture(scope="module")
def committed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(COMMITTED.read_text())
    return rows


@pytest.mark.timeout(900)
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    report = tmp_path / "aot.json"
    options = ["--target", *COMPILED_TARGETS, "--case", *CASES, "--json", str(report)]
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
    assert {(row["target"], row["kernel"]) for row in rows} == {*product(COMPILED_TARGETS, KERNELS)}
    assert all(row["registers"] > 0 for row in rows)
    matrix = {row["kernel"] for row in rows if row["tensor_core"]}
    assert matrix == {kernel for kernel, has_matrix_unit in KERNELS.items() if has_matrix_unit}


def test_a_kernel_that_does_not_fit_is_a_defect() -> None:
    fits = CompiledKernel("_decode_kernel", "", "bfloat16", "sm_90", 64, 0, 1024, True)
    assert fits.defects == []
    too_large = SHARED_LIMITS["sm_90"] + 1
    bad = CompiledKernel("_decode_kernel", "", "bfloat16", "sm_90", 255, 8, too_large, False)
    assert len(bad.defects) == 3


def test_committed_rows_are_what_is_launched_now(committed: list[dict[str, Any]]) -> None:
    """A kernel, an option or a tuned row that was changed since is compiled and committed again."""
    launched = {
        (target, launch.kernel, launch.config, launch.dtype)
        for target in TARGETS
        for case in all_cases().values()
        for launch in launches_of(target, case)
    }
    rows = {(row["target"], row["kernel"], row["config"], row["dtype"]) for row in committed}
    assert rows == launched
    assert {kernel for _, kernel, _, _ in rows} == {*KERNELS}


def test_committed_rows_have_no_defects(committed: list[dict[str, Any]]) -> None:
    for row in committed:
        facts = {name: value for name, value in row.items() if name != "defects"}
        assert CompiledKernel(**facts).defects == row["defects"] == []


def test_the_committed_table_is_in_the_docs(committed: list[dict[str, Any]]) -> None:
    assert summary_table(committed) in (ROOT / "docs" / "performance-gpu.md").read_text()


@pytest.mark.parametrize("target", TARGETS)
def test_every_row_of_a_tuning_table_is_launched(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()
    row = tuning_table.TuningTable.row

    def record(self: tuning_table.TuningTable, family: str, name: str) -> Any:
        assert self.device_class == target
        used.add((family, name))
        return row(self, family, name)

    monkeypatch.setattr(tuning_table.TuningTable, "row", record)
    for case in all_cases().values():
        launches_of(target, case)
    families = tuning_table.FAMILIES
    assert used == {(family, name) for family in families for name in families[family][1]}


def launches(case: Callable[[], object]) -> list[Launch]:
    return launches_of("sm_90", case)


@pytest.mark.parametrize("tokens", [(1, 1), (64, 1), (512, 64)], ids=str)
def test_adapters_of_three_projections_take_two_launches(tokens: tuple[int, int]) -> None:
    assert len(launches(partial(lora, *tokens))) == 2


@pytest.mark.parametrize("tokens", [(1, 1), (64, 1), (512, 64)], ids=str)
def test_work_does_not_grow_with_the_number_of_slots(tokens: tuple[int, int]) -> None:
    few, many = (
        [launch.grid for launch in launches(partial(lora, *tokens, num_slots=slots))]
        for slots in (8, 512)
    )
    assert few == many


def test_a_shrink_that_would_leave_the_device_idle_is_split() -> None:
    def programs(num_tokens: int, segment_len: int) -> tuple[int, ...]:
        return launches(partial(lora, num_tokens, segment_len, rank=16))[0].grid

    # One token, 16 rank rows, 3 projections, and 4 parts of the inputs.
    assert programs(1, 1) == (1, 16, 3 * 4)
    assert programs(64, 64)[2] == 3 * 8
    assert programs(4096, 1)[2] == 3


def test_writing_and_rotating_is_one_launch() -> None:
    assert len(launches(partial(store, 128, rope=True, fp8=True))) == 1


def test_sampling_is_one_launch() -> None:
    assert [launch.grid for launch in launches(sample)] == [(64,)]


def test_every_padded_head_size_up_to_256_has_a_row() -> None:
    sizes = {str(tuning.pad_head_size(size)) for size in range(1, 257)}
    for family in ("decode", "prefill_short", "prefill_long"):
        assert set(tuning_table.FAMILIES[family][1]) == sizes
