"""POST /v1/completions: what comes back, whole and streamed."""

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.deployments.fake_backend import EOS, FakeBackend
from tests.deployments.http_client import Client, Json, assert_error

PATH = "/v1/completions"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def client(backend: FakeBackend) -> AsyncIterator[Client]:
    async with Client(backend) as client:
        yield client


async def complete(client: Client, **body: object) -> Json:
    response = await client.post(PATH, json={"model": "base", **body})
    assert response.status_code == 200, response.text
    document: Json = response.json()
    return document


async def test_whole_response_has_every_key(client: Client) -> None:
    document = await complete(client, prompt="Say", max_tokens=5)
    assert re.fullmatch(r"cmpl-[0-9a-f]{16}", document.pop("id"))
    assert isinstance(document.pop("created"), int)
    assert document.pop("system_fingerprint").startswith("lorafleet-")
    assert document == {
        "object": "text_completion",
        "model": "base",
        "choices": [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "usage": {
            "prompt_tokens": 3,
            "total_tokens": 8,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": None,
        },
    }


async def test_defaults_are_those_of_vllm(client: Client, backend: FakeBackend) -> None:
    await complete(client, prompt="x")
    request = backend.requests[-1]
    assert request.adapter is None
    assert request.params.max_tokens == 16
    assert request.params.temperature == 1.0
    assert request.add_special_tokens


async def test_max_tokens_null_runs_to_the_end_of_the_context(
    client: Client, backend: FakeBackend
) -> None:
    await complete(client, prompt="x", max_tokens=None)
    assert backend.requests[-1].params.max_tokens is None


async def test_null_means_not_given(client: Client, backend: FakeBackend) -> None:
    await complete(client, prompt="x", temperature=None, n=None, stop=None, stream=None, seed=None)
    assert backend.requests[-1].params.temperature == 1.0


async def test_every_sampling_field_reaches_the_engine(
    client: Client, backend: FakeBackend
) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "skip_special_tokens": False,
    }
    extra = {"stop": "x", "stop_token_ids": [5], "logit_bias": {"7": -1}}
    request = {"prompt": "x", "priority": 3, "add_special_tokens": False, **given, **extra}
    await complete(client, **request)
    sent = backend.requests[-1]
    assert {name: getattr(sent.params, name) for name in given} == given
    assert sent.params.stop == ("x",)
    assert sent.params.stop_token_ids == (5,)
    assert sent.params.logit_bias == ((7, -1.0),)
    assert (sent.priority, sent.add_special_tokens) == (3, False)


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [(None, "ab")]),
        (["ab", "c"], [(None, "ab"), (None, "c")]),
        ([97, 98], [((97, 98), None)]),
        ([[97], [98, 99]], [((97,), None), ((98, 99), None)]),
    ],
)
async def test_prompt_forms(
    client: Client, backend: FakeBackend, prompt: object, sent: list[object]
) -> None:
    document = await complete(client, prompt=prompt, max_tokens=2)
    assert [(each.prompt.token_ids, each.prompt.text) for each in backend.requests] == sent
    assert [choice["index"] for choice in document["choices"]] == list(range(len(sent)))
    assert document["usage"]["completion_tokens"] == 2 * len(sent)
    assert len({each.request_id for each in backend.requests}) == len(sent)


async def test_choices_are_ordered_by_prompt_then_n(client: Client) -> None:
    document = await complete(client, prompt=["a", "bb"], n=2, max_tokens=3, echo=True)
    texts = [choice["text"] for choice in document["choices"]]
    assert texts == ["aHel", "aHel", "bbHel", "bbHel"]
    assert document["usage"]["prompt_tokens"] == 3
    assert document["usage"]["completion_tokens"] == 12


