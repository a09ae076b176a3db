"""The synchronous engine: requests in, one step at a time, outputs out.

Knows how scheduler, runner, adapters and text fit together. Knows nothing of threads (one thread
owns it) or of adapters' names: it tells adapters apart by digest.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor

from transformers import PreTrainedTokenizerFast

from adapters import LoRARequest
from engine.adapter_set import AdapterSet
from engine.cache.block_table import KVCacheManager
from engine.config import EngineConfig
from engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from engine.executor import LocalExecutor, ModelExecutor
from engine.grammar import Grammar, GrammarCompiler
from engine.lora.adapter_tokenizer import BaseTokenizer
from engine.model_runner import ModelRunner
from engine.output_processor import OutputProcessor
from engine.outputs import FinishReason, RequestOutput, SchedulerOutput
from engine.parallel.executor import ParallelExecutor
from engine.request import DEFAULT_TERMS, Request, Terms
from engine.sampler import SamplingState
from engine.sampling_params import SamplingParams
from engine.scheduler import RequestKey, Scheduler
from engine.stats import EngineStats
from engine.tokenizer import eos_token_ids, load_tokenizer
from kernels.threads import set_num_threads


class Engine:
    """One base model and its adapters behind continuous batching.

    ``adapters`` is None for an engine without LoRA. Loads of adapters run on ``executor``; a step
    never waits for one.
    """

    tokenizer: PreTrainedTokenizerFast
    adapters: AdapterSet | None

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        set_num_threads(config.num_threads)
        self._config = config
        self._executor = _open_executor(config)
        try:
            self._assemble(executor)
        except BaseException:
            self._executor.close()
            raise

    def _assemble(self, executor: Executor) -> None:
        config, spec = self._config, self._executor.spec
        self.max_model_len = spec.max_model_len
        self.vocab_size = spec.vocab_size
        self.tokenizer = load_tokenizer(config.model)
        self.eos_token_ids = eos_token_ids(config.model, spec.hf_config, self.tokenizer)
        self.grammars = GrammarCompiler(self.tokenizer, spec.vocab_size, self.eos_token_ids)
        self._kv = self._allocate_kv()
        self.adapters = None
        if config.lora is not None:
            tokenizer = BaseTokenizer(self.tokenizer.backend_tokenizer, config.model)
            self.adapters = AdapterSet(self._executor, config.lora, self._kv, executor, tokenizer)
        self._scheduler = Scheduler(
            config.scheduler,
            self._kv,
            None if self.adapters is None else self.adapters.slots,
            max_model_len=spec.max_model_len,
            adapter_ready=self._is_adapter_ready,
            adapter_start=self._adapter_start,
        )
        block_size = config.cache.block_size
        self._runner = ModelRunner(self._executor, block_size)
        self._outputs = OutputProcessor(
            self.tokenizer.backend_tokenizer, self.eos_token_ids, spec.max_model_len
        )
        self._rng = random.Random(config.seed)
        self._requests: dict[str, list[Request]] = {}
        self._states: dict[RequestKey, SamplingState] = {}
        self._totals: Counter[str] = Counter()
        self.is_stalled = False
        self._is_broken = False

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def next_deadline_s(self) -> float:
        """When, in monotonic time, a step is needed to end a request that is late."""
        return self._scheduler.next_deadline_s

    def validate(
        self, prompt_token_ids: list[int], params: SamplingParams, lora: LoRARequest | None
    ) -> None:
        """Raise InvalidRequestError for what can never be served. Any thread may call it."""
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt must not be empty", param="prompt")
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptTooLongError(len(prompt_token_ids), self.max_model_len)
        for param, ids in (
            ("prompt", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidRequestError(
                    f"{param} has a token id outside the vocabulary of {self.vocab_size}",
                    param=param,
                )
        if lora is not None and self.adapters is None:
            raise InvalidRequestError("this engine was started without LoRA", param="model")
        if params.pooling is not None and self._executor.spec.hidden_size is None:
            raise InvalidRequestError("this model does not give embeddings", param="model")

    def check_room(self, n: int) -> None:
        """Raise QueueFullError unless so many sequences may wait. Any thread may call it."""
        limit = self._config.scheduler.max_waiting
        if self._scheduler.num_waiting + n > limit:
            raise QueueFullError(f"the queue of {limit} waiting requests is full")

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        lora: LoRARequest | None = None,
        terms: Terms = DEFAULT_TERMS,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a request: ``params.n`` sequences of one prompt.

        ``grammar`` is ``params.structured`` compiled, for callers that did so ahead of time.
        Raises InvalidRequestError, and QueueFullError when not all of its sequences fit the queue.
        """
        self.validate(prompt_token_ids, params, lora)
        if request_id in self._requests:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        self.check_room(params.n)
        if grammar is None and params.structured is not None:
            grammar = self.grammars.compile(params.structured)
        now = time.monotonic()
        requests = [
            Request(
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt_token_ids,
                params=params,
                lora=lora,
                tenant=terms.tenant,
                priority=terms.priority,
                arrival_s=now,
                deadline_s=terms.deadline_s,
            )
            for index in range(params.n)
        ]
        self._requests[request_id] = requests
        for request in requests:
            grammar_state = None if grammar is None else grammar.start()
            state = SamplingState.create(request, self.eos_token_ids, self._rng, grammar_state)
            self._states[request.key] = state
            self._outputs.add(request, state)
            self._scheduler.add(request)
            if self.adapters is not None and lora is not None:
                self.adapters.enter(lora)

    def abort_request(self, request_id: str) -> list[RequestOutput]:
        """End all open sequences of a request; unknown or finished ids are no error."""
        return self._end(list(self._requests.get(request_id, ())), None, FinishReason.ABORT)

    def abort_adapter(self, digest: str) -> list[RequestOutput]:
        """End every request that uses an adapter."""
        return self._end(self._requests_of(digest), None, FinishReason.ABORT)

    def step(self) -> list[RequestOutput]:
        """Run one step and return what is new.

        Afterwards ``is_stalled`` says whether all requests wait for adapters' weights, so that
        another step would be empty until a load has ended. A step that raises ends the engine: its
        slots may no longer hold what the scheduler believes.
        """
        if self._is_broken:
            raise EngineDeadError("an earlier step failed; a new engine is needed")
        self._is_broken = True
        outputs = self._step()
        self._is_broken = False
        return outputs

    def _step(self) -> list[RequestOutput]:
        outputs = self._fail_broken_adapters() + self._fail_late()
        scheduled = self._scheduler.schedule()
        self._totals["preemptions"] += len(scheduled.preempted)
        if self.adapters is not None:
            for load in scheduled.slot_loads:
                self._totals["slot_loads"] += 1
                self.adapters.fill_slot(load.slot, load.digest)
        self.is_stalled = not scheduled.scheduled
        if scheduled.scheduled:
            self._totals["steps"] += 1
            outputs += self._run(scheduled)
        return outputs

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call this, on any thread, when the engine has lost a device: `check` says which."""
        self._executor.on_death(callback)

    def check(self) -> None:
        """Raise EngineDeadError when no step can be run any more."""
        self._executor.check()

    def close(self) -> None:
        """End the processes of other devices, if there are any. Nothing can be run afterwards."""
        self._executor.close()

    def stats(self) -> EngineStats:
        """Return the figures of this moment. Any thread may call it."""
        slots = None if self.adapters is None else self.adapters.slots
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=self._kv.num_blocks,
            num_free_blocks=self._kv.num_free_blocks,
            max_loras=0 if slots is None else slots.max_loras,
            num_slots_in_use=0 if slots is None else slots.num_in_use,
            total_steps=self._totals["steps"],
            total_prompt_tokens=self._totals["prompt_tokens"],
            total_cached_prompt_tokens=self._totals["cached_prompt_tokens"],
            total_output_tokens=self._totals["output_tokens"],
            total_preemptions=self._totals["preemptions"],
            total_slot_loads=self._totals["slot_loads"],
        )

    def _allocate_kv(self) -> KVCacheManager:
        cache = self._config.cache
        num_blocks = cache.num_blocks or self._executor.num_blocks_that_fit()
        self._executor.allocate_cache(num_blocks)
        return KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
        )

    def _is_adapter_ready(self, request: Request) -> bool:
        assert self.adapters is not None and request.lora is not None
        return self.adapters.prefetcher.is_ready(request.lora)

    def _adapter_start(self, request: Request) -> int:
        assert self.adapters is not None and request.lora is not None
        return self.adapters.start_in(request.prompt_token_ids, request.lora)

    def _run(self, scheduled: SchedulerOutput) -> list[RequestOutput]:
        result = self._runner.run(scheduled.scheduled, self._states)
        for item in scheduled.scheduled:
            if item.request.key in result.prompt_logprobs:
                found = result.prompt_logprobs[item.request.key]
                self._outputs.add_prompt_logprobs(item.request, found)
        self._scheduler.update_after_step(
            scheduled, {key: sampled.token_id for key, sampled in result.sampled.items()}
        )
        outputs = []
        for item in scheduled.scheduled:
            if item.samples:
                sampled = result.sampled[item.request.key]
                embedding = result.embeddings.get(item.request.key)
                if embedding is None or sampled.error is not None:
                    output = self._outputs.process(item.request, sampled)
                else:
                    output = self._outputs.process_embedding(item.request, embedding)
                self._count(output)
                outputs.append(output)
                if output.finish_reason is not None:
                    self._forget(item.request)
        return outputs

    def _count(self, output: RequestOutput) -> None:
        self._totals["output_tokens"] += len(output.token_ids)
        if output.num_output_tokens == 1 or output.embedding is not None:
            self._totals["prompt_tokens"] += output.num_prompt_tokens
            self._totals["cached_prompt_tokens"] += output.num_cached_tokens

    def _fail_broken_adapters(self) -> list[RequestOutput]:
        if self.adapters is None:
            return []
        outputs = []
        for digest, error in self.adapters.prefetcher.collect_failures().items():
            waiting = [
                request
                for request in self._requests_of(digest)
                if self.adapters.slots.slot_of(digest) is None
            ]
            outputs += self._end(waiting, error, FinishReason.ERROR)
        return outputs

    def _fail_late(self) -> list[RequestOutput]:
        late = self._scheduler.take_late()
        error = DeadlineExceededError("the request was not finished within its timeout")
        return self._end(late, error, FinishReason.ERROR)

    def _requests_of(self, digest: str) -> list[Request]:
        return [
            request
            for requests in self._requests.values()
            for request in requests
            if request.digest == digest
        ]

    def _end(
        self, requests: list[Request], error: Exception | None, reason: FinishReason
    ) -> list[RequestOutput]:
        outputs = []
        for request in requests:
            outputs.append(self._outputs.fail(request, error, reason))
            self._forget(request)
        return outputs

    def _forget(self, request: Request) -> None:
        """Release everything a sequence holds: the one exit for every way to end."""
        self._scheduler.finish(request)
        self._runner.forget(request.key)
        del self._states[request.key]
        open_sequences = self._requests[request.request_id]
        open_sequences.remove(request)
        if not open_sequences:
            del self._requests[request.request_id]
        if self.adapters is not None and request.lora is not None:
            self.adapters.leave(request.lora)


def _open_executor(config: EngineConfig) -> ModelExecutor:
    if config.tensor_parallel_size > 1:
        return ParallelExecutor(config)
    return LocalExecutor(config)
