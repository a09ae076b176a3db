"""Prompts become the tokens that the tokenizer and the chat template say, and tokens bytes."""

import asyncio
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from deployments.generation import PromptInput
from deployments.prompt_encoder import PromptEncoder
from deployments.token_bytes import TokenBytes
from engine.errors import InvalidRequestError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{{ extra }}"
)
SAMPLE = "Grüße, 世界 🙂 and <s>plain</s> text\n\twith\x00control"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox, user: assistant:"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def chat(**fields: Any) -> PromptInput:
    fields.setdefault("messages", ({"role": "user", "content": "hi"},))
    return PromptInput(**fields)


async def rendered(encoder: PromptEncoder, prompt: PromptInput, **options: Any) -> str:
    return await encoder.decode(await encoder.encode(prompt, **options))


async def test_chat_template_writes_the_prompt(byte_level: PreTrainedTokenizerFast) -> None:
    encoder = PromptEncoder(byte_level)
    assert await rendered(encoder, chat()) == "<s>user: hi\nassistant:"
    assert await rendered(encoder, chat(add_generation_prompt=False)) == "<s>user: hi\n"
    kwargs = {"extra": " sure"}
    assert (await rendered(encoder, chat(chat_template_kwargs=kwargs))).endswith("assistant: sure")


async def test_template_of_the_request_goes_before_the_adapters_before_the_models(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    encoder = PromptEncoder(byte_level)
    assert await rendered(encoder, chat(), chat_template="adapter") == "adapter"
    own = chat(chat_template="request")
    assert await rendered(encoder, own, chat_template="adapter") == "request"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% bad",
        "{{ 1 / none }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[0].content.no.such.thing }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
async def test_template_that_fails_is_the_requests_fault(
    byte_level: PreTrainedTokenizerFast, template: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await PromptEncoder(byte_level).encode(chat(chat_template=template))
    assert caught.value.param == "messages"


async def test_model_without_a_template_cannot_chat(byte_fallback: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        await PromptEncoder(byte_fallback).encode(chat())


async def test_long_prompts_do_not_hold_up_short_ones_forever(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    encoder = PromptEncoder(byte_level)
    long = encoder.encode(PromptInput(text="fox " * 50_000))
    short = encoder.encode(PromptInput(text="fox"))
    lengths = [len(ids) for ids in await asyncio.gather(long, short)]
    assert lengths[0] > lengths[1]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
async def test_bytes_of_tokens_join_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    encoder = PromptEncoder(tokenizer)
    text = SAMPLE if kind == "byte_level" else "aé世🙂"
    token_ids = await encoder.encode(PromptInput(text=text))
    assert len(token_ids) > 4
    assert b"".join(await encoder.token_bytes(token_ids)).decode() == text


def test_special_and_unknown_tokens(
    byte_level: PreTrainedTokenizerFast, byte_fallback: PreTrainedTokenizerFast
) -> None:
    spelled = TokenBytes(byte_level)
    assert spelled[byte_level.bos_token_id] == b"<s>"
    assert spelled[10_000_000] == b""
    marked = TokenBytes(byte_fallback)
    assert marked[byte_fallback.convert_tokens_to_ids("\u2581a")] == b" a"
