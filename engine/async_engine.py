"""The engine for asyncio callers: a thread steps, each request has its own queue.

Knows threads and event loops. Knows nothing of batches: whatever touches the ``Engine`` runs on its
thread, between two steps.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from transformers import PreTrainedTokenizerFast

from adapters import LoRARequest
from engine.adapter_set import AdapterSet
from engine.config import EngineConfig
from engine.delivery import Delivery, Stream
from engine.engine import Engine
from engine.errors import AdapterNotLoadedError, EngineDeadError
from engine.grammar import Grammar
from engine.lora.adapter import AdapterInfo
from engine.outputs import RequestOutput
from engine.request import Terms
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats, LoRAResidency

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_LOADER_THREADS = 4


class AsyncEngine:
    """An Engine whose steps run in a thread of its own.

    ``generate`` is a plain async generator: closing it, or cancelling its consumer, aborts the
    request. ``start`` loads the model; ``stop`` ends open requests with EngineDeadError.
    A stream's outputs come at most every ``stream_interval_s`` seconds, with many streams up to
    five times that; its first and its last outputs wait for nothing.
    """

    def __init__(self, config: EngineConfig, *, stream_interval_s: float = 0.0) -> None:
        self._config = config
        self._delivery = Delivery(stream_interval_s)
        self._loaders = ThreadPoolExecutor(_NUM_LOADER_THREADS, thread_name_prefix="lora-loader")
        # Adapters must not wait behind grammars, which may take seconds.
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="grammar-compiler")
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started: Future[Engine] = Future()
        self._stopping = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Load the model and begin to serve. Raises what loading raises."""
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def stop(self) -> None:
        """Stop stepping and wait for the thread."""
        self._stopping = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    @property
    def is_alive(self) -> bool:
        """Whether requests are being served."""
        return self._started.done() and self._thread.is_alive() and self._death is None

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._engine.eos_token_ids

    async def load_lora(self, lora: LoRARequest) -> AdapterInfo:
        """Read and check an adapter into host memory; running requests are not delayed.

        Raises AdapterError when it cannot be served exactly, CapacityError when there is no room.
        """
        adapters = self._adapters(lora.lora_name)
        if lora.digest is not None:
            await self._call(partial(adapters.restore, lora.digest))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._loaders, adapters.load, lora)

    async def remove_lora(self, digest: str, *, force: bool = False) -> None:
        """Forget an adapter; its memory is freed with its last request. ``force`` aborts those."""
        adapters = self._adapters(digest)

        def remove() -> None:
            adapters.remove(digest)
            if force:
                self._delivery.add(self._engine.abort_adapter(digest))

        await self._call(remove)

    async def pin_lora(self, digest: str, *, in_slot: bool = False) -> None:
        """Keep an adapter in host memory until it is unpinned or removed."""
        await self._call(partial(self._adapters(digest).pin, digest, in_slot=in_slot))

    async def unpin_lora(self, digest: str) -> None:
        """Let an adapter be evicted again."""
        await self._call(partial(self._adapters(digest).unpin, digest))

    def loras(self) -> list[LoRAResidency]:
        """List adapters in host memory or in a slot."""
        adapters = self._engine.adapters
        return [] if adapters is None else adapters.resident()

    def stats(self) -> EngineStats:
        """Return the engine's figures of this moment."""
        return self._engine.stats()

    def check_room(self, n: int) -> None:
        """Raise QueueFullError unless so many sequences may wait, before work is done for them."""
        self._engine.check_room(n)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        lora: LoRARequest | None = None,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> AsyncIterator[list[RequestOutput]]:
        """Serve one request; yields what is new until an output says ``request_finished``.

        Raises InvalidRequestError or QueueFullError before the first item, EngineDeadError when
        the engine stops. Failures of single sequences are in ``RequestOutput.error``, among them
        DeadlineExceededError when ``timeout_s`` is over. Waiting requests of different tenants,
        and of one tenant for different adapters, take turns within a priority.
        """
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        stream = Stream()
        add = partial(
            self._add,
            stream,
            request_id,
            list(prompt_token_ids),
            params,
            lora=lora,
            terms=Terms(tenant=tenant, priority=priority, deadline_s=deadline_s),
            grammar=await self._grammar(params),
        )
        try:
            await self._call(add)
            while True:
                outputs = await stream.get()
                yield outputs
                if outputs[-1].request_finished:
                    return
        finally:
            # Not awaited: this also runs when the consumer's task is being cancelled.
            self._commands.put(partial(self._abort, request_id, stream))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason "abort". Unknown ids are no error."""
        await self._call(lambda: self._delivery.add(self._engine.abort_request(request_id)))

    async def _grammar(self, params: SamplingParams) -> Grammar | None:
        """Compile a restriction where it holds up neither the event loop nor a step."""
        if params.structured is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._compilers, self._engine.grammars.compile, params.structured
        )

    @property
    def _engine(self) -> Engine:
        return self._started.result(timeout=0)

    def _adapters(self, what: str) -> AdapterSet:
        adapters = self._engine.adapters
        if adapters is None:
            raise AdapterNotLoadedError(f"this engine was started without LoRA, so not {what!r}")
        return adapters

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread, between two steps."""
        done: Future[T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:  # noqa: BLE001  raised again in the caller
                done.set_exception(error)

        if not self.is_alive:
            raise EngineDeadError("the engine is not running") from self._death
        self._commands.put(command)
        result = asyncio.wrap_future(done)
        if not self.is_alive and not done.done():
            # The thread may have ended between the check and the put.
            done.cancel()
            raise EngineDeadError("the engine is not running") from self._death
        return await result

    def _add(
        self,
        stream: Stream,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        lora: LoRARequest | None,
        terms: Terms,
        grammar: Grammar | None,
    ) -> None:
        self._engine.add_request(
            request_id, prompt, params, lora=lora, terms=terms, grammar=grammar
        )
        self._delivery.open(request_id, stream)

    def _abort(self, request_id: str, stream: Stream) -> None:
        """End the request of a stream that nobody reads any more."""
        if self._delivery.close(request_id, stream):
            self._engine.abort_request(request_id)

    def _run(self) -> None:
        try:
            engine = Engine(self._config, self._loaders)
        except BaseException as error:  # noqa: BLE001  raised again in start()
            self._started.set_exception(error)
            return
        if engine.adapters is not None:
            engine.adapters.prefetcher.on_loaded = lambda: self._commands.put(lambda: None)
        # Also an idle engine must notice.
        engine.on_death(lambda: self._commands.put(engine.check))
        self._started.set_result(engine)
        try:
            can_step = False
            while not self._stopping:
                self._run_commands(until_s=0.0 if can_step else engine.next_deadline_s)
                if engine.has_work:
                    self._delivery.add(engine.step())
                # A stalled engine waits for adapters; the end of a load is a command.
                can_step = engine.has_work and not engine.is_stalled
                if not can_step:
                    self._delivery.flush()
        except Exception as error:
            logger.exception("the engine failed")
            self._death = error
        finally:
            self._die()
            engine.close()

    def _run_commands(self, *, until_s: float) -> None:
        """Run the commands that are there; wait for one, but not beyond this time."""
        timeout_s = min(until_s - time.monotonic(), threading.TIMEOUT_MAX)
        while True:
            try:
                command = self._commands.get(timeout_s > 0, timeout_s)
            except queue.Empty:
                return
            command()
            timeout_s = 0.0

    def _die(self) -> None:
        """Tell everyone who waits that nothing will come."""
        if self._death is None:
            self._death = EngineDeadError("the engine was stopped")
        error = EngineDeadError(f"the engine has ended: {self._death}")
        try:
            self._run_commands(until_s=0.0)
        except Exception:
            logger.exception("a command failed while the engine ended")
        self._delivery.fail(error)
