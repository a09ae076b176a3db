"""Hundreds of malformed requests over a real socket: each gets a 4xx, and the server stays well."""

import json
import random
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from deployments.http_app import create_http_app
from deployments.openai.settings import HttpSettings
from tests.deployments.fake_backend import FakeBackend
from tests.deployments.http_client import Json, serving

SEED = 20261130
MAX_BODY_BYTES = 100_000
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
GOOD: dict[str, Json] = {
    COMPLETIONS: {"model": "base", "prompt": "x"},
    CHAT: {"model": "base", "messages": [{"role": "user", "content": "x"}]},
    LOAD: {"lora_name": "x", "lora_path": "/x"},
    UNLOAD: {"lora_name": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}

# For each kind of field, values that are never right for it.
NOT_INT = ["1", 1.5, True, [], {}, 10**30, -(10**30)]
NOT_FLOAT = ["1", True, [], {}]
NOT_BOOL = ["true", 1, 0, [], {}, 1.0]
NOT_STR = [1, True, [], {}, 1.5, ["x"]]
NOT_LIST = [1, True, {}, 1.5]
NOT_DICT = [1, True, [], "x", 1.5]

FIELDS: dict[str, list[object]] = {
    **dict.fromkeys(["n", "top_k", "min_tokens", "max_tokens", "seed", "priority"], NOT_INT),
    **dict.fromkeys(["prompt_logprobs", "truncate_prompt_tokens"], NOT_INT),
    **dict.fromkeys(["temperature", "top_p", "min_p", "repetition_penalty"], NOT_FLOAT),
    **dict.fromkeys(["presence_penalty", "frequency_penalty"], NOT_FLOAT),
    **dict.fromkeys(["stream", "echo", "ignore_eos", "skip_special_tokens"], NOT_BOOL),
    **dict.fromkeys(["include_stop_str_in_output", "return_token_ids"], NOT_BOOL),
    "model": [*NOT_STR, "\u0000", "../../etc/passwd", "x" * 5000, "base@1", "{{7*7}}"],
    "user": NOT_STR,
    "stop": [*NOT_LIST, [1], [[]], [""], "", [{}]],
    "stop_token_ids": [*NOT_LIST, ["x"], [-1], [10**12], [1.5], [[1]]],
    "logit_bias": [*NOT_DICT, {"x": 1}, {"1": "x"}, {"1": None}, {"1": []}, {"-1": 1}],
    "stream_options": [*NOT_DICT, {"include_usage": 1}, {"include_usage": "x"}],
}
RANGES: list[tuple[str, object]] = [
    ("temperature", -0.1),
    ("top_p", -1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", -0.1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("min_tokens", -1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("seed", 1 << 63),
    ("truncate_prompt_tokens", -5),
]
BROKEN_JSON = [
    b"",
    b" ",
    b"{",
    b"}",
    b"null",
    b"[]",
    b'"x"',
    b"1",
    b"{'prompt': 'x'}",
    b'{"prompt": "x",}',
    b'{"prompt": "x"} {}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "n": ' + b"9" * 10_000 + b"}",
    b'{"prompt": "x", "temperature": 0x10}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\xc0\xaf"}',
    b'{"prompt": "\x00"}',
    b'{"prompt": "\n"}',
    b'{"prompt": "x\\q"}',
    b"\xef\xbb\xbf" + b'{"prompt": "x"}',
    json.dumps({"prompt": "x"}).encode("utf-16"),
    json.dumps({"prompt": "x"}).encode("utf-32"),
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"prompt": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    b"[" * 40_000,
    b"\x1f\x8b\x08\x00\x00",
    b"x" * (MAX_BODY_BYTES + 1),
]
CONTENT_TYPES = ["text/plain", "application/xml", "multipart/form-data; boundary=x", "", "json"]

# Well-formed, but no finite number.
OVERFLOWS = [b"1e999", b"-1e999"]

Case = tuple[str, str, dict[str, str], bytes]


def cases() -> list[Case]:
    """Every malformed request, as method, path, headers and body."""
    json_type = {"content-type": "application/json"}

    def post(path: str, body: object) -> Case:
        return ("POST", path, json_type, json.dumps(body).encode())

    made: list[Case] = []
    for path in (COMPLETIONS, CHAT):
        fields = [(name, value) for name, values in FIELDS.items() for value in values]
        made += [post(path, {**GOOD[path], name: value}) for name, value in fields + RANGES]
        made += [
            (
                "POST",
                path,
                json_type,
                json.dumps(GOOD[path])[:-1].encode() + b', "top_p": %b}' % number,
            )
            for number in OVERFLOWS
        ]
    for path, good in GOOD.items():
        made += [("POST", path, json_type, body) for body in BROKEN_JSON]
        made += [("POST", path, {"content-type": kind}, b"{}") for kind in CONTENT_TYPES]
        made += [(method, path, {}, b"") for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS")]
        for name in good:
            missing = {key: value for key, value in good.items() if key != name}
            if name != "model":
                made.append(post(path, missing))
            made += [post(path, {**good, name: value}) for value in (1, 1.5, True, {}, [[[]]])]
    return made


def random_cases(rng: random.Random, count: int) -> list[Case]:
    """Bodies of several faults at once, and bytes cut or flipped at random places."""
    made: list[Case] = []
    for _ in range(count):
        path = rng.choice([COMPLETIONS, CHAT])
        names = rng.sample(sorted(FIELDS), k=3)
        faults = {name: rng.choice(FIELDS[name]) for name in names}
        body = json.dumps({**GOOD[path], **faults}).encode()
        if rng.random() < 0.5:
            body = body[: rng.randrange(len(body))]
        made.append(("POST", path, {"content-type": "application/json"}, body))
    for path in ("/v1/../etc", "/v1//completions", "/%00", "/v1/completions%2f", "/\u00e9", "/v2"):
        made += [(method, path, {}, b"") for method in ("GET", "POST")]
    return made


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_http_app(FakeBackend(), HttpSettings(max_body_bytes=MAX_BODY_BYTES))
    with serving(app) as url:
        yield url


def test_malformed_requests_get_4xx_in_the_envelope_and_harm_nobody(url: str) -> None:
    everything = cases() + random_cases(random.Random(SEED), 200)
    assert len(everything) > 600
    with httpx.Client(base_url=url) as client:
        for method, path, headers, body in everything:
            response = client.request(method, path, headers=headers, content=body)
            shown = f"{method} {path} {headers} {body[:200]!r}: {response.status_code}"
            assert 400 <= response.status_code < 500, shown
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}, shown
            assert error["code"] == response.status_code, shown
            assert len(error["message"]) < 2100, shown
            assert response.headers["x-request-id"], shown
        for path in (COMPLETIONS, CHAT):
            assert client.post(path, json=GOOD[path]).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: application/json\r\nContent-Length: 99999999999999999999\r\n\r\n",
    ],
)
def test_broken_http_harms_nobody(url: str, raw: bytes) -> None:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert not answer.startswith(b"HTTP/1.1 5")
    assert httpx.get(f"{url}/health").status_code == 200
