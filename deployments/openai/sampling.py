"""Sampling fields of a body to ``SamplingParams``. Ranges are checked there, vocabulary here."""

from deployments.openai.failures import ApiError
from deployments.openai.schema import ChatBody, CompletionBody, GenerationBody
from deployments.openai.structured import structured_output
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.structured import StructuredOutput

# Filters out nothing in any vocabulary, and fits in a 32-bit tensor.
_MAX_TOP_K = (1 << 31) - 1

# Beyond these a float32 logit overflows, which would be the client's doing but look like ours.
_REPETITION_PENALTY_RANGE = (0.01, 100.0)


def completion_params(body: CompletionBody, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a completion.

    A body that only scores its prompt has one token generated, which is not shown.
    """
    _check_stream_fields(body)
    return _params(
        body,
        vocab_size,
        max_tokens=1 if body.scores_only else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=completion_prompt_logprobs(body),
    )


def completion_prompt_logprobs(body: CompletionBody) -> int | None:
    """How many logprobs of each prompt token are needed; echoed tokens show them as well."""
    if body.echo and body.prompt_logprobs is None:
        return body.logprobs
    return body.prompt_logprobs


def chat_params(
    body: ChatBody, vocab_size: int, required: StructuredOutput | None = None
) -> SamplingParams:
    """Sampling parameters of a chat completion, errors named by chat's own fields.

    ``required`` is what the choice of a tool makes the model write.
    """
    _check_stream_fields(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("when using `top_logprobs`, `logprobs` must be true.", param="top_logprobs")
    renamed = body.max_completion_tokens is not None
    try:
        return _params(
            body,
            vocab_size,
            max_tokens=body.max_completion_tokens if renamed else body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            required=required,
        )
    except InvalidRequestError as error:
        if error.param == "logprobs":
            raise InvalidRequestError(f"top_{error.message}", param="top_logprobs") from None
        if error.param == "max_tokens" and renamed:
            message = error.message.replace("max_tokens", "max_completion_tokens")
            raise InvalidRequestError(message, param="max_completion_tokens") from None
        raise


def _check_stream_fields(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            "`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs"
        )


def _params(
    body: GenerationBody,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    required: StructuredOutput | None = None,
) -> SamplingParams:
    _check_vocabulary("stop_token_ids", body.stop_token_ids, vocab_size)
    lowest, highest = _REPETITION_PENALTY_RANGE
    if not lowest <= body.repetition_penalty <= highest:
        raise ApiError(
            f"repetition_penalty must be in [{lowest}, {highest}], got {body.repetition_penalty}.",
            param="repetition_penalty",
        )
    return SamplingParams(
        n=body.n,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(body.top_k, _MAX_TOP_K),
        min_p=body.min_p,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        structured=required or structured_output(body),
    )


def _logit_bias(bias: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    ids = [_bias_token_id(key) for key in bias]
    _check_vocabulary("logit_bias", ids, vocab_size)
    if len(set(ids)) < len(ids):
        raise ApiError("logit_bias names a token twice.", param="logit_bias")
    return tuple(zip(ids, bias.values(), strict=True))


def _bias_token_id(key: str) -> int:
    # int() alone would also take " 1", "1_0" and digits of other scripts.
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(f"logit_bias keys must be token ids, got {key[:32]!r}.", param="logit_bias")
    return int(key)


def _check_vocabulary(param: str, token_ids: list[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise ApiError(
                f"{param}: token id {token_id} is out of vocabulary ({vocab_size} tokens).",
                param=param,
            )
