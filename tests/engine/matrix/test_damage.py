"""Whatever happened to an adapter's files: it is refused, or served as PEFT serves these files.

LORAFLEET_DAMAGES sets how many damages there are of each base model's adapters.
"""

import copy
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from adapters import LoRARequest
from engine.errors import AdapterError
from tests.engine.matrix.damage import Damage
from tests.engine.matrix.laboratory import PROMPT, Laboratory, load, quiet, run_mixed

NUM_DAMAGES = int(os.environ.get("LORAFLEET_DAMAGES", "400"))
FEATURES = ("plain", "rank_pattern, alpha_pattern", "layers_pattern", "exclude_modules", "bias all")
FEATURES += ("regular expression", "lora_bias", "DoRA, rsLoRA, patterns, bias", "embedding")
FEATURES += ("modules_to_save embedding and lm_head", "modules_to_save a linear", "bfloat16")
# Damaged weights may be large, and what is computed with them less exact.
RELATIVE = 1e-3


@pytest.mark.parametrize("architecture", ["llama, tied", "qwen2", "gpt2"])
def test_damaged_files_are_refused_or_served_as_peft_does(
    architecture: str, tmp_path: Path
) -> None:
    lab = Laboratory(architecture, tmp_path, FEATURES)
    chance = random.Random(0)
    damage = Damage(list(lab.model.targets), chance)
    path, served = tmp_path / "damaged", 0
    for _ in range(NUM_DAMAGES):
        feature = chance.choice(lab.served)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(lab.saved(feature), path)
        try:
            done = damage.do(path)
        except ValueError:
            continue  # Nothing is left to be damaged further.
        try:
            adapter = load(lab.model, LoRARequest(lora_name="damaged", lora_path=str(path)))
        except AdapterError:
            continue
        truth = peft_logits(lab, path)
        if truth is None or adapter.invocation:
            continue
        lab.model.write_slot(0, adapter)
        logits = run_mixed(lab.model, PROMPT, {1: 0})[1]
        error = float((logits - truth).abs().max() / truth.abs().max())
        assert error <= RELATIVE, f"{feature}, {done}: relative error {error:.1e}"
        served += 1
    assert served > NUM_DAMAGES // 20


@torch.inference_mode()
def peft_logits(lab: Laboratory, path: Path) -> torch.Tensor | None:
    """What PEFT makes of the files; None if it cannot read them."""
    with quiet():
        try:
            model = PeftModel.from_pretrained(copy.deepcopy(lab.base), str(path))
        except Exception:  # noqa: BLE001 -- it does not check, so it fails in any way
            return None
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits
