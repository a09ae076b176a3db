"""Which tokens are scaled together, and that no other token is touched."""

import torch
from torch import nn

from engine.lora.batch import build_lora_batch
from engine.lora.change_batch import ChangeBatch, select_changed
from engine.lora.module_change import ModuleChange
from engine.lora.slot_changes import SlotChanges
from engine.lora.targets import LoRATarget, ModelTargets
from engine.models.context import LoRAScope

MAX_LORAS = 4


def select(runs: list[tuple[int, int | None]], changed: set[int]) -> ChangeBatch | None:
    batch = build_lora_batch(runs, [8] * MAX_LORAS)
    assert batch is not None
    return select_changed(batch, changed, MAX_LORAS)


def test_a_step_without_changed_slots_needs_nothing() -> None:
    assert select([(3, 0), (1, None), (2, 1)], {2}) is None


def test_one_run_is_scaled_by_its_slot_alone() -> None:
    batch = select([(3, 0), (1, None), (2, 1)], {1})
    assert batch is not None
    assert batch.runs == batch.spans == ((4, 6, 1),)


def test_tokens_between_two_runs_are_scaled_by_the_neutral_place() -> None:
    batch = select([(1, 0), (2, 3), (1, None), (1, 1), (2, 0)], {1, 3})
    assert batch is not None
    assert batch.runs == ((1, 3, 3), (4, 5, 1))
    ((start, stop, places),) = batch.spans
    assert isinstance(places, torch.Tensor)
    assert (start, stop, places.tolist()) == (1, 5, [3, 3, MAX_LORAS, 1])


def test_long_runs_are_scaled_one_by_one() -> None:
    batch = select([(100, 0), (50, None), (100, 1)], {0, 1})
    assert batch is not None
    assert batch.spans == ((0, 100, 0), (150, 250, 1))


def test_neighbours_of_scaled_tokens_keep_every_bit() -> None:
    targets = ModelTargets({"q": LoRATarget("q", 2, 3)})
    changes = SlotChanges(nn.Module(), targets, MAX_LORAS, torch.device("cpu"), lambda _: scope)
    scope = LoRAScope()
    for slot in (1, 3):
        scale = torch.full((3,), slot + 0.5)
        changes.write_slot(slot, {"q": ModuleChange(scale=scale, shift=scale + 1)})
    lora = build_lora_batch([(1, None), (1, 1), (1, 0), (1, None), (1, 3)], [8] * MAX_LORAS)
    assert lora is not None
    batch = changes.select(lora)
    assert batch is not None
    out = torch.tensor([[-0.0, 1.0, 0.3]]).repeat(5, 1).bfloat16()
    before = out.clone()

    changes.apply_to_linears(["q"], torch.zeros(5, 2), [out], batch)

    for row in (0, 2, 3):
        assert torch.equal(out[row].view(torch.int16), before[row].view(torch.int16))
    for row, scale in ((1, 1.5), (4, 3.5)):
        assert torch.equal(out[row], (before[row].float() * scale + scale + 1).bfloat16())

    changes.clear_slot(1)
    out = before.clone()
    changes.apply_to_linears(["q"], torch.zeros(5, 2), [out], batch)
    assert torch.equal(out[:4].view(torch.int16), before[:4].view(torch.int16))
