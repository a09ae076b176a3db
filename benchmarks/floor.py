"""The floor of a decode step: bytes that it must read over the measured read bandwidth."""

import json
import math
import time
from pathlib import Path

import torch
from safetensors import safe_open

_DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def read_bandwidth() -> float:
    """Bytes a second of reading memory that is in no cache: the fastest of several passes."""
    values = torch.ones(256 << 20, dtype=torch.int8).view(torch.int64)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - start)
    return values.nbytes / min(times)


def weight_bytes(model: Path) -> int:
    """Bytes of a checkpoint's weights. A tied embedding is there once, and read by the head."""
    total = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in list(file.keys()):
                tensor = file.get_slice(name)
                total += math.prod(tensor.get_shape()) * _DTYPE_BYTES[tensor.get_dtype()]
    return total


def kv_bytes(model: Path, batch: int, context: int) -> int:
    """Bytes of keys and values that one decode step reads from a 16-bit cache."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return int(per_token) * batch * context
