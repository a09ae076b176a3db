"""Several ranks of one model as threads of this process, behind the interface of a whole model."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from engine.config import CacheConfig, EngineConfig, LoRAConfig
from engine.lora.adapter import LoRAAdapter
from engine.models.paged_model import PagedModel
from engine.parallel.adapter_shards import shard_adapter
from engine.parallel.group import TensorParallelGroup
from engine.parallel.wire import WriteSlot
from tests.engine.models.paged_sequences import BLOCK_SIZE, NUM_BLOCKS

T = TypeVar("T")

_numbers = count()


class ThreadedRanks:
    """What a test may ask of a `PagedModel`, asked of every rank at once."""

    def __init__(
        self, path: Path, tp_size: int, *, fuse: bool = True, lora: LoRAConfig | None = None
    ) -> None:
        cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        config = EngineConfig(model=path, lora=lora, device="cpu", cache=cache)
        store = distributed.PrefixStore(str(next(_numbers)), distributed.HashStore())
        self._threads = ThreadPoolExecutor(tp_size)
        self._tp_size = tp_size

        def build(tp_rank: int) -> PagedModel:
            device = torch.device("cpu")
            group = TensorParallelGroup.join(store, tp_rank, tp_size, device)
            return PagedModel(config, fuse=fuse, group=group)

        self.ranks = self._on_all(build)
        self._on_all(lambda tp_rank: self.ranks[tp_rank].allocate_cache(NUM_BLOCKS))
        self.spec = self.ranks[0].spec
        self.targets = self.ranks[0].targets
        self.base_weight = self.ranks[0].base_weight

    @property
    def slot_ranks(self) -> Sequence[int]:
        return self.ranks[0].slot_ranks

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        plan = self.ranks[0].shard_plan
        assert plan is not None
        for tp_rank, model in enumerate(self.ranks):
            part = shard_adapter(adapter, plan, tp_rank, self._tp_size)
            model.write_slot(slot, WriteSlot.of(slot, part).adapter())

    def clear_slot(self, slot: int) -> None:
        for model in self.ranks:
            model.clear_slot(slot)

    def forward(self, *args: Any) -> torch.Tensor:
        """Run a step on every rank; all get the same logits."""
        first, *others = self._on_all(lambda tp_rank: self.ranks[tp_rank].forward(*args))
        assert all(torch.equal(first, other) for other in others)
        return first

    def close(self) -> None:
        self._threads.shutdown()

    def _on_all(self, function: Callable[[int], T]) -> list[T]:
        return list(self._threads.map(function, range(self._tp_size)))
