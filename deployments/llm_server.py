"""One replica: an engine, a tokenizer, and the names that it may serve.

Turns requests into token streams on the right adapter version. Knows nothing of Ray, HTTP, or how
names are agreed upon.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import cast

from adapters import AdapterVersion
from deployments.backend import BaseModelInfo
from deployments.cluster_protocol import ForcedEnd
from deployments.engine_port import GeneratingEngine
from deployments.errors import (
    AdapterRejectedError,
    AdapterSourceError,
    ReplicaUnavailableError,
)
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    GenerationStart,
    TokenizeRequest,
    TokenizeResult,
)
from deployments.metrics.replica_metrics import ReplicaMetrics
from deployments.model_profile import ModelProfile
from deployments.output_plan import OutputPlanner
from deployments.prompt_encoder import PromptEncoder
from deployments.replica_link import AdmittedAdapter, ReplicaLink
from deployments.telemetry.request_telemetry import RequestObserver, RequestTelemetry
from engine.errors import EngineDeadError
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams


class LLMServer:
    """Serves requests on one engine. ``link`` says which adapters; None serves the base alone.

    ``profile`` is the base model's; an adapter's own goes before it.
    """

    def __init__(
        self,
        replica_id: str,
        engine: GeneratingEngine,
        base_model: BaseModelInfo,
        *,
        metrics: ReplicaMetrics | None = None,
        profile: ModelProfile | None = None,
        telemetry: RequestTelemetry | None = None,
    ) -> None:
        self.replica_id = replica_id
        self._telemetry = telemetry
        self.base_model = base_model
        self._engine = engine
        self._encoder = PromptEncoder(engine.tokenizer)
        self._planner = OutputPlanner(engine.tokenizer)
        self._profile = profile or ModelProfile()
        self._link: ReplicaLink | None = None
        self._running: dict[str, AdapterVersion] = {}
        self._aborted: set[str] = set()
        self._metrics = metrics or ReplicaMetrics(
            base_model.id, replica_id, base_model.max_model_len
        )

    def attach(self, link: ReplicaLink) -> None:
        """Serve the adapters that this link knows."""
        self._link = link

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem]:
        """Stream one request; see ``Backend.generate``."""
        async with AsyncExitStack() as stack:
            record = stack.enter_context(self._follow(request))
            self._engine.check_room(request.params.n)
            admitted = await stack.enter_async_context(
                self._admit(request.adapter, request.split_key)
            )
            name, generation = _named(admitted)
            record.admitted(name, generation)
            if admitted is not None:
                self._running[request.request_id] = admitted.version
                stack.callback(self._forget, request.request_id)
            profile = self._profile_of(admitted)
            prompt_token_ids = await self._encoder.encode(
                request.prompt,
                chat_template=profile.chat_template,
                add_special_tokens=request.add_special_tokens,
                keep_last=request.truncate_prompt_tokens,
            )
            plan = self._planner.plan(request, profile, prompt_token_ids)
            record.tokenized(len(prompt_token_ids))
            outputs = await stack.enter_async_context(
                aclosing(self._outputs(request, prompt_token_ids, plan.params, admitted))
            )
            first = await anext(outputs)
            if request.request_id in self._aborted:
                # Perhaps before the engine knew of it.
                await self._engine.abort(request.request_id)
            record.outputs(first)
            yield GenerationStart(
                replica_id=self.replica_id,
                adapter_name=name,
                generation=generation,
                prompt_token_ids=tuple(prompt_token_ids),
                tool_parser=plan.tool_parser,
                reasoning_parser=plan.reasoning_parser,
                in_reasoning=plan.in_reasoning,
            )
            yield first
            async for item in outputs:
                record.outputs(item)
                yield item

    async def abort_running(self, end: ForcedEnd) -> None:
        """Abort everything that runs on some versions of an adapter, or is about to."""
        for request_id, running in tuple(self._running.items()):
            if running.name == end.name and running.generation <= end.generation:
                self._aborted.add(request_id)
                await self._engine.abort(request_id)

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        """Turn a prompt into token ids as ``generate`` would."""
        async with self._admit(request.adapter) as admitted:
            token_ids = await self._encoder.encode(
                request.prompt,
                chat_template=self._profile_of(admitted).chat_template,
                add_special_tokens=request.add_special_tokens,
            )
        return TokenizeResult(
            token_ids=tuple(token_ids),
            token_strs=tuple(await self._encoder.spell(token_ids)),
            max_model_len=self.base_model.max_model_len,
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text."""
        return await self._encoder.decode(token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return each token's own bytes."""
        return await self._encoder.token_bytes(token_ids)

    def in_flight(self) -> list[AdapterVersion]:
        """The versions of adapters that unfinished requests use, once for each request."""
        return list(self._running.values())

    def resident_names(self) -> list[str]:
        """Names whose weights are in memory here."""
        if self._link is None:
            return []
        return self._link.table.names_of(held.digest for held in self._link.adapters.residency())

    def load(self) -> tuple[int, int]:
        """How many requests run and wait."""
        stats = self._engine.stats()
        return stats.num_running, stats.num_waiting

    def check_health(self) -> None:
        """Raise if the engine has stopped: only a new process can help then."""
        if not self._engine.is_alive:
            raise EngineDeadError("the engine has stopped")

    @contextmanager
    def _follow(self, request: GenerateRequest) -> Iterator[RequestObserver]:
        with self._metrics.request() as record:
            if self._telemetry is None:
                yield record
                return
            with self._telemetry.follow(request, record) as followed:
                yield followed

    @asynccontextmanager
    async def _admit(
        self, adapter: str | None, split_key: str = ""
    ) -> AsyncIterator[AdmittedAdapter | None]:
        if adapter is None:
            yield None
            return
        if self._link is None:
            raise ReplicaUnavailableError("this replica has not joined the cluster")
        async with AsyncExitStack() as stack:
            try:
                admitted = await stack.enter_async_context(self._link.admit(adapter, split_key))
            except (AdapterRejectedError, AdapterSourceError) as error:
                # Here the request field at fault is the name, not a path that somebody loaded.
                error.param = "model"
                raise
            yield admitted

    def _forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._aborted.discard(request_id)

    def _profile_of(self, admitted: AdmittedAdapter | None) -> ModelProfile:
        return self._profile if admitted is None else admitted.profile.over(self._profile)

    async def _outputs(
        self,
        request: GenerateRequest,
        prompt_token_ids: list[int],
        params: SamplingParams,
        admitted: AdmittedAdapter | None,
    ) -> AsyncGenerator[list[RequestOutput], None]:
        stream = self._engine.generate(
            request.request_id,
            prompt_token_ids,
            params,
            lora=None if admitted is None else admitted.lora,
            priority=request.priority,
            tenant=request.tenant,
            timeout_s=request.timeout_s,
        )
        try:
            async with aclosing(cast("AsyncGenerator[list[RequestOutput], None]", stream)):
                async for outputs in stream:
                    yield outputs
        except EngineDeadError as error:
            raise ReplicaUnavailableError("the replica's engine has stopped") from error


def _named(admitted: AdmittedAdapter | None) -> tuple[str | None, int]:
    return (None, 0) if admitted is None else (admitted.version.name, admitted.version.generation)
