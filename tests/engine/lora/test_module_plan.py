"""Name matching must agree with PEFT's own functions for any configuration."""

import re
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from engine.errors import InvalidAdapterError
from engine.lora import regex_worker
from engine.lora.module_plan import plan_modules, unmatched_targets
from engine.lora.peft_config import parse_peft_config
from engine.lora.targets import LoRATarget, ModelTargets

# Layer numbers of two digits, a layer inside a layer, and suffixes of each other.
NAMES = [
    *(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1, 10, 11) for p in "qk"),
    *(f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in (0, 1) for e in (0, 1)),
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.shared_gate",
    "layers.0.top",
    "lm_head",
]
TARGETS = ModelTargets({name: LoRATarget(name, 4, 4) for name in NAMES}, base_model="tiny")

SUFFIXES = ["q_proj", "self_attn.k_proj", "up_proj", "gate", "top", "0.up_proj", "lm_head", "proj"]
LISTED = st.lists(st.sampled_from([*SUFFIXES, *NAMES[:9]]), min_size=1, max_size=4)
REGEXES = st.sampled_from(
    [
        ".*q_proj",
        r"model\.layers\.1\..*",
        "lm_head|.*gate",
        "(?i).*K_PROJ",
        r".*\.1\d?\..*",
        "q_proj",
    ]
)
PATTERNS = st.dictionaries(
    st.sampled_from(
        [
            *SUFFIXES,
            NAMES[0],
            "self_attn",
            "model",
            "^model.*",
            r"layers\.1\..*",
            "(q|k)_proj",
            "^q_proj",
            r".*\.10\..*",
        ]
    ),
    st.integers(1, 9),
    max_size=3,
)
LAYERS = st.fixed_dictionaries(
    {"layers_to_transform": st.integers(0, 11) | st.lists(st.sampled_from([0, 1, 10]))},
    optional={
        "layers_pattern": st.sampled_from(["layers", "experts", ["h", "layers"], "lay.rs", "top"])
    },
)
CONFIGS = st.tuples(
    st.builds(lambda names, layers: {"target_modules": names} | layers, LISTED, LAYERS)
    | LISTED.map(lambda names: {"target_modules": names})
    | REGEXES.map(lambda regex: {"target_modules": regex}),
    st.fixed_dictionaries(
        {"rank_pattern": PATTERNS, "alpha_pattern": PATTERNS},
        optional={"exclude_modules": LISTED | REGEXES, "use_rslora": st.booleans()},
    ),
).map(lambda parts: {"r": 5, "lora_alpha": 3, **parts[0], **parts[1]})


def plan_of_peft(fields: dict[str, Any]) -> dict[str, tuple[int, float]]:
    config = LoraConfig(**fields)
    plan: dict[str, tuple[int, float]] = {}
    for name in NAMES:
        found = check_target_module_exists(config, name)
        if found and not isinstance(found, _ExcludedModule):
            rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
            key = get_pattern_key(config.alpha_pattern, name)
            alpha = config.alpha_pattern.get(key, config.lora_alpha)
            plan[name] = (rank, alpha / (rank**0.5 if config.use_rslora else rank))
    return plan


def match_here(
    field: str, regexes: list[tuple[regex_worker.How, str]], names: list[str]
) -> list[list[str | None]]:
    """The worker's function without its process, which takes longer than all the rest."""
    return regex_worker.match_names(regexes, names)


@settings(max_examples=200, deadline=None)
@given(fields=CONFIGS)
@patch("engine.lora.module_plan._match_in_process", match_here)
def test_the_plan_is_the_one_of_peft(fields: dict[str, Any]) -> None:
    expected = plan_of_peft(fields)
    config = parse_peft_config({"peft_type": "LORA", **fields})
    if not expected:
        with pytest.raises(InvalidAdapterError, match="match no module"):
            plan_modules(config, TARGETS)
        return
    plan = plan_modules(config, TARGETS)
    assert {name: (m.rank, m.scaling) for name, m in plan.items()} == expected


def test_list_entries_that_fit_nothing_are_known() -> None:
    fields = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    config = parse_peft_config({**fields, "target_modules": ["q_proj", "proj", "lm_head"]})
    assert unmatched_targets(config, TARGETS) == ("proj",)


@pytest.mark.parametrize("regex", ["(", "(?P<idx>", "a{99999999999}", "(?:" * 5000 + ")" * 5000])
def test_an_expression_that_does_not_compile_is_the_adapters_fault(regex: str) -> None:
    fields = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": regex}
    with pytest.raises(InvalidAdapterError, match=re.escape("regular expression that is not usab")):
        plan_modules(parse_peft_config(fields), TARGETS)
