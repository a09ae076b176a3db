"""Controllers for experiments: one whose news travel slowly, one that also breaks the promise."""

import asyncio
import random
from unittest.mock import patch

import ray

from deployments.cluster_protocol import Watch, WatchAnswer
from deployments.controller import Controller
from deployments.controller_actor import ControllerActor, Deployed, find_or_create_controller
from deployments.operations import Operation
from deployments.two_phase import TwoPhase

# Some answers to replicas are late by up to so much.
_MAX_DELAY_S = 0.4
_CHANCE_OF_DELAY = 0.3


class SlowController(ControllerActor):
    """Keeps the promise over a network that is slow at times."""

    async def watch(self, request: Watch) -> WatchAnswer:
        answer = await super().watch(request)
        if random.random() < _CHANCE_OF_DELAY:
            await asyncio.sleep(random.random() * _MAX_DELAY_S)
        return answer


class _HastyAgreement(TwoPhase):
    """Answers a change once it is in the journal, before the replicas have it."""

    async def settle(self, operation: Operation) -> None:
        self.finish(operation)


class HastyController(SlowController):
    """The mutation that the checker must find."""

    async def _open(self) -> Controller:
        controller = await super()._open()
        controller._agreement.__class__ = _HastyAgreement
        return controller


def start_controller(deployed: Deployed, actor_class: type[ControllerActor]) -> None:
    """Start a controller of this class before the application looks for its own."""
    # The production function is used as it is, with another class under its name.
    with patch("deployments.controller_actor.ControllerActor", actor_class):
        actor = find_or_create_controller(deployed)
    ray.get(actor.configure.remote(deployed))
