"""What the operator's settings and the engine's time allow an adapter to be."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from adapters import LoRARequest
from engine.config import LoRAConfig
from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter import load_adapter
from tests.engine.lora.peft_adapters import PeftAdapter, make_adapter
from tests.engine.lora.test_malformed_adapters import Q0, config, load, set_value


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    return make_adapter(tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good: PeftAdapter, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good.path, tmp_path / "adapter"))


def test_the_operator_may_insist_on_the_base_models_name(good: PeftAdapter, path: Path) -> None:
    config(base_model_name_or_path="org/tiny")(path)
    load(path, good.targets, base_model_names=("tiny", "org/tiny"))
    with pytest.raises(UnsupportedAdapterError, match="is 'org/tiny'; accepted are 'tiny'"):
        load(path, good.targets, base_model_names=("tiny",))
    config(base_model_name_or_path=None)(path)
    load(path, good.targets)
    with pytest.raises(UnsupportedAdapterError, match="base_model_name_or_path is None; accepted"):
        load(path, good.targets, base_model_names=("tiny",))


def test_a_flood_of_patterns_is_stopped(
    good: PeftAdapter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lora.module_plan._REGEX_TIMEOUT_S", 0.1)
    config(rank_pattern={f"layer{number}": 4 for number in range(20_000)})(path)
    with pytest.raises(InvalidAdapterError, match=r"rank_pattern .* takes longer than 0\.1 s"):
        load(path, good.targets)


def test_a_hostile_regex_is_stopped(
    good: PeftAdapter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.lora.module_plan._REGEX_TIMEOUT_S", 0.3)
    config(rank_pattern={"([a-z0-9_.]+)+!": 4})(path)
    with pytest.raises(InvalidAdapterError, match=re.escape("takes longer than 0.3 s")):
        load(path, good.targets)


def test_values_beyond_float16_are_refused_in_every_dtype(good: PeftAdapter, path: Path) -> None:
    set_value(f"{Q0}.lora_B.weight", 2.6e4)(path)
    load(path, good.targets)
    set_value(f"{Q0}.lora_B.weight", 1e6)(path)
    with pytest.raises(InvalidAdapterError, match=re.escape("values up to 2.5e+06, more than")):
        load(path, good.targets)
    request = LoRARequest(lora_name="bad", lora_path=str(path))
    with pytest.raises(InvalidAdapterError, match=re.escape("not finite in torch.float16")):
        load_adapter(request, good.targets, LoRAConfig(), torch.float16)
