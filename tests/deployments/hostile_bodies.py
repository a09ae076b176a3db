"""Makes requests as an attacker or a broken client would, the same ones for the same seed."""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from deployments.openai.openapi import BODIES
from tests.deployments.asgi_call import JSON_TYPE

Header = tuple[bytes, bytes]


class Hostile(NamedTuple):
    method: str
    path: str
    body: bytes
    headers: list[Header]


_USER = {"role": "user", "content": "x"}
_FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# What a body needs to get past its first check, so that one bad field is what is judged.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [_USER], "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/adapters": {"name": "x", "source": "/x"},
    "/v1/adapters/{name}/rollback": {},
    "/v1/adapters/aliases/{name}": {"target": "x"},
}
_TEXTS = [
    "",
    "\x00",
    "\u202e\ufeff\u0000",
    "\ud7ff\U0010ffff" * 20,
    "e\u0301" * 500,
    "A" * 3_000,
    "../../etc/passwd",
    "base:../x",
    "x@99999999999999999999",
    "x@-1",
    "{{ ''.__class__.__mro__ }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "'; DROP TABLE adapters; --",
    "(a+)+$",
    "((a{0,200}){0,200}){0,200}",
    "[" * 500,
    "(?P<x>.)(?P=x)",
    "${jndi:ldap://x}",
    "%s%n%x",
    "\r\nx-injected: 1",
    "<script>",
    "NaN",
    "true",
    "-0",
]
_NUMBERS = [0, -1, 1, 2, 127, 129, 1 << 31, 1 << 63, -(1 << 63), 10**40, 0.5, -0.0, 1e-300, 1e308]
_WORDS = ["user", "assistant", "system", "tool", "text", "function", "json_schema", "auto", "none"]
_SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}},
    {"anyOf": [{"type": "string"}] * 200},
    {"type": "string", "pattern": "((a{0,99}){0,99}){0,99}"},
    {"type": "string", "minLength": 10**9},
    {"type": "object", "properties": {str(i): {"enum": [i]} for i in range(100)}},
    {"type": "nothing", "maximum": "x"},
]
_KEYS = ["role", "content", "type", "text", "name", "function", "json", "regex", "choice", "schema"]
DEPTH = 3
_HEADERS = ["content-type", "authorization", "x-request-id", "idempotency-key", "traceparent"]
_ODD_BYTES = [b"", b"\xff\xfe\x00", b"Bearer " + b"\x80" * 200, b"a" * 9000, b"application/json; x"]


def hostile_requests(
    seed: int, count: int, paths: list[str], *, adapter: str = ""
) -> Iterator[Hostile]:
    """Yield so many requests to these routes, half of those that name no model to ``adapter``."""
    rng = random.Random(seed)
    routes = {(m, p): fields for m, p, fields in _routes() if p in paths}
    for _ in range(count):
        (method, path), fields = rng.choice(list(routes.items()))
        data = {**GOOD.get(path, {}), **_some_fields(rng, fields)}
        if "model" in fields and adapter and rng.random() < 0.5:
            data.setdefault("model", adapter)
        body = json.dumps(data).encode()
        if rng.random() < 0.15:
            body = _damaged(rng, body)
        yield Hostile(method.upper(), _filled(rng, path), body, _headers(rng))


def _routes() -> Iterator[tuple[str, str, list[str]]]:
    for (method, path), models in BODIES.items():
        fields = {name for model in models for name in model.model_fields}
        refused = {name for model in models for name in getattr(model, "refused", ())}
        yield method, path, sorted(fields | refused | {"unknown"})


def _some_fields(rng: random.Random, fields: list[str]) -> dict[str, Any]:
    names = rng.sample(fields, k=min(len(fields), rng.choice((0, 1, 1, 2, 5))))
    return {name: _value(rng, DEPTH) for name in names}


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(9 if depth else 5)
    if kind == 0:
        return rng.choice([None, True, False, [], {}])
    if kind == 1:
        return rng.choice(_NUMBERS)
    if kind == 2:
        return rng.choice(_TEXTS)
    if kind == 3:
        return rng.choice(_WORDS)
    if kind == 4:
        return rng.choice([_USER, [_USER] * 50, [_FUNCTION], [_FUNCTION] * 100, *_SCHEMAS])
    if kind == 5:
        # Lists of lists grow past the limit of bodies now and then, not past memory.
        return [_value(rng, depth - 1)] * rng.choice((1, 2, 300 if depth == DEPTH else 5))
    if kind == 6:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(_KEYS): _value(rng, depth - 1) for _ in range(3)}
    return {"type": rng.choice(_WORDS), rng.choice(_KEYS): _value(rng, depth - 1)}


def _damaged(rng: random.Random, body: bytes) -> bytes:
    where = rng.randrange(len(body) + 1)
    return rng.choice(
        [
            body[:where],
            body[:where] + bytes([rng.randrange(256)]) + body[where + 1 :],
            body[:where] + body,
            b"[" * 300 + body,
            body.replace(b"3", b"1e999").replace(b'"x"', b"NaN"),
            body.decode().encode("utf-16"),
        ]
    )


def _filled(rng: random.Random, path: str) -> str:
    names = ["x", "a/b", "%00", "%FF", "..%2f..", "x%40y", "%F0%9F%98%80", "operations", "x" * 300]
    query = rng.choice(["", "", "?limit=-1", "?force=maybe", "?%00=%ff", "?a=1&a=2"])
    return path.replace("{name}", rng.choice(names)) + query


def _headers(rng: random.Random) -> list[Header]:
    if rng.random() < 0.8:
        return [JSON_TYPE]
    return [JSON_TYPE, (rng.choice(_HEADERS).encode(), rng.choice(_ODD_BYTES))]
