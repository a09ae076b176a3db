"""Known fields of OpenAI's and vLLM's APIs that are not honoured: refused by name.

A field that nobody knows is ignored, since clients send such. A field whose meaning is known and
would change the answer must not be ignored without a word. Each is listed with the values that ask
for nothing; null always does.
"""

from collections.abc import Mapping
from typing import Any

from deployments.openai.failures import ApiError

Refused = Mapping[str, tuple[object, ...]]

_NEVER: tuple[object, ...] = ()
_OFF = (False,)

_REFUSED_EVERYWHERE: Refused = {
    "allowed_token_ids": _NEVER,
    "bad_words": ([],),
    "cache_salt": _NEVER,
    "detokenize": (True,),
    "early_stopping": _OFF,
    "ec_transfer_params": _NEVER,
    "guided_decoding_backend": _NEVER,
    "guided_whitespace_pattern": _NEVER,
    "kv_transfer_params": _NEVER,
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": _NEVER,
    "mm_processor_kwargs": ({},),
    "repetition_detection": _NEVER,
    "request_id": _NEVER,
    "structural_tag": _NEVER,
    "thinking_token_budget": _NEVER,
    "truncation_side": ("left",),
    "use_beam_search": _OFF,
    "vllm_xargs": ({},),
}

REFUSED_COMPLETION: Refused = {
    **_REFUSED_EVERYWHERE,
    "best_of": (1,),
    "chat_template": _NEVER,
    "max_completion_tokens": _NEVER,
    "max_output_tokens": _NEVER,
    "messages": _NEVER,
    "prompt_embeds": _NEVER,
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": _NEVER,
}

REFUSED_CHAT: Refused = {
    **_REFUSED_EVERYWHERE,
    "add_special_tokens": _OFF,
    "audio": _NEVER,
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "input": _NEVER,
    "instructions": _NEVER,
    "max_output_tokens": _NEVER,
    "media_io_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": _NEVER,
    "prediction": _NEVER,
    "prompt": _NEVER,
    "prompt_cache_options": _NEVER,
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": _OFF,
    "verbosity": ("medium",),
    "web_search_options": _NEVER,
}


REFUSED_EMBEDDINGS: Refused = {
    "cache_salt": _NEVER,
    "chat_template": _NEVER,
    "dimensions": _NEVER,
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": _NEVER,
    "mm_processor_kwargs": ({},),
    "request_id": _NEVER,
    "softmax": _NEVER,
    "stream": _OFF,
    "truncation_side": ("left",),
    "use_activation": (True,),
}

REFUSED_RESPONSES: Refused = {
    **_REFUSED_EVERYWHERE,
    "access_programs": _NEVER,
    "add_generation_prompt": (True,),
    "add_special_tokens": _OFF,
    "background": _OFF,
    "background_options": _NEVER,
    "best_of": (1,),
    "context_management": _NEVER,
    "continue_final_message": _OFF,
    "conversation": _NEVER,
    "documents": _NEVER,
    "echo": _OFF,
    "enable_response_messages": _OFF,
    "image": _NEVER,
    "logprobs": _OFF,
    "max_completion_tokens": _NEVER,
    "max_tokens": _NEVER,
    "max_tool_calls": _NEVER,
    "media_io_kwargs": ({},),
    "messages": _NEVER,
    "moderation": _NEVER,
    "n": (1,),
    "previous_input_messages": _NEVER,
    "previous_response_id": _NEVER,
    "prompt": _NEVER,
    "prompt_cache_options": _NEVER,
    "prompt_logprobs": _NEVER,
    "reasoning_effort": ("none",),
    "response_format": _NEVER,
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
    "service_tier": ("auto", "default"),
    "store": _OFF,
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}


def refuse_unsupported(data: Mapping[str, Any], refused: Refused) -> None:
    """Raise ApiError for the first field that asks for something that would not be done."""
    for name in sorted(data.keys() & refused.keys()):
        value = data[name]
        # JSON's true is not 1, though Python says they are equal.
        neutral = any(value == item and type(value) is type(item) for item in refused[name])
        if value is not None and not neutral:
            raise ApiError(f"'{name}' is not supported.", param=name)
