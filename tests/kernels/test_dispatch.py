"""Which implementation an op runs, and what it refuses before running one."""

import subprocess
import sys

import pytest
import torch

from kernels import backend, ops, torch_ops
from kernels.metadata import KVScales
from tests.kernels.cases import AttentionInputs, attention_inputs, lora_inputs


def test_cpu_without_the_extension_runs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_cpu_extension_is_built", lambda: False)
    chosen = backend.implementation.__wrapped__("paged_decode", "cpu", None)
    assert chosen is torch_ops.paged_decode


@pytest.mark.parametrize("op", ["store_kv", "paged_decode", "paged_prefill", "lora_shrink"])
def test_gpu_tensors_run_triton(op: str) -> None:
    assert backend.implementation(op, "cuda", None) is not getattr(torch_ops, op)


def test_gpu_ops_without_a_triton_version_run_torch() -> None:
    assert backend.implementation("linear", "cuda", None) is torch_ops.linear


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        ops.silu_and_mul(torch.ones(1, 1), torch.ones(1, 1), backend="cuda")  # type: ignore[arg-type]


def test_backend_without_the_op_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot run linear"):
        ops.linear(torch.ones(1, 1), torch.ones(1, 1), backend="triton")


def test_a_cpu_samples_with_torch() -> None:
    assert backend.implementation("sample_tokens", "cpu", None) is torch_ops.sample_tokens


def test_caches_and_scales_come_together() -> None:
    kv = torch.zeros(1, 1, 4)
    cache = torch.zeros(2, 4, 1, 4)
    scales = KVScales(torch.zeros(2, 4, 1), torch.zeros(2, 4, 1))
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="with scales=True"):
        ops.store_kv(kv, kv, cache, cache, slots, scales=scales)
    codes = cache.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="with scales=False"):
        ops.store_kv(kv, kv, codes, codes, slots)
    with pytest.raises(ValueError, match="do not fit"):
        narrow = KVScales(scales.key, scales.value[:, :2])
        ops.store_kv(kv, kv, codes, codes, slots, scales=narrow)


def test_importing_the_ops_imports_neither_triton_nor_the_extension() -> None:
    code = "import sys, kernels.ops; assert not {'triton', 'kernels.cpu'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def decode(inputs: AttentionInputs, query: torch.Tensor, window: int | None = None) -> None:
    ops.paged_decode(
        query, inputs.key_cache, inputs.value_cache, inputs.batch, scale=1.0, window=window
    )


def test_attention_refuses_what_does_not_fit() -> None:
    inputs = attention_inputs([3, 4])
    with pytest.raises(ValueError, match="1 query rows for 2 decodes"):
        decode(inputs, inputs.query[:1])
    with pytest.raises(ValueError, match="do not fit"):
        decode(inputs, inputs.query[:, :3])
    with pytest.raises(ValueError, match="do not fit"):
        decode(inputs, inputs.query[..., :16])
    with pytest.raises(ValueError, match="window must be at least 1"):
        decode(inputs, inputs.query, window=0)


def test_store_refuses_a_mapping_of_another_length() -> None:
    kv = torch.zeros(2, 1, 4)
    cache = torch.zeros(2, 4, 1, 4)
    with pytest.raises(ValueError, match="do not fit"):
        ops.store_kv(kv, kv, cache, cache, torch.zeros(3, dtype=torch.int64))


def test_lora_refuses_what_does_not_fit() -> None:
    inputs = lora_inputs([(0, 2)], [[4], [4]])
    with pytest.raises(ValueError, match="do not fit"):
        ops.lora_shrink(inputs.x[:1], inputs.lora_a, inputs.ranks, inputs.batch)
    with pytest.raises(ValueError, match="2 projections, 1 lora_b tensors"):
        ops.lora_apply(
            inputs.x, inputs.lora_a, inputs.lora_b[:1], inputs.ranks, inputs.batch, inputs.ys
        )
    with pytest.raises(ValueError, match="do not fit"):
        ops.lora_apply(
            inputs.x, inputs.lora_a, inputs.lora_b, inputs.ranks, inputs.batch, inputs.ys[::-1]
        )
