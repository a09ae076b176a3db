"""The floor of a step: what it must read and multiply, over the rates measured in the same run."""

import functools
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_READ_BYTES = 256 << 20
_MATRIX_SIZE = 1024
_PASSES = 9


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does at best: bytes a second read, operations a second in bf16 products."""

    read_bytes_per_s: float
    matmul_flops_per_s: float

    @staticmethod
    def fastest(many: "Sequence[Rates]") -> "Rates":
        """The best of each."""
        return Rates(
            max(rates.read_bytes_per_s for rates in many),
            max(rates.matmul_flops_per_s for rates in many),
        )


@dataclass(frozen=True, slots=True)
class Floor:
    """What one step has to read and multiply at least."""

    num_bytes: int
    flops: int

    def seconds(self, rates: Rates) -> float:
        """The least time, at the slower of the two."""
        return max(self.num_bytes / rates.read_bytes_per_s, self.flops / rates.matmul_flops_per_s)

    @staticmethod
    def of_step(model: Path, batch: int, context: int, num_adapters: int, rank: int) -> "Floor":
        """A decode step with adapters on q and v."""
        per_adapter = 2 * rank * _lora_width(model)
        num_bytes = weight_bytes(model) + kv_bytes(model, batch, context)
        weights = weight_bytes(model) // 2
        return Floor(num_bytes + num_adapters * per_adapter, 2 * batch * weights)


def measure_rates(threads: int) -> Rates:
    """The fastest of several passes over memory that is in no cache, and of several products."""
    with torch_threads(threads):
        values = _buffer()
        sums = values.view(torch.int64)
        floats = values.view(torch.float32)
        read_s = min(
            _time(function) for _ in range(_PASSES) for function in (sums.sum, floats.amax)
        )
        left = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16)
        matmul_s = min(_time(lambda: torch.mm(left, left)) for _ in range(_PASSES))
    return Rates(_READ_BYTES / read_s, 2 * _MATRIX_SIZE**3 / matmul_s)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Give torch so many threads for a while: an engine leaves it one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def weight_bytes(model: Path) -> int:
    """Bytes of a checkpoint's weights. A tied embedding is there once, and read by the head."""
    return sum(math.prod(shape) * _DTYPE_BYTES[dtype] for _, shape, dtype in _tensors(model))


def kv_bytes(model: Path, batch: int, context: int) -> int:
    """Bytes of keys and values that one decode step reads from a 16-bit cache."""
    config = _config(model)
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    return int(per_token * _head_dim(config)) * batch * context


def prefill_flops(model: Path, num_tokens: int) -> int:
    """Operations of a prompt: all linears, causal attention, and the head for the last token."""
    config = _config(model)
    linears = sum(
        math.prod(shape)
        for name, shape, _ in _tensors(model)
        if len(shape) == 2 and ".layers." in name
    )
    head = config["vocab_size"] * config["hidden_size"]
    width = config["num_hidden_layers"] * config["num_attention_heads"] * _head_dim(config)
    # A token sees half of the prompt on average; scores and their sums of values.
    attention = 2 * width * num_tokens * (num_tokens + 1) // 2
    return int(2 * (linears * num_tokens + head + attention))


def _lora_width(model: Path) -> int:
    """Values of rank 1 of an adapter on q and v."""
    return sum(
        sum(shape)
        for name, shape, _ in _tensors(model)
        if name.endswith(("q_proj.weight", "v_proj.weight"))
    )


@functools.cache
def _tensors(model: Path) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    found = []
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                tensor = file.get_slice(name)
                found.append((name, tuple(tensor.get_shape()), tensor.get_dtype()))
    return tuple(found)


@functools.cache
def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


@functools.cache
def _buffer() -> torch.Tensor:
    return torch.zeros(_READ_BYTES, dtype=torch.int8).fill_(1)


def _time(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
