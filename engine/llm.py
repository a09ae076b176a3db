"""Offline use: prompts in, texts out, many adapters in one batch, without Ray or HTTP."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

from adapters import LoRARequest
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError
from engine.outputs import FinishReason, PositionLogprobs, RequestOutput
from engine.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class Completion:
    """One generated sequence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """Everything generated for one prompt."""

    prompt_token_ids: list[int]
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    completions: list[Completion]


class LLM:
    """A base model with its adapters, for scripts.

        llm = LLM("path/to/model")
        llm.generate(["SELECT"], SamplingParams(), lora=LoRARequest(lora_name=..., lora_path=...))

    Keyword arguments go to EngineConfig. ``close``, or the end of a ``with`` block, ends the
    processes of a model that is split among devices; so does the end of the script.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._loaders = ThreadPoolExecutor(4, thread_name_prefix="lora-loader")
        self._engine = Engine(EngineConfig(model=Path(model), **settings), self._loaders)
        self._ids = count()

    @property
    def engine(self) -> Engine:
        return self._engine

    def close(self) -> None:
        """Give up what is held outside of this process. Nothing can be generated afterwards."""
        self._engine.close()
        self._loaders.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Generation]:
        """Generate for all prompts in one continuous batch; results in the prompts' order.

        ``params`` and ``lora`` are one for all prompts or one for each. Raises InvalidRequestError,
        AdapterError, or what made a sequence fail.
        """
        all_params = _one_each(params or SamplingParams(), SamplingParams, len(prompts))
        loras = [self._known(item) for item in _one_each(lora, LoRARequest, len(prompts))]
        generations: dict[str, Generation] = {}
        try:
            for prompt, item_params, item_lora in zip(prompts, all_params, loras, strict=True):
                request_id = str(next(self._ids))
                ids = self.encode(prompt)
                self._engine.add_request(request_id, ids, item_params, lora=item_lora)
                completions = [Completion() for _ in range(item_params.n)]
                generations[request_id] = Generation(prompt_token_ids=ids, completions=completions)
            while self._engine.has_work:
                for output in self._engine.step():
                    _add(generations[output.request_id], output)
        except BaseException:
            for request_id in generations:
                self._engine.abort_request(request_id)
            raise
        return list(generations.values())

    def chat(
        self,
        conversations: Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[Generation]:
        """Generate the next message of each conversation, using the model's chat template."""
        prompts = [
            self._engine.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
            for messages in conversations
        ]
        return self.generate(prompts, params, lora=lora)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Turn a prompt into token ids; ids pass unchanged."""
        if isinstance(prompt, str):
            return list(self._engine.tokenizer.encode(prompt))
        return list(prompt)

    def _known(self, lora: LoRARequest | None) -> LoRARequest | None:
        if lora is None:
            return None
        if self._engine.adapters is None:
            raise InvalidRequestError("this engine was started without LoRA", param="lora")
        info = self._engine.adapters.load(lora)
        return replace(lora, digest=info.digest)


def _one_each(value: Any, kind: type, count: int) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{len(value)} given for {count} prompts", param=kind.__name__)
    return list(value)


def _add(generation: Generation, output: RequestOutput) -> None:
    if output.error is not None:
        raise output.error
    completion = generation.completions[output.index]
    completion.text += output.text
    completion.token_ids += output.token_ids
    completion.logprobs += output.logprobs or ()
    completion.finish_reason = output.finish_reason
    completion.stop_reason = output.stop_reason
    if output.prompt_logprobs is not None:
        generation.prompt_logprobs = output.prompt_logprobs
