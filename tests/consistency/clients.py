"""Clients that use the HTTP surface and write down what they saw."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.consistency import routes
from tests.consistency.adapter_makers import AdapterMaker, content_of
from tests.consistency.history import Answer, Change, History, Kind, Outcome

_GENERATION_HEADER = "x-lorafleet-adapter-generation"
_GENERATE_TIMEOUT_S = 20.0
_CHANGE_TIMEOUT_S = 30.0
# Some clients do not wait for their changes, which go on without them.
_IMPATIENT_S = 0.05
_CHANCE_OF_IMPATIENCE = 0.05
# Pushes among replaces, forced unloads among unloads.
_CHANCE_OF_OTHER_ROUTE = 0.3
# What a client does after a refusal that is not an answer.
_BACK_OFF_S = 0.1
_MAX_TOKENS = 6
_MAX_PROMPTS = 4


@dataclass(slots=True)
class Recorder:
    """The history, and the requests that got no usable answer: when, and why."""

    history: History = field(default_factory=History)
    failures: list[tuple[float, str]] = field(default_factory=list)
    broken: int = 0

    def fail(self, reason: str) -> None:
        """Note a request that got no answer."""
        self.failures.append((time.monotonic(), reason))

    def reasons(self) -> dict[str, int]:
        """How often each."""
        return dict(Counter(reason for _, reason in self.failures))


class Clients:
    """Generates under names and changes what they mean, until told to stop.

    ``aliases`` are those names that are aliases: each move of one is to an adapter of its own.
    """

    def __init__(
        self,
        url: str,
        adapters: AdapterMaker,
        names: list[str],
        recorder: Recorder,
        seed: int,
        *,
        aliases: Collection[str] = (),
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=_GENERATE_TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )
        self._adapters = adapters
        self._names = names
        self._recorder = recorder
        self._chance = random.Random(seed)
        self._aliases = frozenset(aliases)
        self._targets: list[str] = []
        self._num_versions = 0
        self.is_over = asyncio.Event()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def keep_generating(self, pause_s: float = 0.0) -> None:
        """One client after the other, under names at random."""
        while not self.is_over.is_set():
            try:
                await self.generate(self._chance.choice(self._names))
            except httpx.HTTPError as error:
                self._recorder.fail(f"generate: {type(error).__name__}")
                await asyncio.sleep(_BACK_OFF_S)
            await asyncio.sleep(pause_s)

    async def keep_changing(self, names: list[str], pause_s: float) -> None:
        """Load, replace and unload under some names."""
        while not self.is_over.is_set():
            kind = self._chance.choices(list(Kind), weights=[2, 5, 2])[0]
            is_impatient = self._chance.random() < _CHANCE_OF_IMPATIENCE
            await self.change(self._chance.choice(names), kind, is_impatient=is_impatient)
            await asyncio.sleep(self._chance.random() * 2 * pause_s)

    async def generate(self, name: str) -> None:
        """One request; an answer that breaks off still shows what it showed."""
        num_prompts = self._chance.randint(1, _MAX_PROMPTS)
        body = {
            "model": name,
            "prompt": ["t5 t6 t7"] * num_prompts,
            "max_tokens": self._chance.randint(1, _MAX_TOKENS),
            "temperature": 0,
            "stream": self._chance.random() < 0.5,
        }
        started = time.monotonic()
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            answered = time.monotonic()
            if response.status_code != 200:
                await self._refused(name, started, response)
                return
            text = ""
            try:
                async for part in _texts(response):
                    text += part
            except (httpx.HTTPError, _BrokenOffError):
                self._recorder.broken += 1
        contents = self._adapters.contents(text)
        if contents:
            self._recorder.history.answers.append(
                Answer(
                    name=name,
                    started=started,
                    answered=answered,
                    contents=contents,
                    generation=int(response.headers[_GENERATION_HEADER]),
                    num_generations=num_prompts,
                )
            )

    async def _refused(self, name: str, started: float, response: httpx.Response) -> None:
        await response.aread()
        answered = time.monotonic()
        error = _error_of(response)
        if response.status_code == 404 and error.get("param") == "model":
            self._recorder.history.answers.append(
                Answer(name=name, started=started, answered=answered)
            )
        else:
            self._recorder.fail(f"generate: {_failure(response)}")
            await asyncio.sleep(_BACK_OFF_S)

    async def change(self, name: str, kind: Kind, *, is_impatient: bool = False) -> Change | None:
        """One change, recorded with how it was answered."""
        if name in self._aliases and kind is not Kind.UNLOAD:
            return await self.move(name, is_impatient=is_impatient)
        if name in self._aliases:
            return await self._record(name, kind, None, routes.drop(name), is_impatient)
        content, call = await self._call_for(name, kind)
        return await self._record(name, kind, content, call, is_impatient)

    async def _record(
        self, name: str, kind: Kind, content: str | None, call: routes.Call, is_impatient: bool
    ) -> Change:
        started = time.monotonic()
        try:
            response = await self._send(call, _IMPATIENT_S if is_impatient else _CHANGE_TIMEOUT_S)
            outcome = _outcome(response, kind)
            if outcome is Outcome.UNKNOWN:
                self._recorder.fail(f"{kind.value}: {_failure(response)}")
        except httpx.HTTPError as error:
            outcome = Outcome.UNKNOWN
            cause = "left early" if is_impatient else type(error).__name__
            self._recorder.fail(f"{kind.value}: {cause}")
        change = Change(
            name=name,
            kind=kind,
            content=content,
            started=started,
            ended=time.monotonic(),
            outcome=outcome,
        )
        self._recorder.history.changes.append(change)
        return change

    async def move(self, alias: str, *, is_impatient: bool = False) -> Change | None:
        """Have an alias stand for a new adapter: one change; None if that cannot be loaded."""
        index, path = await self._write_version()
        target = f"target-{index}"
        try:
            loaded = await self._send(routes.load(target, path, in_place=True, pin=False))
        except httpx.HTTPError:
            return None
        if loaded.status_code != 200:
            return None
        call = routes.point(alias, target)
        change = await self._record(alias, Kind.REPLACE, content_of(index), call, is_impatient)
        self._targets.append(target)
        await self._unload_targets()
        return change

    async def _unload_targets(self) -> None:
        """Unload what no alias stands for any more; the others are refused."""
        waiting, self._targets = self._targets, []
        for target in waiting:
            try:
                response = await self._send(routes.unload(target))
            except httpx.HTTPError:
                self._targets.append(target)
            else:
                if response.status_code not in (200, 404):
                    self._targets.append(target)

    async def _call_for(self, name: str, kind: Kind) -> tuple[str | None, routes.Call]:
        """One of the routes that do this, and the content that it puts in service."""
        is_rare = self._chance.random() < _CHANCE_OF_OTHER_ROUTE
        if kind is Kind.UNLOAD:
            return None, routes.force_out(name) if is_rare else routes.unload(name)
        index, path = await self._write_version()
        if kind is Kind.REPLACE and is_rare:
            return content_of(index), routes.push(name, path)
        is_pinned = self._chance.random() < 0.2
        call = routes.load(name, path, in_place=kind is Kind.REPLACE, pin=is_pinned)
        return content_of(index), call

    async def _write_version(self) -> tuple[int, Path]:
        index = self._num_versions
        self._num_versions += 1
        return index, await asyncio.to_thread(self._adapters.write, index)

    async def _send(
        self, call: routes.Call, timeout_s: float = _CHANGE_TIMEOUT_S
    ) -> httpx.Response:
        return await self._http.request(call.method, call.url, timeout=timeout_s, **call.content)


class _BrokenOffError(Exception):
    """A stream that ended with an error."""


async def _texts(response: httpx.Response) -> AsyncIterator[str]:
    if "text/event-stream" not in response.headers["content-type"]:
        await response.aread()
        for choice in response.json()["choices"]:
            yield choice["text"]
        return
    async for line in response.aiter_lines():
        if line in ("", "data: [DONE]"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise _BrokenOffError(event["error"])
        for choice in event["choices"]:
            yield choice["text"]


def _outcome(response: httpx.Response, kind: Kind) -> Outcome:
    error = _error_of(response)
    if response.status_code == 200:
        return Outcome.DONE
    if response.status_code == 400 and "already been loaded" in error.get("message", ""):
        return Outcome.TAKEN
    is_named = error.get("param") in ("lora_name", "model")
    if response.status_code == 404 and is_named and kind is Kind.UNLOAD:
        return Outcome.MISSING
    if response.status_code == 400:
        return Outcome.REJECTED
    return Outcome.UNKNOWN


def _failure(response: httpx.Response) -> str:
    """The status, and whether the application said so or the proxy in front of it."""
    source = "application" if _error_of(response) else "proxy"
    return f"{response.status_code} of the {source}"


def _error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in our own envelope; Serve's proxy has answers of its own without one."""
    try:
        document = response.json()
    except ValueError:
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}
