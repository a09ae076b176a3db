"""Runs steps on one device: arrays in, logits out.

Knows how a step's arrays become tensors. Knows nothing of requests, scheduling or other devices.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from engine.config import EngineConfig
from engine.graphs import CudaRecorder, GraphPlan, GraphRunner, Recorder, StaticInputs
from engine.lora.adapter import LoRAAdapter
from engine.lora.batch import build_lora_batch
from engine.lora.targets import ModelTargets
from engine.lora.uploader import AdapterUploader, keep_for_current_stream
from engine.models.paged_model import PagedModel
from engine.models.spec import ModelSpec
from engine.parallel.group import TensorParallelGroup
from engine.parallel.sharding import ShardPlan
from engine.step_batch import LoRARuns, StepBatch
from engine.warm_up import WarmUp, warm_up_steps
from kernels.metadata import AttentionBatch, LoRABatch


class ModelExecutor(Protocol):
    """A model on one device or several. Used by one thread, but for ``base_weight``."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def targets(self) -> ModelTargets: ...

    def base_weight(self, name: str, parameter: str = "weight") -> torch.Tensor | None:
        """Return a whole weight or bias of the base model, None without one."""

    def num_blocks_that_fit(self) -> int:
        """Return how many KV blocks the cache settings allow."""

    def allocate_cache(self, num_blocks: int) -> None:
        """Allocate the KV cache of every layer."""

    @property
    def upload(self) -> Callable[[LoRAAdapter], LoRAAdapter] | None:
        """Brings an adapter to where `write_slot` takes it at once, on any thread; None if any is.

        It may take long, and no step waits for it.
        """

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        """Make `slot` mean `adapter`; no running step may use the slot."""

    def clear_slot(self, slot: int) -> None:
        """Make `slot` mean no adapter."""

    def execute(self, step: StepBatch) -> torch.Tensor:
        """Run one step and return the logits [R, vocab] float32 of the chosen tokens."""

    def hidden(self) -> torch.Tensor:
        """Return the final hidden states [H, hidden] float32 that the last step asked for."""

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call this, on any thread, when a step can no longer be run."""

    def check(self) -> None:
        """Raise EngineDeadError when no step can be run any more."""

    def close(self) -> None:
        """Give up what is held outside of this process."""


class LocalExecutor:
    """A model, or one rank's part of it, on one device.

    On a GPU every kernel is compiled before the first request, and decode steps are recorded unless
    the model is split or ``enforce_eager`` says not to.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        group: TensorParallelGroup | None = None,
        recorder: Recorder | None = None,
        uploader: AdapterUploader | None = None,
    ) -> None:
        self._config = config
        self._model = PagedModel(config, group=group)
        self._device = self._model.spec.device
        if self._device.type == "cuda" and group is None and not config.enforce_eager:
            recorder = recorder or CudaRecorder(self._device)
        self._recorder = recorder
        self._graphs: GraphRunner | None = None
        self._uploader = uploader
        if self._device.type == "cuda" and group is None and config.lora is not None:
            self._uploader = uploader or AdapterUploader(self._device)
        self._hidden: torch.Tensor | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def targets(self) -> ModelTargets:
        return self._model.targets

    @property
    def shard_plan(self) -> ShardPlan | None:
        """How the model is split among ranks, None when it is not."""
        return self._model.shard_plan

    def base_weight(self, name: str, parameter: str = "weight") -> torch.Tensor | None:
        return self._model.base_weight(name, parameter)

    def num_blocks_that_fit(self) -> int:
        return self._model.num_blocks_that_fit()

    def allocate_cache(self, num_blocks: int) -> None:
        self._model.allocate_cache(num_blocks)
        if self._device.type == "cuda":
            self._warm_up()
        if self._recorder is not None:
            self._graphs = self._record(self._recorder)

    @property
    def upload(self) -> Callable[[LoRAAdapter], LoRAAdapter] | None:
        return None if self._uploader is None else self._uploader.upload

    def write_slot(self, slot: int, adapter: LoRAAdapter) -> None:
        self._model.write_slot(slot, adapter)
        keep_for_current_stream(adapter)

    def clear_slot(self, slot: int) -> None:
        self._model.clear_slot(slot)

    def execute(self, step: StepBatch) -> torch.Tensor:
        # What is recorded gives no hidden states.
        graphs = None if len(step.hidden_rows) else self._graphs
        if graphs is not None and (logits := graphs.run(step)) is not None:
            return logits
        upload = self._to_device
        attention = AttentionBatch(
            query_starts=upload(step.query_starts),
            context_lens=upload(step.context_lens),
            block_tables=upload(step.block_tables),
            slot_mapping=upload(step.slot_mapping),
            num_decodes=step.num_decodes,
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
        )
        logits = self._model.forward(
            upload(step.token_ids),
            upload(step.positions),
            attention=attention,
            lora=self._lora(step.lora_runs),
            logits_rows=upload(step.logits_rows),
            logits_lora=self._lora(step.logits_lora_runs),
        )
        self._hidden = None
        if len(step.hidden_rows):
            slots = self._lora(step.hidden_lora_runs)
            self._hidden = self._model.hidden(upload(step.hidden_rows), slots)
        return logits

    def hidden(self) -> torch.Tensor:
        assert self._hidden is not None, "the last step asked for none"
        return self._hidden

    def on_death(self, callback: Callable[[], None]) -> None:
        """It ends with this process."""

    def check(self) -> None:
        """It can run as long as this process."""

    def close(self) -> None:
        """Nothing is held outside of this process."""

    def _warm_up(self) -> None:
        config = self._config
        self._model.fix_slots()
        run = WarmUp(self._model, config.cache.block_size).run
        max_tokens = config.scheduler.max_num_batched_tokens
        for step in warm_up_steps(max_tokens, self.spec.max_model_len, self._max_rank):
            run(step)

    @property
    def _max_rank(self) -> int:
        return 0 if self._config.lora is None else self._config.lora.max_lora_rank

    def _record(self, recorder: Recorder) -> GraphRunner:
        config, spec = self._config, self._model.spec
        max_loras = 0 if config.lora is None else config.lora.max_loras
        plan = GraphPlan(config.scheduler.max_num_seqs, max_loras)
        max_blocks = -(-spec.max_model_len // config.cache.block_size)
        self._model.fix_slots()
        graphs = GraphRunner(
            self._model, plan, StaticInputs(plan, max_blocks, self._max_rank, self._device)
        )
        graphs.record_all(recorder)
        return graphs

    def _lora(self, runs: LoRARuns) -> LoRABatch | None:
        return build_lora_batch(runs, self._model.slot_ranks, self._device) if runs else None

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
