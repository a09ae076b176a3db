"""Adapters whose files are damaged, hostile or do not fit: each is refused with its reason."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import LoRARequest
from engine.config import LoRAConfig
from engine.errors import AdapterError, InvalidAdapterError, UnsupportedAdapterError
from engine.lora.adapter import LoRAAdapter, load_adapter
from engine.lora.targets import ModelTargets
from tests.engine.lora.peft_adapters import (
    PeftAdapter,
    make_adapter,
    read_config,
    read_tensors,
    write_config,
    write_tensors,
)

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> PeftAdapter:
    return make_adapter(tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good: PeftAdapter, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good.path, tmp_path / "adapter"))


def load(path: Path, targets: ModelTargets, **limits: Any) -> LoRAAdapter:
    request = LoRARequest(lora_name="bad", lora_path=str(path))
    return load_adapter(request, targets, LoRAConfig(**limits), torch.float32)


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda path: write_config(path, {**read_config(path), **changes})


def tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        loaded = read_tensors(path)
        change(loaded)
        write_tensors(path, loaded)

    return apply


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        fields = json.loads(data[8 : 8 + length])
        change(fields)
        text = json.dumps(fields).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return raw(rewrite)


def rename(old: str, new: str) -> Callable[[Path], None]:
    return tensors(lambda t: t.__setitem__(new, t.pop(old)))


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def link_out(path: Path) -> None:
    outside = path.parent / "outside.safetensors"
    (path / "adapter_model.safetensors").rename(outside)
    (path / "adapter_model.safetensors").symlink_to(outside)


def as_pickle(path: Path) -> None:
    torch.save(read_tensors(path), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()


def with_index(weight_map: dict[str, str]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        shard = path / "adapter_model-00001-of-00001.safetensors"
        (path / "adapter_model.safetensors").rename(shard)
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "adapter_model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def pipe(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    os.mkfifo(path / "adapter_model.safetensors")


def link_to_itself(path: Path) -> None:
    (path / "adapter_model.safetensors").unlink()
    (path / "adapter_model.safetensors").symlink_to("adapter_model.safetensors")


def describe_many(fields: dict[str, Any]) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    fields.update({f"t{number}": empty for number in range(66_000)})


def grow(path: Path) -> None:
    """A sparse file: large to read, nothing on disk."""
    os.truncate(path / "adapter_model.safetensors", 1 << 32)


def set_value(key: str, value: float) -> Callable[[Path], None]:
    return tensors(lambda t: t[key].__setitem__((0, 0), value))


SHAPE = [4, 16]
INVALID: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "cannot be read: no adapter_config.json"),
    "no config": (remove("adapter_config.json"), "no adapter_config.json"),
    "no weights": (remove("adapter_model.safetensors"), "no adapter_model.safetensors"),
    "link out of the directory": (link_out, "link that leaves the directory"),
    "pipe": (pipe, "adapter_model.safetensors in .* is not a regular file"),
    "link to itself": (link_to_itself, "adapter_model.safetensors in .* is not a regular file"),
    "directory in place of a template": (
        lambda path: (path / "chat_template.jinja").mkdir(),
        "chat_template.jinja in .* is not a regular file",
    ),
    "config is a list": (lambda path: write_config(path, []), "must hold a JSON object"),
    "no r": (config(r=None), "r is missing"),
    "NaN alpha": (config(lora_alpha=float("nan")), "NaN is not a JSON number"),
    "targets match nothing": (config(target_modules=["c_attn"]), "match no module of the base"),
    "all excluded": (config(exclude_modules=["q_proj", "v_proj"]), "match no module of the base"),
    "bad regex": (config(target_modules="(q_proj"), "target_modules holds a regular expression"),
    "bad pattern": (config(rank_pattern={"q_proj)": 4}), "rank_pattern holds a regular"),
    "bad plain pattern": (config(alpha_pattern={"\\9": 4}), "alpha_pattern holds a regular"),
    "too large": (grow, r"take 4294\d+ bytes; an adapter for tiny with max_lora_rank=64"),
    "empty file": (raw(lambda data: b""), "0 bytes long, too short"),
    "huge header": (raw(lambda data: struct.pack("<Q", 1 << 60) + data[8:]), "claims a header"),
    "header past the end": (raw(lambda data: data[:100]), "claims a header of"),
    "header is not JSON": (raw(lambda data: data[:8] + b"x" + data[9:]), "damaged JSON"),
    "header is a list": (raw(lambda data: struct.pack("<Q", 2) + b"[]"), "not a JSON object"),
    "truncated": (raw(lambda data: data[:-4]), "truncated or damaged"),
    "trailing bytes": (raw(lambda data: data + b"\0"), "truncated or damaged"),
    "entry is a number": (header(lambda h: h.update(x=1)), "something that is not an object"),
    "negative shape": (
        header(lambda h: h[f"{Q0}.lora_A.weight"].update(shape=[-4, -16])),
        "damaged shape or offsets",
    ),
    "boolean shape": (
        header(lambda h: h[f"{Q0}.lora_A.weight"].update(shape=[True, 64])),
        "damaged shape or offsets",
    ),
    "shape of another size": (
        header(lambda h: h[f"{Q0}.lora_A.weight"].update(shape=[4, 17])),
        r"256 bytes for shape \[4, 17\]",
    ),
    "overlap": (
        header(lambda h: h[f"{Q0}.lora_B.weight"].update(data_offsets=[0, 256])),
        "overlap or leave gaps",
    ),
    "too many tensors": (header(describe_many), r"describes 660\d\d tensors, more than 65536"),
    "no tensors": (tensors(dict.clear), "holds no tensors"),
    "layer out of range": (
        rename(f"{Q0}.lora_A.weight", f"{Q0}.lora_A.weight".replace(".0.", ".7.")),
        "'model.layers.7.self_attn.q_proj', which the base model tiny does not have; its modules"
        " are named like 'model.layers.0.self_attn.q_proj'",
    ),
    "wrong prefix": (
        rename(f"{Q0}.lora_A.weight", f"model.{Q0}.lora_A.weight"),
        "which the base model tiny does not have",
    ),
    "stray name": (rename(f"{Q0}.lora_A.weight", "stray"), "'stray' is not part of a LoRA"),
    "lora_A without lora_B": (
        tensors(lambda t: t.pop(f"{Q0}.lora_B.weight")),
        "q_proj has a lora_A without its lora_B",
    ),
    "lora_B without lora_A": (
        tensors(lambda t: t.pop(f"{Q0}.lora_A.weight")),
        "q_proj has a lora_B without its lora_A",
    ),
    "targeted module without tensors": (
        config(target_modules=["q_proj", "v_proj", "k_proj"]),
        "targets model.layers.0.self_attn.k_proj, but the weight file has no tensors",
    ),
    "tensors of an untargeted module": (
        config(target_modules=["v_proj"]),
        "module that the configuration does not target",
    ),
    "rank of the config differs": (
        config(r=5),
        r"lora_A.weight' has shape \(4, 16\), but configuration and base model say \(5, 16\)",
    ),
    "rank_pattern differs": (config(rank_pattern={"v_proj": 2}), r"say \(2, 16\)"),
    "wrong input width": (
        tensors(lambda t: t.update({f"{Q0}.lora_A.weight": torch.zeros(4, 17)})),
        r"has shape \(4, 17\)",
    ),
    "wrong output width": (
        tensors(lambda t: t.update({f"{Q0}.lora_B.weight": torch.zeros(15, 4)})),
        r"has shape \(15, 4\), .* \(output width and rank\)",
    ),
    "one dimension": (
        tensors(lambda t: t.update({f"{Q0}.lora_B.weight": torch.zeros(64)})),
        r"has shape \(64,\)",
    ),
    "NaN weight": (set_value(f"{Q0}.lora_A.weight", float("nan")), "lora_A of .*not finite"),
    "infinite weight": (set_value(f"{Q0}.lora_B.weight", float("inf")), "lora_B of .*not finite"),
    "flipped bit of an exponent": (
        set_value(f"{Q0}.lora_B.weight", 1e37),
        r"lora_B of .*q_proj has values up to 2.5e\+37, more than 65504: damaged",
    ),
    "some tensors without prefix": (
        rename(f"{Q0}.lora_A.weight", f"{Q0}.lora_A.weight".removeprefix("base_model.model.")),
        "'model.layers.0.self_attn.q_proj.lora_A.weight' lacks the prefix 'base_model.model.'",
    ),
    "every lora_A is zero": (
        tensors(lambda t: [tensor.zero_() for key, tensor in t.items() if "lora_A" in key]),
        "every lora_A or lora_B is zero: the adapter would change nothing",
    ),
    "two adapters": (
        tensors(lambda t: t.update({f"{Q0}.lora_A.other.weight": torch.zeros(SHAPE)})),
        "several adapters",
    ),
    "twice the same": (
        tensors(
            lambda t: t.update(
                {f"{Q0}.lora_A.weight".removeprefix("base_model.model."): torch.zeros(SHAPE)}
            )
        ),
        "are the same",
    ),
    "index lies": (with_index({"x": "../../etc/passwd"}), "places 'x' in '../../etc/passwd'"),
    "index is empty": (with_index({}), "does not list"),
    "embedding tensors": (
        tensors(lambda t: t.update({"model.embed_tokens.lora_embedding_A": torch.zeros(4, 40)})),
        "is lora_embedding_A of a module that the configuration does not target",
    ),
    "dora tensors": (
        tensors(lambda t: t.update({f"{Q0}.lora_magnitude_vector": torch.zeros(16)})),
        "is a DoRA magnitude of a module that the configuration does not target",
    ),
    "bias of lora_B": (
        tensors(lambda t: t.update({f"{Q0}.lora_B.bias": torch.zeros(16)})),
        "is a bias on lora_B of a module that the configuration does not target",
    ),
    "trained tokens": (
        tensors(
            lambda t: t.update(
                {"model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(2, 16)}
            )
        ),
        "is trained token embeddings of a module that the configuration does",
    ),
    "embedding without tensors": (
        config(target_modules=["q_proj", "v_proj", "embed_tokens"]),
        "targets model.embed_tokens, but the weight file has no tensors for it",
    ),
    "dora without magnitudes": (config(use_dora=True), "has a lora_A without its DoRA magnitude"),
    "modules_to_save of nothing": (
        config(modules_to_save=["classifier"]),
        "entry 'classifier' matches no module",
    ),
    "modules_to_save without tensors": (
        config(modules_to_save=["lm_head"]),
        "targets lm_head, but the weight file has no tensors for it",
    ),
    "token outside of the vocabulary": (
        config(trainable_token_indices={"embed_tokens": [40]}),
        "trainable_token_indices has token 40, but model.embed_tokens has 40",
    ),
    "invocation outside of the vocabulary": (
        config(alora_invocation_tokens=[3, 40]),
        "alora_invocation_tokens has token 40, but model.embed_tokens has 40",
    ),
}


@pytest.mark.parametrize(("damage", "message"), INVALID.values(), ids=INVALID.keys())
def test_a_damaged_adapter_is_invalid(
    good: PeftAdapter, path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(path)
    with pytest.raises(InvalidAdapterError, match=message) as caught:
        load(path, good.targets)
    assert str(caught.value).startswith("adapter 'bad'")


UNSUPPORTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "rank over the limit": (
        config(r=128),
        "rank 128 .* is over the limit max_lora_rank=64; start the engine with a larger",
    ),
    "huge rank": (config(r=10**30), "is over the limit max_lora_rank=64"),
    "rank_pattern over the limit": (
        config(rank_pattern={"v_proj": 65}),
        r"rank 65 \(in model.layers.0.self_attn.v_proj\) is over the limit",
    ),
    "pickle": (as_pickle, "adapter_model.bin is a pickle; convert it"),
    "integers": (
        tensors(lambda t: t.update(x=torch.zeros(1, dtype=torch.int64))),
        "tensor 'x' has dtype 'I64'; served are F32, F16, BF16, F8_E4M3, F8_E5M2",
    ),
    "trained base bias": (
        tensors(lambda t: t.update({f"{Q0}.base_layer.bias": torch.zeros(16)})),
        "a full bias, which is not served",
    ),
    "saved module": (
        tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(40, 16)})),
        "a full weight, which is not served",
    ),
    "unknown variant": (
        tensors(lambda t: t.update({f"{Q0}.lora_diag": torch.zeros(4)})),
        "an unknown LoRA variant",
    ),
}


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_is_not_served_exactly_is_refused(
    good: PeftAdapter, path: Path, change: Callable[[Path], object], message: str
) -> None:
    change(path)
    with pytest.raises(UnsupportedAdapterError, match=message):
        load(path, good.targets)


def damaged_bytes(data: bytes, cut: int, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data[: cut % (len(data) + 1)])
    for position, bit in flips:
        if changed:
            changed[position % len(changed)] ^= 1 << bit
    return bytes(changed)


# Half of the positions fall in the first bytes, where lengths, names and offsets are.
POSITIONS = st.integers(0, 40) | st.integers(0, 2500) | st.integers(0, 1 << 20)
FLIPS = st.lists(st.tuples(POSITIONS, st.integers(0, 7)), max_size=4)
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(file=st.integers(0, 1), cut=st.just(-1) | POSITIONS, flips=FLIPS)
def test_any_damage_of_the_bytes_loads_or_is_an_adapter_error(
    good: PeftAdapter, path: Path, file: int, cut: int, flips: list[tuple[int, int]]
) -> None:
    name = ("adapter_config.json", "adapter_model.safetensors")[file]
    (path / name).write_bytes(damaged_bytes((good.path / name).read_bytes(), cut, flips))
    with suppress(AdapterError):
        load(path, good.targets)
    shutil.copy(good.path / name, path / name)


@FUZZ
@given(cut=st.just(-1) | POSITIONS, flips=FLIPS)
def test_any_damage_of_a_pickle_loads_or_is_an_adapter_error(
    good: PeftAdapter, path: Path, cut: int, flips: list[tuple[int, int]]
) -> None:
    file = path / "adapter_model.bin"
    (path / "adapter_model.safetensors").unlink(missing_ok=True)
    torch.save(read_tensors(good.path), file)
    file.write_bytes(damaged_bytes(file.read_bytes(), cut, flips))
    with suppress(AdapterError):
        load(path, good.targets, allow_pickle=True)
