"""Weights come from the checkpoint, all of them, and stay where they are mapped."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import DType
from engine.errors import UnsupportedModelError
from engine.models.loader import load_model
from engine.models.registry import model_class, read_config
from tests.tiny_models import MakeModel

CPU = torch.device("cpu")


def load(path: Path, dtype: DType = "auto") -> torch.nn.Module:
    config = read_config(path)
    return load_model(model_class(config), config, path, dtype=dtype, device=CPU, attention="eager")


@pytest.fixture
def copied_llama(make_model: MakeModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_model("llama"), tmp_path / "model"))


def mapped_ranges(path: Path) -> list[range]:
    """Where this process has files of `path` mapped."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(str(path)):
            start, end = (int(bound, 16) for bound in fields[0].split("-"))
            found.append(range(start, end))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stay_in_the_mapped_checkpoint(make_model: MakeModel, dtype: torch.dtype) -> None:
    path = make_model("llama", dtype=dtype, tie_word_embeddings=True)
    model = load(path)
    mapped = mapped_ranges(path)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == dtype
        assert any(parameter.data_ptr() in addresses for addresses in mapped), name


def test_tied_head_shares_the_embedding(make_model: MakeModel) -> None:
    model = load(make_model("llama", tie_word_embeddings=True))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_float32_on_request(make_model: MakeModel) -> None:
    model = load(make_model("llama", dtype=torch.bfloat16), "float32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_sharded_checkpoint_loads_like_a_whole_one(make_model: MakeModel, tmp_path: Path) -> None:
    whole = load(make_model("llama"))
    AutoModelForCausalLM.from_pretrained(make_model("llama")).save_pretrained(
        tmp_path, max_shard_size="40KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sharded = load(tmp_path)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, sharded.get_parameter(name)), name


def test_buffers_that_no_checkpoint_holds_are_computed(make_model: MakeModel) -> None:
    model = load(make_model("llama", rope_theta=500.0))
    frequencies = 1.0 / 500.0 ** (torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_checkpoint_that_does_not_fit_the_config_is_refused(
    copied_llama: Path, change: str
) -> None:
    file = copied_llama / "model.safetensors"
    tensors = load_file(file)
    key = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[key]
    elif change == "unexpected":
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(88)
    else:
        tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"mlp\.up_proj"):
        load(copied_llama)


def test_pickled_weights_are_never_read(copied_llama: Path) -> None:
    tensors = load_file(copied_llama / "model.safetensors")
    (copied_llama / "model.safetensors").unlink()
    torch.save(tensors, copied_llama / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load(copied_llama)


def test_damaged_weights_are_refused(copied_llama: Path) -> None:
    file = copied_llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load(copied_llama)


def test_adapter_beside_the_base_model_is_refused(copied_llama: Path) -> None:
    (copied_llama / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UnsupportedModelError, match="adapter next to"):
        load(copied_llama)
