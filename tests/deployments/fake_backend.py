"""A backend without a cluster: every byte is a token, and it says what it was told to say."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.backend import (
    ALL_ADAPTERS,
    AdapterQuery,
    AdapterState,
    AdapterStatus,
    BaseModelInfo,
    ClusterMetrics,
    DeleteAlias,
    LoadAdapter,
    PinAdapter,
    PushAdapter,
    ReplicaResidency,
    ReplicaStatus,
    RollBackAdapter,
    SetAlias,
    UnloadAdapter,
)
from deployments.errors import (
    AdapterAlreadyLoadedError,
    AdapterNotFoundError,
    AdapterSourceError,
    AliasNotFoundError,
    GenerationNotFoundError,
    NameConflictError,
    NoEarlierVersionError,
    OperationNotFoundError,
)
from deployments.generation import (
    GenerateRequest,
    GenerationItem,
    GenerationStart,
    PromptInput,
    TokenizeRequest,
    TokenizeResult,
)
from deployments.metrics.controller_metrics import ControllerMetrics, FleetView
from deployments.operations import OperationQuery, OperationStatus
from engine.errors import InvalidRequestError, PromptTooLongError
from engine.outputs import FinishReason, PositionLogprobs, RequestOutput, TokenLogprob
from engine.sampling_params import SamplingParams

EOS = 256
VOCAB_SIZE = 257
MAX_MODEL_LEN = 64
BASE = "base"


@dataclass
class FakeBackend:
    """Says ``reply`` and then EOS. Tokens come ``per_item`` in a list, and wait for ``gate``."""

    reply: str = "Hello world"
    per_item: int = 2
    allow_runtime_updating: bool = True
    healthy_now: bool = True
    fail_at_start: BaseException | None = None
    fail_after_first_item: Exception | None = None
    gate: asyncio.Event | None = None
    gate_before_start: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    loads: list[LoadAdapter] = field(default_factory=list)
    unloads: list[UnloadAdapter] = field(default_factory=list)
    adapters: dict[str, AdapterVersion] = field(default_factory=dict)
    kept: dict[str, list[AdapterVersion]] = field(default_factory=dict)
    aliases: dict[str, AdapterAlias] = field(default_factory=dict)
    receiving: list[Path] = field(default_factory=list)
    pushes: list[tuple[PushAdapter, dict[str, bytes]]] = field(default_factory=list)
    rollbacks: list[RollBackAdapter] = field(default_factory=list)
    operations: dict[str, OperationStatus] = field(default_factory=dict)
    operation_queries: list[OperationQuery] = field(default_factory=list)
    token_lookups: int = 0
    generations: list[int] = field(default_factory=list)
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    in_reasoning: bool | None = None
    roles_must_alternate: bool = True

    def register(self, name: str, generation: int = 1) -> None:
        self.adapters[name] = AdapterVersion(
            name=name,
            generation=generation,
            digest="d" * 64,
            source_uri=f"file:///adapters/{name}",
            base_model=BASE,
            rank=8,
            size_bytes=1000,
            created_at=1700000000.5,
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerationItem]:
        self.requests.append(request)
        try:
            if self.gate is not None and self.gate_before_start:
                await self.gate.wait()
            if self.fail_at_start is not None:
                raise self.fail_at_start
            version = self._version(request.adapter)
            prompt_ids = self._prompt_ids(request)
            generation = self.generations.pop(0) if self.generations else version
            yield GenerationStart(
                replica_id="replica-1",
                adapter_name=request.adapter,
                generation=generation,
                prompt_token_ids=prompt_ids,
                tool_parser=self.tool_parser,
                reasoning_parser=self.reasoning_parser,
                in_reasoning=self.in_reasoning,
            )
            async for item in self._outputs(request, prompt_ids):
                yield item
        finally:
            self.closed.append(request.request_id)

    async def _outputs(
        self, request: GenerateRequest, prompt_ids: tuple[int, ...]
    ) -> AsyncIterator[list[RequestOutput]]:
        if request.params.pooling is not None:
            yield [_embedding(request, prompt_ids)]
            return
        room = MAX_MODEL_LEN - len(prompt_ids)
        pending = [
            output
            for index in range(request.params.n)
            for output in self._sequence(request, index, prompt_ids, room)
        ]
        # The sequences of one request take turns, as in a batch.
        pending.sort(key=lambda output: output.num_output_tokens)
        pending[-1] = replace(pending[-1], request_finished=True)
        size = self.per_item
        for position, start in enumerate(range(0, len(pending), size)):
            if position == 1:
                if self.fail_after_first_item is not None:
                    raise self.fail_after_first_item
                if self.gate is not None:
                    await self.gate.wait()
            await asyncio.sleep(0)
            yield pending[start : start + size]

    def _sequence(
        self, request: GenerateRequest, index: int, prompt_ids: tuple[int, ...], room: int
    ) -> list[RequestOutput]:
        params = request.params
        limit = min(params.max_tokens or room, room)
        ids = [*self.reply.encode(), EOS][:limit]
        outputs, pending_bytes = [], b""
        for count, token_id in enumerate(ids, start=1):
            pending_bytes += _bytes_of(token_id) if token_id != EOS else b""
            try:
                text, pending_bytes = pending_bytes.decode(), b""
            except UnicodeDecodeError:
                text = ""
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    index=index,
                    text=text,
                    token_ids=(token_id,),
                    logprobs=_logprobs((token_id,), params.logprobs),
                    prompt_logprobs=_prompt_logprobs(prompt_ids, params) if count == 1 else None,
                    num_prompt_tokens=len(prompt_ids),
                    num_output_tokens=count,
                    num_cached_tokens=3 if len(prompt_ids) > 3 else 0,
                )
            )
        reason = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
        outputs[-1] = replace(outputs[-1], finish_reason=reason)
        return outputs

    def _version(self, adapter: str | None) -> int:
        if adapter is None:
            return 0
        name, _, wanted = adapter.partition("@")
        if name not in self.adapters:
            raise AdapterNotFoundError(name)
        current = self.adapters[name].generation
        if wanted and int(wanted) != current:
            raise GenerationNotFoundError(name, int(wanted), current)
        return current

    def _prompt_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        ids = self._encode(request.prompt)
        if request.truncate_prompt_tokens is not None:
            ids = ids[-request.truncate_prompt_tokens :]
        if len(ids) >= MAX_MODEL_LEN:
            raise PromptTooLongError(len(ids), MAX_MODEL_LEN)
        return ids

    def _encode(self, prompt: PromptInput) -> tuple[int, ...]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.text is not None:
            return tuple(prompt.text.encode())
        messages = prompt.messages or ()
        turns = ["user", "assistant"] * len(messages)
        if self.roles_must_alternate and any(
            message["role"] != role for message, role in zip(messages, turns, strict=False)
        ):
            raise InvalidRequestError("Conversation roles must alternate", param="messages")
        return tuple("".join(message["content"] for message in messages).encode())

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        ids = self._encode(request.prompt)
        return TokenizeResult(
            token_ids=ids, token_strs=tuple(map(chr, ids)), max_model_len=MAX_MODEL_LEN
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(_bytes_of, token_ids)).decode(errors="replace")

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        self.token_lookups += 1
        return list(map(_bytes_of, token_ids))

    async def base_model(self) -> BaseModelInfo:
        return BaseModelInfo(
            id=BASE,
            root="/models/base",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            created=1700000000,
        )

    async def list_adapters(self, query: AdapterQuery = ALL_ADAPTERS) -> list[AdapterStatus]:
        statuses = [await self.get_adapter(name) for name in sorted(self.adapters)]
        return list(filter(query.selects, statuses))[: query.limit]

    async def get_adapter(self, name: str) -> AdapterStatus:
        if name not in self.adapters:
            raise AdapterNotFoundError(name)
        version = self.adapters[name]
        held = ReplicaResidency(
            replica_id="replica-1",
            generation=version.generation,
            host=True,
            slot=None,
            num_running=0,
        )
        return AdapterStatus(
            version=version,
            state=AdapterState.READY,
            replicas=(held,),
            kept=tuple(self.kept.get(name, ())),
        )

    async def load_adapter(self, load: LoadAdapter) -> AdapterVersion:
        self.loads.append(load)
        if load.name == BASE:
            raise NameConflictError(load.name)
        if load.name in self.adapters and not load.load_inplace:
            raise AdapterAlreadyLoadedError(load.name)
        if load.source == "/nope":
            raise AdapterSourceError(load.name, "/nope", "no such directory")
        generation = max((each.generation for each in self.adapters.values()), default=0) + 1
        self.register(load.name, generation)
        self.adapters[load.name] = replace(self.adapters[load.name], pinned=load.pin)
        return self.adapters[load.name]

    @contextmanager
    def receive_adapter(self) -> Iterator[Path]:
        with TemporaryDirectory() as directory:
            self.receiving.append(Path(directory))
            yield Path(directory)

    async def push_adapter(self, push: PushAdapter) -> AdapterVersion:
        self.pushes.append((push, {p.name: p.read_bytes() for p in push.directory.iterdir()}))
        self.register(push.name, len(self.pushes))
        return self.adapters[push.name]

    async def unload_adapter(self, unload: UnloadAdapter) -> AdapterVersion:
        self.unloads.append(unload)
        if unload.name not in self.adapters:
            raise AdapterNotFoundError(unload.name)
        return self.adapters.pop(unload.name)

    async def pin_adapter(self, pin: PinAdapter) -> AdapterVersion:
        if pin.name not in self.adapters:
            raise AdapterNotFoundError(pin.name, param="lora_name")
        version = replace(self.adapters[pin.name], pinned=pin.pinned)
        self.adapters[pin.name] = version
        return version

    async def roll_back_adapter(self, rollback: RollBackAdapter) -> AdapterVersion:
        self.rollbacks.append(rollback)
        if rollback.name not in self.kept:
            raise NoEarlierVersionError(rollback.name)
        earlier = self.kept[rollback.name][0]
        generation = self.adapters[rollback.name].generation + 1
        self.adapters[rollback.name] = replace(earlier, generation=generation)
        return self.adapters[rollback.name]

    async def list_aliases(self) -> list[AdapterAlias]:
        return [alias for _, alias in sorted(self.aliases.items())]

    async def set_alias(self, asked: SetAlias) -> AdapterAlias:
        if asked.name in self.adapters:
            raise NameConflictError(asked.name, "is an adapter's name and cannot be an alias.")
        alias = AdapterAlias(name=asked.name, targets=asked.targets, generation=9)
        self.aliases[asked.name] = alias
        return alias

    async def delete_alias(self, asked: DeleteAlias) -> AdapterAlias:
        if asked.name not in self.aliases:
            raise AliasNotFoundError(asked.name)
        return self.aliases.pop(asked.name)

    async def list_operations(self, query: OperationQuery) -> list[OperationStatus]:
        self.operation_queries.append(query)
        return list(self.operations.values())

    async def get_operation(self, op_id: str) -> OperationStatus:
        if op_id not in self.operations:
            raise OperationNotFoundError(op_id)
        return self.operations[op_id]

    async def list_replicas(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                replica_id="replica-1",
                node="node-1",
                table_version=1,
                lease_left_s=5.0,
                num_running=1,
                num_waiting=0,
            )
        ]

    async def metrics(self) -> ClusterMetrics:
        view = FleetView(
            table_version=3,
            num_adapters=len(self.adapters),
            num_aliases=len(self.aliases),
            num_operations=0,
            replicas=await self.list_replicas(),
            adapters=await self.list_adapters(),
        )
        return ClusterMetrics(controller=ControllerMetrics().snapshot(view))

    async def healthy(self) -> bool:
        return self.healthy_now


def _bytes_of(token_id: int) -> bytes:
    return b"<eos>" if token_id == EOS else bytes([token_id])


def _embedding(request: GenerateRequest, prompt_ids: tuple[int, ...]) -> RequestOutput:
    """The first token's number, and how many there are."""
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=len(prompt_ids),
        request_finished=True,
        embedding=(float(prompt_ids[0]), float(len(prompt_ids))),
    )


def _logprobs(token_ids: tuple[int, ...], k: int | None) -> tuple[PositionLogprobs, ...] | None:
    """The chosen token comes third after "!" and a lone continuation byte."""
    if k is None:
        return None
    return tuple(
        PositionLogprobs(
            chosen=TokenLogprob(token_id, -2.0, 3),
            top=(
                TokenLogprob(ord("!"), -0.5, 1),
                TokenLogprob(0x82, -1.0, 2),
                TokenLogprob(token_id, -2.0, 3),
            )[:k],
        )
        for token_id in token_ids
    )


def _prompt_logprobs(
    prompt_ids: tuple[int, ...], params: SamplingParams
) -> tuple[PositionLogprobs | None, ...] | None:
    scores = _logprobs(prompt_ids[1:], params.prompt_logprobs)
    return None if scores is None else (None, *scores)
