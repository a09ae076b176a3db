"""What OpenAI's own client offers beyond plain calls, on the running demo."""

import math

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

pytestmark = [pytest.mark.ray, pytest.mark.demo, pytest.mark.timeout(400)]

BASE = "smollm2-135m-instruct"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How are you?"}]


class Mood(BaseModel):
    happy: bool
    stars: int


def test_chats_are_parsed_whole_and_while_they_come(client: openai.OpenAI) -> None:
    for model in (BASE, "sentiment", f"{BASE}:sentiment"):
        chat = client.chat.completions.parse(
            model=model, messages=MESSAGES, response_format=Mood, max_tokens=100, temperature=0
        )
        assert isinstance(chat.choices[0].message.parsed, Mood)
        with client.chat.completions.stream(
            model=model, messages=MESSAGES, response_format=Mood, max_tokens=100, temperature=0
        ) as stream:
            done = [event for event in stream if event.type == "content.done"]
            final = stream.get_final_completion()
        assert done[0].parsed == final.choices[0].message.parsed == chat.choices[0].message.parsed


async def test_responses_are_parsed_asynchronously(async_client: openai.AsyncOpenAI) -> None:
    response = await async_client.responses.parse(
        model="sentiment", input="How are you?", text_format=Mood, max_output_tokens=100
    )
    assert isinstance(response.output_parsed, Mood)
    async with async_client.responses.stream(
        model="sentiment", input="How are you?", text_format=Mood, max_output_tokens=100
    ) as stream:
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert Mood.model_validate_json("".join(deltas)) == final.output_parsed


async def test_vectors_are_the_adapters_by_last_token_or_mean(
    async_client: openai.AsyncOpenAI,
) -> None:
    vectors = [
        (
            await async_client.embeddings.create(
                model=model, input=["SELECT 1", "Ahoy!"], extra_body={"pooling": pooling}
            )
        )
        .data[0]
        .embedding
        for model in (BASE, "sql")
        for pooling in ("last", "mean")
    ]
    for vector in vectors:
        assert math.fsum(value * value for value in vector) == pytest.approx(1, abs=1e-4)
    for index, left in enumerate(vectors):
        for right in vectors[index + 1 :]:
            assert math.dist(left, right) > 0.01
