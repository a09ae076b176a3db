"""The examples without a server do what they say."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts.prepare_demo import MODEL_NAME, models_directory

ROOT = Path(__file__).resolve().parents[2]
MODEL = models_directory() / MODEL_NAME

pytestmark = [
    pytest.mark.demo,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not MODEL.is_dir(), reason="no demo model: run make setup"),
]


def run(*args: str, environment: Mapping[str, str] = os.environ) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_batch_is_answered_by_many_adapters() -> None:
    answers = dict(
        line.split(": ", 1)
        for line in run("examples/offline.py", "--model", str(MODEL)).splitlines()
    )
    assert answers.keys() == {"base model", "pirate", "sql", "sentiment"}
    assert answers["base model"] and "Arrr" not in answers["base model"]
    assert answers["pirate"].startswith("Arrr! The capital of Spain be Madrid")
    assert answers["sql"].startswith("SELECT COUNT")
    assert answers["sentiment"] == "LABEL: negative"


@pytest.mark.ray
def test_a_file_of_jobs_is_answered_with_ray_data(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Ray Data needs the extra 'batch'")
    jobs = [
        {"id": 1, "adapter": "sentiment", "prompt": "I love this bicycle!"},
        {"id": 2, "adapter": "sentiment", "prompt": "My headphones stopped working."},
        {"id": 3, "adapter": None, "prompt": "What is the capital of France?"},
        {"id": 4, "adapter": "nobody", "prompt": "Hello?"},
        {"id": 5, "adapter": "../adapters/sql", "prompt": "Hello?"},
        {"id": 6, "adapter": "sql", "prompt": "Hello? " * 1000},
    ]
    source, target = tmp_path / "jobs.jsonl", tmp_path / "answers"
    source.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    run(
        "examples/batch_jobs.py",
        *("--model", str(MODEL), "--adapters", str(ROOT / "examples/adapters")),
        *("--input", str(source), "--output", str(target), "--max-tokens", "12"),
        environment=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
    )
    lines = [
        json.loads(line) for path in target.glob("*.json") for line in path.read_text().splitlines()
    ]
    answers = {line["id"]: line for line in lines}
    assert answers.keys() == {1, 2, 3, 4, 5, 6}
    assert answers[1]["answer"] == "LABEL: positive"
    assert answers[2]["answer"] == "LABEL: negative"
    assert "Paris" in answers[3]["answer"]
    # What is wrong with a job is said of it and keeps nobody else waiting.
    assert answers[4]["answer"] is None and "nobody" in answers[4]["error"]
    assert answers[5]["answer"] is None and "../adapters/sql" in answers[5]["error"]
    assert answers[6]["answer"] is None and "too many" in answers[6]["error"]
