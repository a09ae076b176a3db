"""What rank 0 tells the other ranks, as bytes.

Knows how tensors are put into bytes: torch's own pickling writes a buffer once for each view of it.
Both ends are one program, and nobody else has the connection.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.lora.adapter import AdapterInfo, LoRAAdapter, allocate_modules
from engine.lora.module_change import ModuleChange
from engine.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: which rank of what to be, and where to meet the others."""

    config: EngineConfig
    tp_rank: int
    store_port: int


@dataclass(frozen=True, slots=True)
class AllocateCache:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ClearSlot:
    slot: int


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Its bytes, since numpy does not know every dtype."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class WriteSlot:
    """One rank's part of an adapter; ``shapes`` are those of its modules in the buffer."""

    slot: int
    info: AdapterInfo
    invocation: tuple[int, ...]
    buffer: PackedTensor
    shapes: Mapping[str, tuple[int, int, int]]
    changes: Mapping[str, Mapping[str, PackedTensor]]

    @classmethod
    def of(cls, slot: int, adapter: LoRAAdapter) -> "WriteSlot":
        """Pack an adapter whose buffer `allocate_modules` made."""
        return cls(
            slot=slot,
            info=adapter.info,
            invocation=adapter.invocation,
            buffer=_pack(adapter.buffer),
            shapes={
                name: (module.rank, module.lora_a.shape[1], module.lora_b.shape[1])
                for name, module in adapter.modules.items()
            },
            changes={
                name: {field: _pack(values) for field, values in change.tensors.items()}
                for name, change in adapter.changes.items()
            },
        )

    def adapter(self) -> LoRAAdapter:
        """Unpack."""
        buffer, modules = allocate_modules(self.shapes, self.buffer.dtype)
        buffer.copy_(_unpack(self.buffer))
        changes = {
            name: ModuleChange(**{field: _unpack(values) for field, values in parts.items()})
            for name, parts in self.changes.items()
        }
        return LoRAAdapter(self.info, buffer, modules, changes, self.invocation)


Message = Start | AllocateCache | ClearSlot | WriteSlot | StepBatch


def send(connection: Connection, message: Message) -> None:
    """Raises OSError when the other end is gone."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Return the next message. Raises EOFError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())


def _pack(values: torch.Tensor) -> PackedTensor:
    data = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return PackedTensor(values.dtype, tuple(values.shape), data)


def _unpack(packed: PackedTensor) -> torch.Tensor:
    if not packed.data.size:
        return torch.empty(packed.shape, dtype=packed.dtype)
    return torch.from_numpy(packed.data).view(packed.dtype).view(packed.shape)
