"""Adapters that PEFT wrote must change each module's weight by exactly what PEFT adds to it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import save_file

from adapters import (
    AdapterContent,
    AdapterFiles,
    adapter_digest,
    find_adapter_files,
    read_adapter,
)
from engine.config import LoRAConfig
from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter import LoRAAdapter, load_adapter
from tests.engine.lora.peft_adapters import (
    PeftAdapter,
    make_adapter,
    read_config,
    read_tensors,
    tiny_gpt2,
    tiny_llama,
    write_config,
    write_tensors,
)

LIMITS = LoRAConfig()


def load(adapter: PeftAdapter, dtype: torch.dtype = torch.float32) -> LoRAAdapter:
    return load_adapter(
        adapter.request, adapter.targets, LIMITS, dtype, base_weight=adapter.base_weight
    )


def assert_same_deltas(loaded: LoRAAdapter, oracle: PeftAdapter, atol: float = 1e-5) -> None:
    expected = oracle.delta_weights()
    assert loaded.modules.keys() == expected.keys()
    for name, module in loaded.modules.items():
        delta = module.lora_b.float().T @ module.lora_a.float()
        assert expected[name].abs().max() > 0.1, "a delta of zero would prove nothing"
        torch.testing.assert_close(delta, expected[name].float(), atol=atol, rtol=atol)


LLAMA_CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "alpha_equals_rank_no_more": {"r": 8, "lora_alpha": 3},
    "fractional_alpha": {"lora_alpha": 2.5},
    "rank_pattern_suffix": {"rank_pattern": {"q_proj": 7}},
    "rank_pattern_full_name": {"rank_pattern": {"model.layers.1.self_attn.v_proj": 2}},
    "rank_pattern_regex": {"rank_pattern": {r"layers\.[12]\..*q_proj": 3, "q_proj": 6}},
    "alpha_pattern": {"alpha_pattern": {"v_proj": 31}},
    "both_patterns_rslora": {
        "rank_pattern": {r"^model\.layers\.0\..*": 5},
        "alpha_pattern": {r".*\.2\.self_attn.q_proj": 77, "v_proj": 5},
        "use_rslora": True,
    },
    "regex_targets": {"target_modules": r".*\.(0|2)\.mlp\.(up|down)_proj"},
    "all_linear": {"target_modules": "all-linear"},
    "all_linear_exclude": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "exclude_regex": {"exclude_modules": r".*\.1\..*"},
    "full_names": {"target_modules": ["model.layers.0.self_attn.k_proj", "gate_proj"]},
    "one_layer": {"layers_to_transform": 1},
    "layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "layers_pattern_list": {"layers_to_transform": [2], "layers_pattern": ["h", "layers"]},
    "layer_and_full_name": {
        "target_modules": ["q_proj", "model.layers.0.self_attn.v_proj"],
        "layers_to_transform": [2],
    },
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "wrong_fan_in_fan_out": {"fan_in_fan_out": True},
}


@pytest.mark.parametrize("config", LLAMA_CONFIGS.values(), ids=LLAMA_CONFIGS.keys())
def test_deltas_equal_those_of_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    oracle = make_adapter(tmp_path, **config)
    assert_same_deltas(load(oracle), oracle)


@pytest.mark.parametrize("fan_in_fan_out", [True, False])
def test_conv1d_deltas_equal_those_of_peft(tmp_path: Path, fan_in_fan_out: bool) -> None:
    oracle = make_adapter(
        tmp_path,
        tiny_gpt2,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=fan_in_fan_out,
    )
    assert_same_deltas(load(oracle), oracle)


def test_lm_head_of_a_tied_model_changes_the_logits_alone(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path, lambda: tiny_llama(tied=True), target_modules=["lm_head"])
    assert_same_deltas(load(oracle), oracle)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_widened_exactly(tmp_path: Path, stored: torch.dtype) -> None:
    oracle = make_adapter(tmp_path, dtype=stored, use_rslora=True)
    loaded = load(oracle)
    assert loaded.buffer.dtype == torch.float32
    weights = read_tensors(tmp_path)
    scaling = 10 / 4**0.5
    for name, module in loaded.modules.items():
        key = f"base_model.model.{name}"
        assert weights[f"{key}.lora_A.weight"].dtype == stored
        assert torch.equal(module.lora_a, weights[f"{key}.lora_A.weight"].float())
        expected = weights[f"{key}.lora_B.weight"].float().T * scaling
        torch.testing.assert_close(module.lora_b, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaling_is_applied_before_the_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle = make_adapter(tmp_path, lora_alpha=7, r=3)
    weights = read_tensors(tmp_path)
    for name, module in load(oracle, dtype).modules.items():
        lora_b = weights[f"base_model.model.{name}.lora_B.weight"]
        assert torch.equal(module.lora_b, (lora_b.T * (7 / 3)).to(dtype))


def renamed(path: Path, rename: Callable[[str], str]) -> None:
    write_tensors(path, {rename(key): tensor for key, tensor in read_tensors(path).items()})


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default."),
        lambda key: key.removeprefix("base_model.model."),
    ],
    ids=["adapter name in the key", "no prefix"],
)
def test_other_spellings_of_tensor_names_mean_the_same(
    tmp_path: Path, rename: Callable[[str], str]
) -> None:
    oracle = make_adapter(tmp_path)
    renamed(tmp_path, rename)
    assert_same_deltas(load(oracle), oracle)


def split_in_shards(path: Path) -> None:
    tensors = read_tensors(path)
    (path / "adapter_model.safetensors").unlink()
    weight_map = {}
    for number, keys in enumerate((list(tensors)[::2], list(tensors)[1::2]), start=1):
        shard = f"adapter_model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key] for key in keys}, path / shard)
        weight_map |= dict.fromkeys(keys, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "adapter_model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_with_an_index_are_one_adapter(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path)
    split_in_shards(tmp_path)
    assert_same_deltas(load(oracle), oracle)


def test_a_lost_shard_is_noticed(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path)
    split_in_shards(tmp_path)
    (tmp_path / "adapter_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidAdapterError, match="not found there"):
        load(oracle)


def test_a_pickle_is_read_when_the_operator_allows_it(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path)
    torch.save(read_tensors(tmp_path), tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    limits = LoRAConfig(allow_pickle=True)
    assert_same_deltas(load_adapter(oracle.request, oracle.targets, limits, torch.float32), oracle)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    oracle = make_adapter(tmp_path)
    torch.save({"x": Hostile()}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidAdapterError, match="cannot be loaded"):
        load_adapter(oracle.request, oracle.targets, LoRAConfig(allow_pickle=True), torch.float32)
    assert not (tmp_path / "ran").exists()


def test_a_saved_copy_of_base_weights_needs_a_base_to_compare_with(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path, target_modules=["lm_head"])
    assert any("base_layer" in key for key in read_tensors(tmp_path))
    with pytest.raises(UnsupportedAdapterError, match="a full weight, which is not served"):
        load_adapter(oracle.request, oracle.targets, LIMITS, torch.float32)


def test_a_rounded_copy_of_base_weights_is_accepted(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path, target_modules=["lm_head"])
    tensors = read_tensors(tmp_path)
    key = "base_model.model.lm_head.base_layer.weight"
    write_tensors(tmp_path, {**tensors, key: tensors[key].bfloat16()})
    assert_same_deltas(load(oracle), oracle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight + 0.1, "by other values"),
        (lambda weight: torch.cat([weight, weight[:2]]), "resized vocabularies"),
    ],
)
def test_changed_base_weights_are_refused(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    oracle = make_adapter(tmp_path, target_modules=["lm_head"])
    tensors = read_tensors(tmp_path)
    key = "base_model.model.lm_head.base_layer.weight"
    write_tensors(tmp_path, {**tensors, key: change(tensors[key])})
    with pytest.raises(UnsupportedAdapterError, match=message):
        load(oracle)


def test_info_tells_what_was_loaded(tmp_path: Path) -> None:
    oracle = make_adapter(
        tmp_path,
        rank_pattern={"v_proj": 9},
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "c_attn"],
    )
    loaded = load(oracle)
    info = loaded.info
    assert info.digest == adapter_digest(find_adapter_files(tmp_path))
    assert (info.lora_name, info.rank) == ("tiny-adapter", 9)
    assert info.target_modules == ("q_proj", "v_proj")
    assert (info.num_modules, info.num_tensors) == (6, 12)
    assert info.features == ("use_rslora", "rank_pattern")
    assert info.notes == ("target_modules entry 'c_attn' matches no module of the base model",)
    assert info.size_bytes == loaded.buffer.nbytes >= 3 * 4 * (4 * 32 + 9 * 24)


def test_all_modules_share_one_buffer(tmp_path: Path) -> None:
    loaded = load(make_adapter(tmp_path))
    storage = loaded.buffer.untyped_storage().data_ptr()
    for module in loaded.modules.values():
        for part in (module.lora_a, module.lora_b):
            assert part.untyped_storage().data_ptr() == storage
            assert part.is_contiguous()


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_that_would_change_nothing_is_refused(tmp_path: Path, use_dora: bool) -> None:
    oracle = make_adapter(tmp_path, use_dora=use_dora)
    tensors = read_tensors(tmp_path)
    for key, tensor in tensors.items():
        if "lora_B" in key:
            tensor.zero_()
        if "magnitude" in key:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")
            weight = oracle.base_weight(name, "weight")
            assert weight is not None
            tensor.copy_(weight.detach().norm(dim=1))
    write_tensors(tmp_path, tensors)
    with pytest.raises(InvalidAdapterError, match="the adapter would change nothing"):
        load(oracle)


def test_the_digest_of_the_request_is_verified(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path)
    digest = load(oracle).digest
    registered = replace(oracle.request, digest=digest)
    assert load_adapter(registered, oracle.targets, LIMITS, torch.float32).digest == digest

    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, {key: tensor * 2 for key, tensor in tensors.items()})
    with pytest.raises(InvalidAdapterError, match=f"not {digest} as registered"):
        load_adapter(registered, oracle.targets, LIMITS, torch.float32)


def test_a_configuration_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_late(files: AdapterFiles) -> AdapterContent:
        write_config(tmp_path, {**read_config(tmp_path), "lora_alpha": 99})
        return read_adapter(files)

    oracle = make_adapter(tmp_path)
    monkeypatch.setattr("engine.lora.adapter.read_adapter", read_late)
    with pytest.raises(InvalidAdapterError, match=r"adapter_config\.json changed while"):
        load(oracle)


def test_a_compressed_pickle_is_refused_before_it_unpacks(tmp_path: Path) -> None:
    oracle = make_adapter(tmp_path)
    torch.save(read_tensors(tmp_path), tmp_path / "stored.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    with (
        ZipFile(tmp_path / "stored.bin") as stored,
        ZipFile(tmp_path / "adapter_model.bin", "w", ZIP_DEFLATED) as packed,
    ):
        for member in stored.infolist():
            packed.writestr(member.filename, stored.read(member))
    with pytest.raises(InvalidAdapterError, match="compressed members"):
        load_adapter(oracle.request, oracle.targets, LoRAConfig(allow_pickle=True), torch.float32)


@pytest.mark.parametrize("padding", [1, 2, 3])
def test_tensors_at_odd_addresses_are_read_exactly(tmp_path: Path, padding: int) -> None:
    oracle = make_adapter(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    length = (end - 8 + padding).to_bytes(8, "little")
    file.write_bytes(length + data[8:end] + b" " * padding + data[end:])
    assert_same_deltas(load(oracle), oracle)
