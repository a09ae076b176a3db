"""Architecture by feature: served exactly as PEFT computes it, or refused with the reason."""

import os
import re
from collections.abc import Callable

import pytest
import torch

from tests.engine.matrix import page
from tests.engine.matrix.architectures import ARCHITECTURES
from tests.engine.matrix.features import FEATURES
from tests.engine.matrix.laboratory import NUM_STEPS, PROMPT, Laboratory, load, run_mixed
from tests.engine.models.paged_sequences import load_paged
from tests.engine.oracle import TIE

GetLaboratory = Callable[[str], Laboratory]

CELLS = [
    (architecture, feature)
    for architecture, arch in ARCHITECTURES.items()
    for feature, row in FEATURES.items()
    if row.lacks(arch) is None and (row.with_rope or not arch.rope_only)
]
RELATIVE = 1e-4


def assert_greedy(tokens: list[int], truth: torch.Tensor) -> None:
    """Each token is the most likely one after those before it, which makes it PEFT's choice too."""
    assert len(tokens) == NUM_STEPS
    choices = truth[len(PROMPT) - 1 : -1]
    taken = choices.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    wrong = (choices.max(dim=1).values - taken > TIE * choices.abs().max()).nonzero().flatten()
    assert not wrong.numel(), f"another token than PEFT's at steps {wrong.tolist()}"


def assert_close(logits: torch.Tensor, truth: torch.Tensor) -> None:
    error = float((logits - truth).abs().max() / truth.abs().max())
    assert error <= RELATIVE, f"relative error {error:.1e}"


# What the cells of this run found, for the page.
passed: set[tuple[str, str]] = set()
refusals: dict[tuple[str, str], str] = {}


def test_there_are_enough_cells() -> None:
    assert len(CELLS) >= 150


@pytest.mark.parametrize(("architecture", "feature"), CELLS, ids=[f"{a}: {f}" for a, f in CELLS])
def test_cell(laboratory: GetLaboratory, architecture: str, feature: str) -> None:
    lab = laboratory(architecture)
    expected = FEATURES[feature].refused
    if expected is not None:
        assert re.search(expected, lab.refusals.get(feature, "it was served"))
        refusals[architecture, feature] = lab.refusals[feature]
    else:
        assert feature not in lab.refusals, lab.refusals[feature]
        check_served(lab, feature)
    passed.add((architecture, feature))


def check_served(lab: Laboratory, feature: str) -> None:
    """The engine's tokens and logits with the adapter are PEFT's."""
    tokens = lab.mixed(feature)
    truth = lab.truth(feature, PROMPT + tokens)
    base_truth = lab.truth(None, PROMPT + tokens)
    assert (truth - base_truth).abs().max() > 0.05 * base_truth.abs().max(), "changes too little"
    assert_greedy(tokens, truth)
    assert lab.alone(feature) == tokens
    found, wanted = lab.prompt_logprobs(feature, PROMPT + tokens)
    torch.testing.assert_close(found, wanted, rtol=RELATIVE, atol=RELATIVE)
    if feature.startswith("aLoRA"):
        return  # below, whole sequences run with one slot
    base, _, logits, _ = lab.logits(feature, PROMPT + tokens)
    assert_close(logits, truth)
    assert_close(base, base_truth)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_base_beside_every_adapter_is_bit_identical_to_an_engine_without_lora(
    laboratory: GetLaboratory, architecture: str
) -> None:
    lab = laboratory(architecture)
    tokens = PROMPT + lab.mixed(None)
    plain = run_mixed(load_paged(lab.checkpoint), tokens, None)
    for start in range(0, len(lab.served), 3):
        for slot, name in enumerate(lab.served[start : start + 3]):
            request = lab.request(name)
            assert request is not None
            lab.model.write_slot(slot, load(lab.model, request))
        # Experts multiply the tokens routed to them, so what others' adapters route there changes
        # the shape of a product and with it the rounding: there, the adapters stay in their slots.
        slots = {} if lab.has_experts else {1: 0, 2: 1, 3: 2}
        beside = run_mixed(lab.model, tokens, slots)
        assert torch.equal(beside[0], plain[0]), lab.served[start : start + 3]


def test_the_page_says_what_the_cells_found() -> None:
    if passed != set(CELLS):
        pytest.skip("needs every cell to have run and passed")
    found = page.render(refusals)
    if os.environ.get("LORAFLEET_WRITE_PAGES"):
        page.PATH.write_text(found)
    assert page.PATH.read_text() == found, "run with LORAFLEET_WRITE_PAGES=1 and review the change"
