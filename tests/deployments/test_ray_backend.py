"""What the backend makes of calls that end in ways of Ray's own. No cluster is needed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from deployments import ray_backend
from deployments.config import DeploymentConfig
from deployments.controller_actor import Deployed
from deployments.errors import ReplicaUnavailableError
from deployments.generation import GenerateRequest, GenerationStart, PromptInput
from deployments.ray_backend import RayBackend
from engine.sampling_params import SamplingParams

START = GenerationStart(replica_id="r", adapter_name=None, generation=0, prompt_token_ids=(1,))
REQUEST = GenerateRequest(
    request_id="a", prompt=PromptInput(text="hi"), params=SamplingParams(), adapter=None
)


class Call:
    """A call of a replica that waits for ever or, as Serve shows it, was cancelled there."""

    def __init__(self, *, is_cancelled: bool) -> None:
        self._is_cancelled = is_cancelled
        self.was_cancelled_by_us = False

    async def _end(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        await asyncio.Event().wait()

    def __await__(self) -> Any:
        return self._end().__await__()

    async def __aiter__(self) -> AsyncIterator[GenerationStart]:
        await self._end()
        yield START

    def cancel(self) -> None:
        self.was_cancelled_by_us = True


class Handle:
    """As much of a deployment handle as the backend uses."""

    def __init__(self, *, is_cancelled: bool) -> None:
        self._is_cancelled = is_cancelled
        self.calls: list[Call] = []
        self.called = asyncio.Event()
        self.generate = self.base_model = self

    def options(self, **_: object) -> "Handle":
        return self

    def remote(self, *_: object) -> Call:
        self.calls.append(Call(is_cancelled=self._is_cancelled))
        self.called.set()
        return self.calls[-1]


def make_backend(handle: Handle) -> RayBackend:
    deployed = Deployed(config=DeploymentConfig(model="m"))
    return RayBackend(handle, deployed)


async def first_item(backend: RayBackend) -> object:
    return await anext(aiter(backend.generate(REQUEST)))


async def test_a_request_cancelled_at_the_replica_is_tried_again_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_backend, "_RETRY_DELAYS_S", (0.0, 0.0))
    handle = Handle(is_cancelled=True)
    with pytest.raises(ReplicaUnavailableError):
        await first_item(make_backend(handle))
    assert len(handle.calls) == 3


async def test_a_question_cancelled_at_the_replica_is_an_error() -> None:
    with pytest.raises(ReplicaUnavailableError):
        await make_backend(Handle(is_cancelled=True)).base_model()


async def test_a_caller_that_is_cancelled_cancels_its_call() -> None:
    handle = Handle(is_cancelled=False)
    caller = asyncio.ensure_future(first_item(make_backend(handle)))
    await handle.called.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert handle.calls[0].was_cancelled_by_us
