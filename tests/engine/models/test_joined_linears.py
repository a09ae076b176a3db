"""Linears that share an input as one product, as on a GPU: what each of them computes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.models import layers
from engine.models.layers import KernelLinear, LinearGroup
from kernels import backend
from tests.engine.models.test_fused_layers import SLOTS, load, logits_of, use_loop
from tests.tiny_models import MakeModel


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Join linears on this device, whose extension does not take parts of a wider tensor."""
    monkeypatch.setattr(layers, "_are_joined", lambda members: True)
    monkeypatch.setattr(backend, "_cpu_extension_is_built", lambda: False)
    # It remembers its choices.
    backend.implementation.cache_clear()
    yield
    backend.implementation.cache_clear()


@pytest.mark.parametrize("has_bias", [[False] * 3, [True] * 3, [True, False, True]], ids=str)
def test_a_group_is_its_members(joined: None, has_bias: list[bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    members = [
        KernelLinear(
            torch.randn(size, 24, generator=generator),
            torch.randn(size, generator=generator) if bias else None,
        )
        for size, bias in zip((16, 5, 5), has_bias, strict=True)
    ]
    rows = torch.randn(7, 24, generator=generator)
    expected = [member.project(rows) for member in members]
    found = LinearGroup(members).project(rows)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    # No weight is held twice, and each is still found under its own name.
    storages = {member.weight.untyped_storage().data_ptr() for member in members}
    assert len(storages) == 1
    for member, other in zip(members, expected, strict=True):
        torch.testing.assert_close(member.project(rows), other)


@pytest.mark.parametrize("with_adapters", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_model_of_joined_linears_is_the_model(
    make_model: MakeModel,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    model_type: str,
    *,
    with_adapters: bool,
) -> None:
    path = make_model(model_type)
    slots = SLOTS if with_adapters else None
    apart = load(path, tmp_path / "apart", with_adapters=with_adapters)
    use_loop(apart)
    expected = logits_of(apart, slots)
    request.getfixturevalue("joined")
    model = load(path, tmp_path / "joined", with_adapters=with_adapters)
    use_loop(model)
    found = logits_of(model, slots)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
