"""Each rule broken in turn: the matrix must notice, or its cells would prove nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine import adapter_set
from engine.errors import AdapterError
from engine.lora import adapter, module_change, module_plan, slot_changes, tensor_plan
from engine.lora.module_change import ChangeBuilder
from engine.lora.module_spelling import AS_THE_BASE_MODEL
from engine.lora.peft_config import PeftLoRAConfig
from tests.engine.matrix.laboratory import PROMPT, Laboratory
from tests.engine.matrix.test_matrix import assert_close


@dataclass(frozen=True)
class Mutation:
    """A rule, the cell that must notice when it is broken, and how it is broken."""

    architecture: str
    feature: str
    place: Any
    name: str
    broken: Callable[[Any], Any]


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: value


def _without(attribute: str) -> Callable[[Any], Any]:
    """Break a builder: its result lacks one part."""

    def broken(original: Any) -> Any:
        def build(*args: Any) -> dict[str, torch.Tensor]:
            parts = original(*args)
            neutral = torch.ones if attribute == "scale" else torch.zeros
            return {**parts, attribute: neutral(parts[attribute].shape)}

        return build

    return broken


def _unscaled(original: Any) -> Any:
    return lambda self, target, loaded, plan: original(
        self, target, loaded, None if plan is None else replace(plan, scaling=1.0)
    )


def _norm_of_base_alone(original: Any) -> Any:
    return lambda weight, lora_a, scaled_b, magnitude: original(
        weight, lora_a, torch.zeros_like(scaled_b), magnitude
    )


def _no_patterns(original: Any) -> Any:
    return lambda field, pattern, names, default: original(field, (), names, default)


def _first_occurrence(original: Any) -> Any:
    return lambda wanted, ids: next(
        start for start in range(len(ids)) if tuple(ids[start : start + 2]) == tuple(wanted)
    )


def _unscaled_embedding(original: Any) -> Any:
    return lambda module, change, ids, out: original(torch.nn.Identity(), change, ids, out)


def _next_slot(original: Any) -> Any:
    return lambda table, out, batch: original(table.roll(1, dims=0), out, batch)


def _no_tied_head(original: Any) -> Any:
    return lambda tensors, plan, targets, *rest: original(
        tensors, plan, replace(targets, tied_head=None), *rest
    )


MUTATIONS = {
    "rsLoRA is dropped": Mutation(
        "llama",
        "rsLoRA",
        PeftLoRAConfig,
        "scaling",
        lambda original: lambda self, rank, alpha: alpha / rank,
    ),
    "rsLoRA is always on": Mutation(
        "llama",
        "plain",
        PeftLoRAConfig,
        "scaling",
        lambda original: lambda self, rank, alpha: alpha / math.sqrt(rank),
    ),
    "alpha and rank are swapped": Mutation(
        "llama",
        "plain",
        PeftLoRAConfig,
        "scaling",
        lambda original: lambda self, rank, alpha: rank / alpha,
    ),
    "patterns are ignored": Mutation(
        "llama", "rank_pattern, alpha_pattern", module_plan, "_pattern_values", _no_patterns
    ),
    "layers_to_transform are ignored": Mutation(
        "llama",
        "layers_to_transform",
        module_plan,
        "_layer_indices",
        lambda original: lambda patterns, names: [1] * len(names),
    ),
    "exclude_modules are ignored": Mutation(
        "llama",
        "exclude_modules",
        module_plan,
        "_targeted_names",
        lambda original: (
            lambda config, targets: original(replace(config, exclude_modules=()), targets)
        ),
    ),
    "DoRA's magnitude is ignored": Mutation(
        "llama", "DoRA", ChangeBuilder, "_affine", _without("scale")
    ),
    "DoRA's norm is that of the base weight": Mutation(
        "llama", "DoRA", module_change, "_dora_scale", _norm_of_base_alone
    ),
    "DoRA scales the bias too": Mutation(
        "qwen2", "DoRA, rsLoRA, patterns, bias", ChangeBuilder, "_affine", _without("shift")
    ),
    "new biases are ignored": Mutation(
        "qwen2", "bias lora_only", ChangeBuilder, "_affine", _without("shift")
    ),
    "lora_bias is not scaled": Mutation("llama", "lora_bias", ChangeBuilder, "_affine", _unscaled),
    "a saved head is ignored": Mutation(
        "llama",
        "modules_to_save lm_head",
        slot_changes,
        "_apply_to_linear",
        _constant(None),
    ),
    "saved norms are ignored": Mutation(
        "llama", "modules_to_save norms", slot_changes._NormUpdate, "__call__", _constant(None)
    ),
    "other saved norms are ignored": Mutation(
        "gemma3_text",
        "modules_to_save norms",
        slot_changes,
        "_normalise",
        lambda original: lambda module, change, rows, out: out,
    ),
    "LoRA on an embedding is ignored": Mutation(
        "llama",
        "embedding",
        slot_changes,
        "_embed",
        lambda original: lambda module, change, ids, out: out,
    ),
    "an embedding's own factor is ignored": Mutation(
        "gemma3_text", "embedding", slot_changes, "_embed", _unscaled_embedding
    ),
    "trained tokens miss the tied head": Mutation(
        "gemma3_text", "trainable_token_indices", adapter, "_changes", _no_tied_head
    ),
    "trained tokens are taken one row off": Mutation(
        "llama",
        "trainable_token_indices",
        adapter,
        "trained_token_ids",
        lambda original: (
            lambda config, targets: {
                name: tuple(token + 1 for token in ids)
                for name, ids in original(config, targets).items()
            }
        ),
    ),
    "saved modules are not expected": Mutation(
        "llama", "modules_to_save embedding", tensor_plan, "_saved_modules", _constant(())
    ),
    "aLoRA is always on": Mutation("llama", "aLoRA", adapter_set, "last_occurrence", _constant(0)),
    "aLoRA starts at the first invocation": Mutation(
        "llama", "aLoRA", adapter_set, "last_occurrence", _first_occurrence
    ),
    "a pattern's rank scales as the default rank": Mutation(
        "llama",
        "rank_pattern, alpha_pattern",
        PeftLoRAConfig,
        "scaling",
        lambda original: lambda self, rank, alpha: original(self, self.rank, alpha),
    ),
    "aLoRA's biases are ignored": Mutation(
        "llama", "aLoRA, rsLoRA, lora_bias, head", ChangeBuilder, "_affine", _without("shift")
    ),
    "DoRA on an embedding is ignored": Mutation(
        "llama", "DoRA on head and embedding", ChangeBuilder, "_embedding", _without("scale")
    ),
    "a saved linear is ignored": Mutation(
        "llama",
        "modules_to_save a linear",
        slot_changes,
        "_apply_to_linear",
        _constant(None),
    ),
    "names of a multimodal model are not understood": Mutation(
        "llama",
        "text part of a multimodal model",
        adapter,
        "find_spelling",
        _constant(AS_THE_BASE_MODEL),
    ),
    "changes are scaled by the wrong slot": Mutation(
        "llama", "DoRA", slot_changes, "_scale", _next_slot
    ),
    "a step forgets the slots with changes": Mutation(
        "llama", "DoRA", slot_changes, "select_changed", _constant(None)
    ),
}


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Laboratory]:
    made: dict[str, Laboratory] = {}

    def get(name: str) -> Laboratory:
        if name not in made:
            features = {item.feature for item in MUTATIONS.values() if item.architecture == name}
            root = tmp_path_factory.mktemp("mutations")
            made[name] = Laboratory(name, root, features | {"plain", "all-linear"})
        return made[name]

    return get


def check(lab: Laboratory, feature: str) -> None:
    """A short form of the cell; it reads the adapter anew."""
    if feature.startswith("aLoRA"):
        lab.forget(feature)
        found, wanted = lab.prompt_logprobs(feature, PROMPT)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert_close(lab.logits(feature, PROMPT)[2], lab.truth(feature, PROMPT))


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_broken_rule_makes_a_cell_fail(
    laboratory: Callable[[str], Laboratory], mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = laboratory(mutation.architecture)
    check(lab, mutation.feature)
    original = getattr(mutation.place, mutation.name)
    monkeypatch.setattr(mutation.place, mutation.name, mutation.broken(original))
    with pytest.raises((AssertionError, AdapterError)):
        check(lab, mutation.feature)
