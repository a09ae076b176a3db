"""The calculator's sums against what the engine allocates."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from adapters import LoRARequest, adapter_digest, find_adapter_files
from deployments.cli import app
from deployments.cli.size import parse_bytes
from deployments.sizing import Load, ModelSize, measure_model, plan
from engine.config import CacheConfig, EngineConfig, LoRAConfig
from engine.lora.adapter import load_adapter
from engine.models.paged_model import PagedModel
from tests.tiny_models import MakeModel

RANK, SLOTS = 4, 3


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, make_model: MakeModel) -> Path:
    return make_model(request.param, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def measured(model: Path) -> ModelSize:
    return measure_model(model)


@pytest.fixture(scope="module")
def paged(model: Path) -> Iterator[PagedModel]:
    cache = CacheConfig(block_size=16, memory_bytes=1 << 20)
    lora = LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK)
    yield PagedModel(EngineConfig(model=model, cache=cache, lora=lora))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_weights_are_those_of_the_checkpoint(family: str, make_model: MakeModel) -> None:
    model = make_model(family, dtype=torch.bfloat16)
    tensors = load_file(model / "model.safetensors").values()
    assert measure_model(model).weight_bytes == sum(tensor.nbytes for tensor in tensors)


def test_cache_is_what_the_engine_allocates(measured: ModelSize, paged: PagedModel) -> None:
    assert paged.num_blocks_that_fit() == (1 << 20) // (16 * measured.kv_bytes_per_token)
    assert measured.max_model_len == paged.spec.max_model_len


def test_slots_and_adapters_are_what_the_engine_allocates(
    measured: ModelSize, paged: PagedModel, tmp_path: Path
) -> None:
    adapter = load_adapter(
        _all_linear_adapter(tmp_path, measured),
        paged.targets,
        LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK),
        torch.bfloat16,
    )
    paged.write_slot(0, adapter)
    load = Load(num_adapters=10, rank=RANK, max_loras=SLOTS, memory_bytes=1 << 30, context=64)
    sizing = plan(measured, load)
    assert sizing.slot_bytes == paged._lora_slots().weights.size_bytes
    assert sizing.adapter_bytes == adapter.size_bytes
    assert sizing.all_adapters_bytes == 10 * adapter.size_bytes


def test_parts_add_up_to_the_planned_share(measured: ModelSize) -> None:
    load = Load(num_adapters=1, rank=8, max_loras=2, memory_bytes=1 << 30, context=64)
    sizing = plan(measured, load)
    parts = (sizing.weight_bytes, sizing.slot_bytes, sizing.working_bytes, sizing.kv_cache_bytes)
    assert sum(parts) == int((1 << 30) * 0.9)
    assert sizing.fits


def test_the_command_tells_people_and_scripts(model: Path) -> None:
    command = ["size", "--model", str(model), "--adapters", "50", "--rank", "8", "--context", "64"]
    told = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert told.exit_code == 0, told.output
    assert "max_cpu_loras: 50" in told.output and "max_lora_rank: 8" in told.output
    sizing = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert f"kv_cache_bytes: {sizing['kv_cache_bytes']}" in told.output


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--memory", "1M"], 1, "does not fit"),
        (["--memory", "lots"], 2, "'lots' is not a size"),
        (["--targets", "nonsense"], 2, "the model has no such modules"),
    ],
)
def test_what_cannot_be_is_said(model: Path, options: list[str], status: int, words: str) -> None:
    command = ["size", "--model", str(model), "--adapters", "5", "--rank", "8", *options]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, words in result.output) == (status, True), result.output


@pytest.mark.parametrize(
    ("text", "expected"), [("80GiB", 80 << 30), ("1.5G", 3 << 29), ("512 MB", 512 << 20), ("7", 7)]
)
def test_sizes_are_read_in_powers_of_1024(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def _all_linear_adapter(path: Path, measured: ModelSize) -> LoRARequest:
    targets = sorted({linear.name.rpartition(".")[2] for linear in measured.linears})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": targets}
    (path / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for linear in measured.linears:
        prefix = f"base_model.model.{linear.name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.ones(RANK, linear.in_features)
        tensors[f"{prefix}.lora_B.weight"] = torch.ones(linear.out_features, RANK)
    save_file(tensors, path / "adapter_model.safetensors")
    digest = adapter_digest(find_adapter_files(path))
    return LoRARequest(lora_name="all", lora_path=str(path), digest=digest)
