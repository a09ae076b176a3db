"""The way of somebody new: from an empty folder to an adapter of their own, in minutes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.prepare_demo import MODEL_NAME, models_directory
from tests.serve.conftest import DemoServer
from tests.serve.demo_server import CHECKOUT

pytestmark = [pytest.mark.ray, pytest.mark.demo, pytest.mark.timeout(400)]

# Of a second run, when everything is installed: the start of the server included.
_LIMIT_S = 120


def test_own_adapter_is_served_replaced_and_rolled_back(
    demo_server: DemoServer, tmp_path: Path
) -> None:
    script = [sys.executable, str(CHECKOUT / "examples/own_adapter.py")]
    model = models_directory() / MODEL_NAME
    done = subprocess.run(
        [*script, "--url", demo_server.url, "--directory", "mine", "--model", str(model)],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"generation (\d+) says: (.*)", done.stdout)
    generations = [int(generation) for generation, _ in said]
    assert generations == sorted(set(generations)) and len(generations) == 3
    first, second, third = (answer for _, answer in said)
    assert first == third == "Please ask at desk one."
    assert second == "Please call us tomorrow."
    (seconds,) = re.findall(r"^(\d+) seconds", done.stdout, re.MULTILINE)
    assert demo_server.seconds_to_start + int(seconds) < _LIMIT_S
