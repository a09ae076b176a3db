"""Which adapter_config.json is understood, and what is said about the others."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from engine.errors import AdapterError, InvalidAdapterError, UnsupportedAdapterError
from engine.lora.peft_config import MAX_CONFIG_BYTES, parse_peft_config, read_peft_config
from engine.lora.peft_fields import HARMLESS, HONOURED, OFF_ONLY

GOOD: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
}


def test_every_field_of_the_installed_peft_has_a_decision() -> None:
    installed = {field.name for field in dataclasses.fields(LoraConfig)}
    assert installed == HONOURED | HARMLESS | OFF_ONLY.keys()


def test_no_field_has_two_decisions() -> None:
    assert len(HONOURED) + len(HARMLESS) + len(OFF_ONLY) == len(
        HONOURED | HARMLESS | OFF_ONLY.keys()
    )


def test_the_defaults_of_the_installed_peft_are_accepted() -> None:
    fields = LoraConfig(target_modules=["q_proj"]).to_dict()
    fields["target_modules"] = ["q_proj"]
    fields["peft_type"] = "LORA"
    config = parse_peft_config(fields)
    assert (config.rank, config.alpha, config.features) == (8, 8.0, ())


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no r": ({"r": None}, "r is missing"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha is missing"),
    "no targets": ({"target_modules": None}, "target_modules must name modules"),
    "empty targets": ({"target_modules": []}, "target_modules must name modules"),
    "no peft_type": ({"peft_type": None}, "peft_type is missing"),
    "numeric peft_type": ({"peft_type": 3}, "peft_type must be a string"),
    "boolean r": ({"r": True}, "r must be a positive integer, got True"),
    "float r": ({"r": 8.0}, "r must be a positive integer, got 8.0"),
    "zero r": ({"r": 0}, "r must be a positive integer, got 0"),
    "negative r": ({"r": -4}, "r must be a positive integer, got -4"),
    "text r": ({"r": "8"}, "r must be a positive integer, got '8'"),
    "boolean alpha": ({"lora_alpha": False}, "lora_alpha must be a positive number"),
    "negative alpha": ({"lora_alpha": -1}, "lora_alpha must be a positive number, got -1"),
    "endless alpha": ({"lora_alpha": 10**400}, "lora_alpha must be a positive number"),
    "targets of numbers": ({"target_modules": [1]}, "list of non-empty strings"),
    "empty target": ({"target_modules": ["q_proj", ""]}, "list of non-empty strings"),
    "exclude object": ({"exclude_modules": {"a": 1}}, "exclude_modules must be a string or"),
    "text rslora": ({"use_rslora": "yes"}, "use_rslora must be true or false, got 'yes'"),
    "number for a flag": ({"use_dora": 1}, "use_dora must be true or false, got 1"),
    "module that is no text": ({"modules_to_save": [1]}, "modules_to_save must be a list of str"),
    "token that is no number": (
        {"trainable_token_indices": ["x"]},
        "trainable_token_indices must hold lists of token ids",
    ),
    "token twice": ({"trainable_token_indices": [4, 4]}, "names a token twice"),
    "rank_pattern list": ({"rank_pattern": [1]}, "rank_pattern must be an object"),
    "rank_pattern value": ({"rank_pattern": {"q": 0}}, r"rank_pattern\['q'\] must be a positive"),
    "alpha_pattern value": ({"alpha_pattern": {"q": "x"}}, r"alpha_pattern\['q'\] must be a"),
    "layer text": ({"layers_to_transform": ["0"]}, "layers_to_transform must be layer indices"),
    "layer boolean": ({"layers_to_transform": True}, "layers_to_transform must be layer indices"),
    "layers_pattern number": (
        {"layers_to_transform": [0], "layers_pattern": 5},
        "layers_pattern must be a string or a list",
    ),
    "pattern without layers": ({"layers_pattern": "h"}, "layers_pattern needs layers_to_transform"),
    "regex with layers": (
        {"target_modules": ".*q", "layers_to_transform": 1},
        "need target_modules to be a list",
    ),
}


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID.keys())
def test_an_impossible_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidAdapterError, match=message):
        parse_peft_config({**GOOD, **change})


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "other method": ({"peft_type": "ADALORA"}, "peft_type 'ADALORA' is not served"),
    "other task": ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not served"),
    "dora with bias": ({"use_dora": True, "lora_bias": True}, "lora_bias with use_dora"),
    "bias": ({"bias": "most"}, "bias='most' is not served"),
    "modules_to_save": ({"modules_to_save": ["lm_.*"]}, "'lm_\\.\\*' is not a plain module name"),
    "alora with dora": (
        {"alora_invocation_tokens": [7], "use_dora": True},
        "alora_invocation_tokens with use_dora is not served",
    ),
    "parameters": ({"target_parameters": ["experts.w"]}, "LoRA on bare parameters"),
    "replication": ({"layer_replication": [[0, 2]]}, "replicated base layers"),
    "megatron": ({"megatron_config": {"x": 1}}, "Megatron"),
    "qalora": ({"use_qalora": True}, "QALoRA"),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
    "arrow": ({"arrow_config": {"top_k": 3}}, "Arrow"),
    "kasa": ({"kasa_config": {"beta": 0.1}}, "KaSA"),
    "monteclora": ({"monteclora_config": {"num_samples": 8}}, "Monteclora"),
    "velora": ({"velora_config": {"scale": 1.0}}, "VeLoRA"),
    "weight tying": ({"ensure_weight_tying": True}, "tied embeddings"),
    "pissa": ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    "pissa_niter": ({"init_lora_weights": "pissa_niter_4"}, "changed base weights"),
    "olora": ({"init_lora_weights": "olora"}, "changed base weights"),
    "loftq": ({"init_lora_weights": "loftq"}, "changed base weights"),
    "corda": ({"init_lora_weights": "corda"}, "changed base weights"),
    "lora_ga": ({"init_lora_weights": "lora_ga"}, "changed base weights"),
    "unknown init": ({"init_lora_weights": ["x"]}, "changed base weights"),
    "unknown field": ({"use_magic": True}, "field 'use_magic' with value True is unknown"),
}


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_a_feature_that_is_not_served_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedAdapterError, match=message):
        parse_peft_config({**GOOD, **change})


@pytest.mark.parametrize("name", sorted(OFF_ONLY))
@pytest.mark.parametrize("value", [None, False, [], ""])
def test_a_feature_that_is_off_is_accepted(name: str, value: object) -> None:
    parse_peft_config({**GOOD, name: value})


@pytest.mark.parametrize("name", sorted(OFF_ONLY))
def test_an_empty_configuration_is_not_off_as_peft_fills_in_its_defaults(name: str) -> None:
    with pytest.raises(UnsupportedAdapterError, match=name):
        parse_peft_config({**GOOD, name: {}})


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_harmless_field_may_hold_anything(name: str) -> None:
    parse_peft_config({**GOOD, name: {"any": ["thing", 1]}})


def test_an_unknown_field_that_is_off_is_accepted() -> None:
    parse_peft_config({**GOOD, "use_magic": False, "magic_config": None})


DAMAGED: dict[str, tuple[bytes, str]] = {
    "not JSON": (b"{", "not valid JSON"),
    "not UTF-8": (b'{"r": "\xff"}', "not valid JSON"),
    "list": (b"[]", "must hold a JSON object, not a list"),
    "null": (b"null", "must hold a JSON object, not null"),
    "text": (b'"x"', "must hold a JSON object, not a string"),
    "NaN": (b'{"peft_type": "LORA", "lora_alpha": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"lora_alpha": -Infinity}', "-Infinity is not a JSON number"),
    "deep": (b"[" * 100_000, "not valid JSON"),
    "long": (b" " * (MAX_CONFIG_BYTES + 1), "more than the limit"),
    "long number": (b'{"r": ' + b"9" * 10_000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_invalid(data: bytes, message: str) -> None:
    with pytest.raises(InvalidAdapterError, match=message):
        read_peft_config(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["LORA", "q_proj", "all-linear", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted(HONOURED | HARMLESS | OFF_ONLY.keys()))


@settings(max_examples=100, deadline=None)
@given(changes=st.dictionaries(FIELDS | st.text(max_size=6), JSON, max_size=4))
def test_any_json_object_is_parsed_or_refused(changes: dict[str, Any]) -> None:
    try:
        parse_peft_config({**GOOD, **changes})
    except AdapterError as error:
        assert str(error).startswith("adapter_config.json: ")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with pytest.raises(AdapterError):
        read_peft_config(data)