async def test_cached_prompt_tokens_are_reported(client: Client) -> None:
    document = await complete(client, prompt=["abcde", "abcde"], n=2)
    assert document["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_logprobs(client: Client) -> None:
    document = await complete(client, prompt="x", max_tokens=2, logprobs=2)
    assert document["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-2.0, -2.0],
        "tokens": ["H", "e"],
        "top_logprobs": [
            {"!": -0.5, "bytes:\\x82": -1.0, "H": -2.0},
            {"!": -0.5, "bytes:\\x82": -1.0, "e": -2.0},
        ],
    }


async def test_logprobs_zero_shows_the_chosen_token_alone(client: Client) -> None:
    document = await complete(client, prompt="x", max_tokens=1, logprobs=0)
    assert document["choices"][0]["logprobs"]["top_logprobs"] == [{"H": -2.0}]


async def test_text_offsets_count_characters_not_bytes(
    client: Client, backend: FakeBackend
) -> None:
    backend.reply = "é€x"
    document = await complete(client, prompt="x", max_tokens=6, logprobs=0)
    choice = document["choices"][0]
    assert choice["text"] == "é€x"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]


async def test_tokens_as_token_ids(client: Client) -> None:
    document = await complete(
        client, prompt="x", max_tokens=1, logprobs=1, return_tokens_as_token_ids=True
    )
    logprobs = document["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:72"]
    assert logprobs["top_logprobs"] == [{"token_id:33": -0.5, "token_id:72": -2.0}]


async def test_token_spellings_are_asked_once(client: Client, backend: FakeBackend) -> None:
    await complete(client, prompt="xy", logprobs=2, prompt_logprobs=1)
    await complete(client, prompt="xy", logprobs=2, prompt_logprobs=1)
    assert backend.token_lookups == 1


async def test_echo_with_logprobs_puts_the_prompt_first(client: Client) -> None:
    document = await complete(client, prompt="ab", max_tokens=1, echo=True, logprobs=1)
    choice = document["choices"][0]
    assert choice["text"] == "abH"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -2.0, -2.0],
        "tokens": ["a", "b", "H"],
        "top_logprobs": [None, {"!": -0.5, "b": -2.0}, {"!": -0.5, "H": -2.0}],
    }
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["98"] == {
        "logprob": -2.0,
        "rank": 3,
        "decoded_token": "b",
    }


async def test_echo_of_token_ids_and_of_a_truncated_prompt(client: Client) -> None:
    ids = await complete(client, prompt=[97, 98], max_tokens=1, echo=True)
    assert ids["choices"][0]["text"] == "abH"
    cut = await complete(client, prompt="abc", max_tokens=1, echo=True, truncate_prompt_tokens=2)
    assert cut["choices"][0]["text"] == "bcH"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_new_tokens_scores_the_prompt(client: Client, stream: bool) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 0}
    if stream:
        options = {"include_usage": True}
        events = await client.events(PATH, {**body, "stream_options": options})
        assert len(events) == 2
        choice, usage = events[0]["choices"][0], events[1]["usage"]
    else:
        document = await complete(client, **body)
        choice, usage = document["choices"][0], document["usage"]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert usage["completion_tokens"] == 0


async def test_truncation_minus_one_leaves_room_for_the_output(
    client: Client, backend: FakeBackend
) -> None:
    await complete(client, prompt="x" * 500, max_tokens=14, truncate_prompt_tokens=-1)
    assert backend.requests[-1].truncate_prompt_tokens == 50


