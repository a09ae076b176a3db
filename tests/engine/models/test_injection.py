"""Every class that the engine replaces by its own layer computes the same as that layer."""

import importlib

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from engine.models.injection import GATED_MLPS, RMS_NORMS, inject_kernels
from engine.models.layers import GatedMLP, KernelLinear, KernelRMSNorm

WIDTH = 48


def class_at(path: str) -> type[nn.Module]:
    module, _, name = path.rpartition(".")
    cls: type[nn.Module] = getattr(importlib.import_module(module), name)
    return cls


def replaced(original: nn.Module) -> nn.Module:
    parent = nn.ModuleDict({"child": original})
    inject_kernels(parent)
    return parent["child"]


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("path", sorted(RMS_NORMS))
def test_rms_norm_equals_the_original(path: str) -> None:
    original = randomised(class_at(path)(WIDTH, eps=1e-3))
    x = torch.randn(1, 5, WIDTH)
    replacement = replaced(original)
    assert isinstance(replacement, KernelRMSNorm)
    torch.testing.assert_close(replacement(x), original(x))


@pytest.mark.parametrize("path", sorted(GATED_MLPS))
def test_gated_mlp_equals_the_original(path: str) -> None:
    family = path.split(".")[2]
    config = AutoConfig.for_model(
        family, hidden_size=WIDTH, intermediate_size=88, num_attention_heads=4
    )
    original = randomised(class_at(path)(config))
    x = torch.randn(1, 5, WIDTH)
    with torch.no_grad():
        expected = original(x)
    replacement = replaced(original)
    assert isinstance(replacement, GatedMLP)
    torch.testing.assert_close(replacement(x), expected, rtol=1e-4, atol=1e-3)


def test_mlp_with_another_activation_stays() -> None:
    config = AutoConfig.for_model(
        "llama", hidden_size=WIDTH, num_attention_heads=4, hidden_act="gelu"
    )
    original = class_at("transformers.models.llama.modeling_llama.LlamaMLP")(config)
    assert replaced(original) is original


def test_norm_that_is_not_known_to_be_equivalent_stays() -> None:
    original = class_at("transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm")(WIDTH)
    assert replaced(original) is original


@pytest.mark.parametrize("original", [nn.Linear(7, 5), nn.Linear(7, 5, bias=False), Conv1D(5, 7)])
def test_linear_equals_the_original(original: nn.Module) -> None:
    randomised(original)
    x = torch.randn(1, 3, 7)
    replacement = replaced(original)
    assert isinstance(replacement, KernelLinear)
    torch.testing.assert_close(replacement(x), original(x).detach())


def test_subclass_of_linear_stays() -> None:
    class Scaled(nn.Linear):
        pass

    original = Scaled(7, 5)
    assert replaced(original) is original
