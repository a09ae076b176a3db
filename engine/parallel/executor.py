"""Runs steps on several devices at once: this process is rank 0, the others are its workers.

Every rank is told of every step and of every change of a slot, in one order, before rank 0 does
the same; so all make the same exchanges. Only rank 0 knows requests, reads adapters and samples.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C._distributed_c10d import TCPStore

from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.executor import LocalExecutor
from engine.lora.adapter import LoRAAdapter
from engine.lora.targets import ModelTargets
from engine.models.loader import resolve_device
from engine.models.registry import model_class, read_config
from engine.models.spec import ModelSpec
from engine.parallel.adapter_shards import shard_adapter
from engine.parallel.group import TensorParallelGroup
from engine.parallel.sharding import check_split
from engine.parallel.wire import AllocateCache, ClearSlot, Start, WriteSlot
from engine.parallel.workers import Workers
from engine.step_batch import StepBatch


class ParallelExecutor:
    """One model on ``tensor_parallel_size`` devices of this machine.

    Raises UnsupportedModelError before any process is started when the model cannot be split
    exactly, and EngineDeadError whenever a rank is gone.
    """

    def __init__(self, config: EngineConfig) -> None:
        hf_config = read_config(config.model)
        check_split(model_class(hf_config).__name__, hf_config, config.tensor_parallel_size)
        self._tp_size = config.tensor_parallel_size
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers = Workers(
            [Start(config, tp_rank, store.port) for tp_rank in range(1, self._tp_size)]
        )
        try:
            self._workers.wait_until_ready()
            with self._failures_explained():
                device = resolve_device(config.device)
                self._group = TensorParallelGroup.join(store, 0, self._tp_size, device)
                self.on_death(lambda: None)
                self._local = LocalExecutor(config, group=self._group)
        except BaseException:
            self._workers.close()
            raise

    @property
    def spec(self) -> ModelSpec:
        return self._local.spec

    @property
    def targets(self) -> ModelTargets:
        return self._local.targets

    def base_weight(self, name: str, parameter: str = "weight") -> torch.Tensor | None:
        return self._local.base_weight(name, parameter)

    def num_blocks_that_fit(self) -> int:
        return self._local.num_blocks_that_fit()

    def allocate_cache(self, num_blocks: int) -> None:
        self._workers.tell_all(AllocateCache(num_blocks))
        self._local.allocate_cache(num_blocks)

    @property
    def upload(self) -> None:
        """Every rank is sent its part when a slot is written."""

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        plan = self._local.shard_plan
        assert plan is not None
        self._workers.tell(
            [
                WriteSlot.of(slot, shard_adapter(adapter, plan, tp_rank, self._tp_size))
                for tp_rank in range(1, self._tp_size)
            ]
        )
        self._local.write_slot(slot, shard_adapter(adapter, plan, 0, self._tp_size))

    def clear_slot(self, slot: int) -> None:
        self._workers.tell_all(ClearSlot(slot))
        self._local.clear_slot(slot)

    def execute(self, step: StepBatch) -> torch.Tensor:
        self._workers.tell_all(step)
        with self._failures_explained():
            return self._local.execute(step)

    def hidden(self) -> torch.Tensor:
        return self._local.hidden()

    def on_death(self, callback: Callable[[], None]) -> None:
        group = self._group

        def died() -> None:
            # On a GPU, rank 0 would wait for the rank for ever.
            group.abort()
            callback()

        self._workers.on_death(died)

    def check(self) -> None:
        self._workers.check()

    def close(self) -> None:
        self._workers.close()

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Say that a rank is gone where an exchange with it has failed."""
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            raise self._workers.explained(error) from error