async def test_token_ids_are_returned_on_request(client: Client) -> None:
    document = await complete(client, prompt="ab", return_token_ids=True)
    choice = document["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == [*b"Hello world", EOS]
    assert choice["finish_reason"] == "stop"


async def test_stream_of_text(client: Client) -> None:
    events = await client.events(PATH, {"prompt": "ab"})
    assert len({(each["id"], each["created"], each["model"]) for each in events}) == 1
    assert all(each["object"] == "text_completion" for each in events)
    assert "".join(each["choices"][0]["text"] for each in events) == "Hello world"
    first = events[0]["choices"][0]
    assert first.pop("text").startswith("He")
    assert first == {
        "index": 0,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    *earlier, last = events
    assert not any(each["choices"][0]["finish_reason"] for each in earlier)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert not any("usage" in each for each in events)
    assert not any("system_fingerprint" in each for each in earlier)
    assert last["system_fingerprint"].startswith("lorafleet-")


async def test_length_rides_on_the_last_text(client: Client) -> None:
    events = await client.events(PATH, {"prompt": "ab", "max_tokens": 4})
    last = events[-1]["choices"][0]
    assert last["text"].endswith("ll")
    assert last["finish_reason"] == "length"


async def test_stream_shows_half_a_character_never_and_empty_text_never(
    client: Client, backend: FakeBackend
) -> None:
    backend.reply, backend.per_item = "€x", 1
    events = await client.events(PATH, {"prompt": "ab", "max_tokens": 4})
    texts = [each["choices"][0]["text"] for each in events]
    assert "".join(texts) == "€x"
    assert all(texts)


async def test_stream_usage(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["abcd", "x"], "max_tokens": 4, "stream_options": options}
    *events, last = await client.events(PATH, body)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 5
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["total_tokens"] == 13
    assert "system_fingerprint" in last
    final = {each["choices"][0]["index"]: each["usage"] for each in events}
    assert final == {
        0: {"prompt_tokens": 4, "total_tokens": 8, "completion_tokens": 4},
        1: {"prompt_tokens": 1, "total_tokens": 5, "completion_tokens": 4},
    }


async def test_continuous_usage_needs_include_usage(client: Client) -> None:
    options = {"continuous_usage_stats": True}
    events = await client.events(PATH, {"prompt": "a", "stream_options": options})
    assert not any("usage" in each for each in events)


@pytest.mark.parametrize("per_item", [1, 2, 5, 50])
async def test_streamed_pieces_make_the_whole(
    client: Client, backend: FakeBackend, per_item: int
) -> None:
    backend.per_item, backend.reply = per_item, "naïve €"
    body: Json = {"prompt": ["ab", "c"], "n": 2, "logprobs": 2, "echo": True}
    body["return_token_ids"] = True
    whole = await complete(client, **body)
    events = await client.events(PATH, body)
    for index, choice in enumerate(whole["choices"]):
        pieces = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [each for piece in pieces for each in piece["token_ids"]] == choice["token_ids"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            shown = [piece["logprobs"][name] for piece in pieces if piece["logprobs"]]
            assert [each for part in shown for each in part] == values


async def test_headers_name_replica_generation_and_request(
    client: Client, backend: FakeBackend
) -> None:
    backend.register("sql", generation=7)
    body = {"model": "sql", "prompt": "x"}
    for stream in (False, True):
        response = await client.post(
            PATH, json={**body, "stream": stream}, headers={"x-request-id": "mine-1"}
        )
        assert response.headers["x-lorafleet-replica"] == "replica-1"
        assert response.headers["x-lorafleet-adapter-generation"] == "7"
        assert response.headers["x-request-id"] == "mine-1"
    base = await client.post(PATH, json={"prompt": "x"}, headers={"x-request-id": "a b\tc"})
    assert base.headers["x-lorafleet-adapter-generation"] == "0"
    assert re.fullmatch("[0-9a-f]{32}", base.headers["x-request-id"])


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("", None),
        (None, None),
        ("base", None),
        ("team/sql", "team/sql"),
        ("base:team/sql", "team/sql"),
        ("team/sql@4", "team/sql@4"),
        ("base:team/sql@4", "team/sql@4"),
    ],
)
async def test_model_field(
    client: Client, backend: FakeBackend, model: str | None, adapter: str | None
) -> None:
    backend.register("team/sql", generation=4)
    document = await complete(client, model=model, prompt="x")
    assert backend.requests[-1].adapter == adapter
    assert document["model"] == (model or "base")


async def test_prompts_of_one_request_are_served_by_one_version(
    client: Client, backend: FakeBackend
) -> None:
    backend.register("sql", generation=2)
    # A replace falls between the starts of the first attempt; the second sees one version.
    backend.generations = [1, 2]
    response = await client.post(PATH, json={"model": "sql", "prompt": ["a", "b"]})
    assert response.status_code == 200
    assert response.headers["x-lorafleet-adapter-generation"] == "2"
    assert len(backend.requests) == 4
    assert len(backend.closed) == 4


async def test_endless_replacing_is_unavailable_not_mixed(
    client: Client, backend: FakeBackend
) -> None:
    backend.register("sql")
    backend.generations = list(range(100, 200))
    response = await client.post(PATH, json={"model": "sql", "prompt": ["a", "b"]})
    assert_error(response, 503, None)
    assert response.headers["retry-after"] == "1"
    assert len(backend.closed) == len(backend.requests)
