"""docs/malformed-adapters.md holds what the engine really says about each malformed adapter.

    LORAFLEET_WRITE_DOCS=1 python -m pytest tests/engine/lora/test_malformed_docs.py

writes the page anew.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapters import LoRARequest
from engine.config import LoRAConfig
from engine.errors import AdapterError
from engine.lora.adapter import load_adapter
from tests.engine.lora.peft_adapters import (
    PeftAdapter,
    make_adapter,
    read_config,
    write_config,
)
from tests.engine.lora.test_malformed_adapters import INVALID, UNSUPPORTED

PAGE = Path(__file__).resolve().parents[3] / "docs" / "malformed-adapters.md"

INTRODUCTION = """# Malformed adapters and what is said about them

Every adapter is checked as a whole before its name means anything: on a load, by every replica; on
a first request, by the replica that was asked. `lorafleet check` runs the same checks before
deployment. A refusal is HTTP 400 with the message below, and nothing changes anywhere.

This page is written by `tests/engine/lora/test_malformed_docs.py`, which damages an adapter for a
tiny base model in each of these ways; `adapter 'sql'` is its name.

"""

Damages = dict[str, tuple[Callable[[Path], object], str]]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    adapter = make_adapter(tmp_path_factory.mktemp("good"))
    # PEFT writes a set in any order, and its version into the file's size.
    config = read_config(adapter.path)
    write_config(adapter.path, {**config, "target_modules": sorted(config["target_modules"])})
    return adapter


def rows(good: PeftAdapter, root: Path, damages: Damages) -> list[str]:
    found = []
    for number, (what, (damage, _)) in enumerate(damages.items()):
        path = Path(shutil.copytree(good.path, root / str(number) / "sql"))
        damage(path)
        with pytest.raises(AdapterError) as caught:
            request = LoRARequest(lora_name="sql", lora_path=str(path))
            load_adapter(request, good.targets, LoRAConfig(), torch.float32)
        message = str(caught.value).replace(str(path), "/adapters/sql")
        message = re.sub(r"take \d+ bytes", "take 4294968000 bytes", message)
        message = re.sub(r"\s+", " ", message).replace("|", "\\|").replace("`", "'")
        found.append(f"| {what} | `{message}` |\n")
    return found


def test_page_holds_the_messages(good: PeftAdapter, tmp_path: Path) -> None:
    table = "| the adapter | the message |\n| --- | --- |\n"
    damaged = rows(good, tmp_path / "damaged", INVALID)
    unsupported = rows(good, tmp_path / "unsupported", UNSUPPORTED)
    assert len(damaged) + len(unsupported) >= 25
    page = (
        f"{INTRODUCTION}## Damaged, incomplete, hostile, or for another base model\n\n{table}"
        f"{''.join(damaged)}\n## Well formed, but not served exactly\n\n{table}"
        f"{''.join(unsupported)}"
    )
    if os.environ.get("LORAFLEET_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew with LORAFLEET_WRITE_DOCS=1"
