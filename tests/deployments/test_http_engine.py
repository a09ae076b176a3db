"""The HTTP surface in front of a real engine with a tiny model."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch
from transformers import AutoModel

from deployments.backend import BaseModelInfo
from deployments.llm_server import LLMServer
from deployments.model_profile import ModelProfile, SamplingDefaults
from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig
from tests.deployments.http_client import Client, Json, assert_error
from tests.deployments.local_backend import LocalBackend
from tests.engine.tiny_tokenizer import save_tiny_tokenizer
from tests.tiny_models import MakeModel

COMPLETIONS = "/v1/completions"
PROMPT = "the-quick-brown-fox"
MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def engine(make_model: MakeModel) -> Iterator[AsyncEngine]:
    path = make_model("llama")
    save_tiny_tokenizer(path, vocab_size=131)
    config = EngineConfig(
        model=path,
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        num_threads=1,
        cache=CacheConfig(num_blocks=128),
    )
    engine = AsyncEngine(config)
    asyncio.run(engine.start())
    yield engine
    asyncio.run(engine.stop())


@pytest_asyncio.fixture
async def client(engine: AsyncEngine) -> AsyncIterator[Client]:
    base = BaseModelInfo(
        id="tiny",
        root="tiny",
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        created=0,
    )
    server = LLMServer("replica-1", engine, base)
    async with Client(LocalBackend(server)) as client:
        yield client


async def complete(client: Client, **body: object) -> Json:
    response = await client.post(COMPLETIONS, json={"prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    document: Json = response.json()
    return document


async def test_stream_and_whole_agree_with_logprobs_and_echo(client: Client) -> None:
    body: Json = {
        "prompt": [PROMPT, "jumps"],
        "temperature": 0,
        "max_tokens": 20,
        "ignore_eos": True,
        "logprobs": 3,
        "echo": True,
        "return_token_ids": True,
    }
    whole = await complete(client, **body)
    events = await client.events(COMPLETIONS, body)
    for choice in whole["choices"]:
        pieces = [
            each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [each for piece in pieces for each in piece["token_ids"]] == choice["token_ids"]
        shown = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [each for part in shown for each in part[name]] == choice["logprobs"][name]
        values = [each for part in shown for each in part["token_logprobs"]]
        # Batches differ between the two, so the last bits may.
        assert values[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], rel=1e-4)
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == len(PROMPT) + 20


async def test_greedy_logprobs_rank_the_chosen_token_first(client: Client) -> None:
    document = await complete(client, temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    logprobs = document["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert max(top, key=top.__getitem__) == token
        assert top[token] == value <= 0


async def test_seeded_sampling_repeats_and_choices_differ(client: Client) -> None:
    body: Json = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    first, second = await complete(client, **body), await complete(client, **body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    assert first["usage"]["completion_tokens"] == 36


async def test_output_is_clamped_to_the_context(client: Client) -> None:
    document = await complete(client, max_tokens=10_000, ignore_eos=True, temperature=0)
    assert document["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert document["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_fills_the_context_is_refused(client: Client, stream: bool) -> None:
    body = {"prompt": "x" * (MAX_MODEL_LEN + 1), "stream": stream}
    response = await client.post(COMPLETIONS, json=body)
    message = assert_error(response, 400, "input_tokens")["message"]
    assert str(MAX_MODEL_LEN) in message


async def test_stop_strings_cut_the_text(client: Client) -> None:
    body: Json = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    text = (await complete(client, **body))["choices"][0]["text"]
    stop = text[6:9]
    document = await complete(client, **body, stop=stop)
    choice = document["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_scoring_a_prompt_generates_nothing(client: Client) -> None:
    document = await complete(client, max_tokens=0, echo=True, logprobs=1)
    choice = document["choices"][0]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert document["usage"]["completion_tokens"] == 0


async def test_a_repeated_prompt_is_reported_as_cached(client: Client) -> None:
    body: Json = {"prompt": "a-prompt-of-more-than-two-blocks-of-tokens", "max_tokens": 1}
    await complete(client, **body)
    document = await complete(client, **body)
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def test_leaving_clients_free_the_engine(client: Client, engine: AsyncEngine) -> None:
    body: Json = {"prompt": [PROMPT] * 4, "n": 2, "max_tokens": 100, "ignore_eos": True}
    for stream in (False, True):
        request = asyncio.ensure_future(
            client.post(COMPLETIONS, json={**body, "stream": stream, "temperature": 1})
        )
        async with asyncio.timeout(10):
            while not engine.stats().num_running:  # noqa: ASYNC110 -- the engine is a thread
                await asyncio.sleep(0.001)
        request.cancel()
        async with asyncio.timeout(10):
            while engine.stats().num_running + engine.stats().num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    assert (await complete(client, max_tokens=1))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_embeddings_are_the_models_last_hidden_states(
    client: Client, make_model: MakeModel, pooling: str
) -> None:
    ids = [[5, 6, 7, 8], list(range(3, 100))]
    body: Json = {"input": ids, "pooling": pooling, "normalize": False}
    response = await client.post("/v1/embeddings", json=body)
    vectors = [item["embedding"] for item in response.json()["data"]]
    model = AutoModel.from_pretrained(make_model("llama"), dtype=torch.float32)
    with torch.no_grad():
        for token_ids, vector in zip(ids, vectors, strict=True):
            hidden = model(torch.tensor([token_ids])).last_hidden_state[0]
            expected = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
            torch.testing.assert_close(torch.tensor(vector), expected, atol=1e-4, rtol=1e-3)


async def test_a_model_without_a_chat_template_says_so(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]


async def test_structured_output_matches_and_a_bad_grammar_is_named(client: Client) -> None:
    document = await complete(client, structured_outputs={"regex": "[0-9]{5}"}, max_tokens=50)
    choice = document["choices"][0]
    assert choice["text"].isdigit() and len(choice["text"]) == 5
    assert choice["finish_reason"] == "stop"
    for field, value in {
        "structured_outputs": {"regex": "("},
        "guided_grammar": "start: nowhere",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "array", "uniqueItems": True}},
        },
    }.items():
        response = await client.post(COMPLETIONS, json={"prompt": PROMPT, field: value})
        assert_error(response, 400, field)


TEMPLATE = "{{ tools | length }}{% for m in messages %}-{{ m.content }}{% endfor %}"
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"$ref": "#/$defs/digit"}},
                "required": ["n"],
                "additionalProperties": False,
                "$defs": {"digit": {"enum": values}},
            },
        },
    }
    for name, values in (("one", [1, 2]), ("two", ["x"]))
]


@pytest.mark.parametrize("stream", [False, True])
async def test_required_and_named_calls_obey_their_own_schemas(
    engine: AsyncEngine, stream: bool
) -> None:
    base = BaseModelInfo(
        id="tiny",
        root="tiny",
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        created=0,
    )
    profile = ModelProfile(chat_template=TEMPLATE, generation=SamplingDefaults(max_tokens=110))
    server = LLMServer("replica-1", engine, base, profile=profile)
    body: Json = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "seed": 5}
    async with Client(LocalBackend(server)) as client:
        for choice in ("required", {"type": "function", "function": {"name": "two"}}):
            asked = {**body, "tool_choice": choice, "parallel_tool_calls": False}
            calls: list[Json] = [{"name": "", "arguments": ""}]
            if stream:
                for event in await client.events("/v1/chat/completions", asked):
                    for call in event["choices"][0]["delta"].get("tool_calls", ()):
                        for key, value in call["function"].items():
                            calls[call["index"]][key] += value
            else:
                response = await client.post("/v1/chat/completions", json=asked)
                calls = [
                    call["function"]
                    for call in response.json()["choices"][0]["message"]["tool_calls"]
                ]
            (call,) = calls
            allowed = {"one": [1, 2], "two": ["x"]}[call["name"]]
            assert json.loads(call["arguments"])["n"] in allowed
            assert choice == "required" or call["name"] == "two"


async def test_tools_without_a_place_in_the_template_are_refused(engine: AsyncEngine) -> None:
    base = BaseModelInfo(id="tiny", root="", max_model_len=128, vocab_size=131, created=0)
    profile = ModelProfile(chat_template="{{ messages[0].content }}")
    server = LLMServer("replica-1", engine, base, profile=profile)
    async with Client(LocalBackend(server)) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
        response = await client.post("/v1/chat/completions", json=body)
    assert_error(response, 400, "tools")
