"""The documentation's commands and programs, run against the demo as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.prepare_demo import MODEL_NAME, models_directory
from tests.docs.code_blocks import Block, blocks_in, blocks_to_run, exchanges
from tests.serve.conftest import EXAMPLES, DemoServer
from tests.serve.demo_server import CHECKOUT

pytestmark = [pytest.mark.ray, pytest.mark.demo, pytest.mark.timeout(300)]

# What a reader of these pages has at hand.
_PRELUDE = "url, key, admin_key, step = {url!r}, 'none', 'none', 1\n"


@pytest.fixture
def folder(demo_server: DemoServer, tmp_path: Path) -> Iterator[Path]:
    """A checkout's files and a trainer's; afterwards the server is as it was before."""
    for name in ("README.md", "examples", "configs", "serve_config.yaml", "benchmarks", ".cache"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(EXAMPLES / "sql" / name, tmp_path)
    for version, source in (("sql-v7", "sql"), ("sql-v8", "haiku")):
        demo_server.copy_adapter(source, version)
    yield tmp_path
    with httpx.Client(base_url=demo_server.url, timeout=60) as http:
        for alias in http.get("/v1/adapters/aliases").json()["data"]:
            http.delete(f"/v1/adapters/aliases/{alias['alias']}")
        shipped = {path.name for path in EXAMPLES.iterdir()}
        for adapter in http.get("/v1/adapters").json()["data"]:
            if adapter["name"] not in shipped:
                http.delete(f"/v1/adapters/{adapter['name']}")


def run(server: DemoServer, folder: Path, *command: str) -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(CHECKOUT),
        "LORAFLEET_URL": server.url,
        "URL": server.url,
        "LORAFLEET_HOME": str(models_directory().parent),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def here(block: Block, server: DemoServer) -> str:
    """The block's text, with the test's addresses in place of those that it shows."""
    text = block.text.replace("http://127.0.0.1:8000", server.url)
    text = text.replace("/mnt/adapters", str(server.adapters))
    # curl reports a refusal as success unless it is told.
    return text.replace("curl ", "curl --fail-with-body --silent --show-error ")


@pytest.mark.parametrize("block", blocks_to_run("bash"), ids=str)
def test_commands_do_what_they_say(block: Block, demo_server: DemoServer, folder: Path) -> None:
    if shutil.which("curl") is None and "curl " in block.text:
        pytest.skip("no curl")
    run(demo_server, folder, "bash", "-euo", "pipefail", "-c", here(block, demo_server))


@pytest.mark.parametrize("block", blocks_to_run("python"), ids=str)
def test_programs_run(block: Block, demo_server: DemoServer, folder: Path) -> None:
    code = _PRELUDE.format(url=demo_server.url) + here(block, demo_server)
    run(demo_server, folder, sys.executable, "-c", code)


def test_the_quick_start_ends_with_a_pirate(demo_server: DemoServer, folder: Path) -> None:
    (block,) = (
        block
        for block in blocks_to_run("bash")
        if block.page == "README.md" and '"pirate"' in block.text
    )
    text = run(demo_server, folder, "bash", "-c", here(block, demo_server))
    assert "Madrid" in json.loads(text)["choices"][0]["message"]["content"]
    assert MODEL_NAME in (CHECKOUT / "README.md").read_text()


def test_transcripts_show_what_is_answered(demo_server: DemoServer, folder: Path) -> None:
    """One session, on an adapter that no other test uses; answers vary in their values."""
    load = {"name": "session", "source": "examples/adapters/sql"}
    httpx.post(f"{demo_server.url}/v1/adapters", json=load, timeout=60).raise_for_status()
    second = None
    session = [exchange for block in blocks_in("console") for exchange in exchanges(block)]
    for command, shown in session:
        if not command.startswith("curl"):
            continue
        command = re.sub(r"\bsql\b", "session", command).replace("@2", f"@{second}")
        answer = run(demo_server, folder, "bash", "-c", command)
        second = second or json.loads(answer)["generation"]
        for pattern in (r'"(\w+)":', r'"(?:object|type|kind|phase)":"([\w.]+)"'):
            missing = set(re.findall(pattern, shown)) - set(re.findall(pattern, answer))
            assert not missing, f"{command}\n{answer}"
    assert second is not None
