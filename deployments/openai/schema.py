"""Request bodies of the OpenAI-compatible routes, with vLLM's extra fields.

Shapes and types only. Ranges of sampling parameters are ``SamplingParams``'s business, prompts
and messages are taken apart in ``prompts.py``.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.openai.body import Body
from deployments.openai.structured import StructuredFields
from deployments.openai.tools import ToolFields
from deployments.openai.unsupported import REFUSED_CHAT, REFUSED_COMPLETION, Refused

# Values travel to tensors and other processes, so no integer may outgrow 64 bits.
Int = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]

DEFAULT_COMPLETION_TOKENS = 16
MAX_TIMEOUT_S = 86_400


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[list[str], BeforeValidator(_one_or_many)]


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SamplingFields(BaseModel):
    """How tokens are chosen and where they end, on every route that generates."""

    model: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int = 0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: Int = 0
    stop: Stops = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool = False
    user: str | None = None
    priority: Int = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    truncate_prompt_tokens: Int | None = None


class GenerationBody(Body, SamplingFields, StructuredFields):
    """What completions and chat completions have in common."""

    n: Int = 1
    max_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    stream_options: StreamOptions | None = None
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and self.include_usage and bool(options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """POST /v1/completions. ``max_tokens`` null means "until the context is full"."""

    null_means_something: ClassVar[frozenset[str]] = frozenset({"max_tokens"})
    refused: ClassVar[Refused] = REFUSED_COMPLETION

    prompt: Any = None
    max_tokens: Int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Int | None = None
    add_special_tokens: bool = True

    @property
    def scores_only(self) -> bool:
        """The client wants its prompt back, perhaps with logprobs, and nothing new."""
        return self.echo and self.max_tokens == 0


class ChatFields(Body):
    """How messages become a prompt."""

    messages: list[dict[str, Any]]
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None


class ChatBody(GenerationBody, ChatFields, ToolFields):
    """POST /v1/chat/completions."""

    refused: ClassVar[Refused] = REFUSED_CHAT

    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None


class TokenizeTextBody(Body):
    """POST /tokenize with a text."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatFields, ToolFields):
    """POST /tokenize with messages."""

    refused: ClassVar[Refused] = {
        "add_special_tokens": (False,),
        "mm_processor_kwargs": ({},),
    }

    model: str = ""
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str = ""
    tokens: list[TokenId]


class LoadAdapterBody(Body):
    """POST /v1/load_lora_adapter. ``pin`` keeps the weights resident on every replica."""

    refused: ClassVar[Refused] = {"is_3d_lora_weight": (False,)}

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pin: bool = False


class UnloadAdapterBody(Body):
    """POST /v1/unload_lora_adapter. ``force`` aborts requests that still use the adapter."""

    lora_name: str
    force: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = None
