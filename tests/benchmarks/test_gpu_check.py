"""The GPU check runs from end to end without a GPU, keeps its budget, and says what it missed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_report import as_markdown, missed_targets, over_peft

ROOT = Path(__file__).resolve().parent.parent.parent


def run_check(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--tiny", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one run with a tiny model on the CPU."""
    path = tmp_path_factory.mktemp("gpu_check")
    run = run_check("--json", str(path / "out.json"), "--markdown", str(path / "out.md"))
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, Any] = json.loads((path / "out.json").read_text())
    assert (path / "out.md").read_text() == as_markdown(found)
    return found


def test_every_section_measures_something(report: dict[str, Any]) -> None:
    sections = report["sections"]
    assert [*sections] == ["numerics", "bandwidth", "engine", "uploads", "peft"]
    assert all(found["passed"] and not found.get("skipped") for found in sections.values())
    assert {"sample_tokens", "rope_and_store_kv", "paged_decode", "lora_apply"} <= {
        *sections["numerics"]["error_to_tolerance"]
    }
    sizes = {
        (row["batch"], row["num_adapters"], row["targets"]) for row in sections["engine"]["rows"]
    }
    assert sizes == {
        (batch, adapters, targets)
        for targets in ("q and v", "all linears")
        for batch, adapters in ((1, 0), (1, 1), (4, 0), (4, 1), (4, 4))
    }
    assert len(sections["uploads"]["rows"]) == 2
    assert sections["uploads"]["usual_step_s"] > 0
    assert sections["peft"]["step_s"] > 0


def test_what_there_is_no_time_for_is_said() -> None:
    run = run_check("--budget", "0")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("skipped: ") == 5


def made_up(**ratios: float) -> dict[str, Any]:
    engine = [
        {
            "batch": 32,
            "num_adapters": 32,
            "targets": "q and v",
            "tokens_per_s": 3000.0,
            "ratio_to_base": ratios.get("base", 0.95),
        }
    ]
    bandwidth = [
        {
            "op": "paged_decode",
            "shape": "s",
            "bytes": 1 << 30,
            "is_memory_bound": True,
            "copy_share": ratios.get("copy", 0.9),
        }
    ]
    peft = {
        "batch": 32,
        "num_adapters": 32,
        "targets": "q and v",
        "tokens_per_s": 3000.0 / ratios.get("peft", 40.0),
    }
    sections = {"engine": {"rows": engine}, "bandwidth": {"rows": bandwidth}, "peft": peft}
    return {"sections": sections}


def test_targets_are_met_or_named() -> None:
    assert missed_targets(made_up()) == []
    assert over_peft(made_up()) == pytest.approx(40)
    assert missed_targets(made_up(base=0.8, peft=10.0, copy=0.5)) == [
        "decode of 32 with 32 adapters on q and v is 0.800 of base, not 0.9",
        "10.0 times PEFT's mixed batch, not 30",
        "paged_decode s moves 0.50 of copy bandwidth, not 0.8",
    ]


def test_what_was_not_measured_is_not_claimed() -> None:
    assert missed_targets({"sections": {}}) == []
    assert over_peft({"sections": {}}) is None
