"""Models whose ranks are threads; every test's threads end with it."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from engine.models import loader
from tests.engine.parallel.ranks import ThreadedRanks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ThreadedRanks]]:
    made: list[ThreadedRanks] = []
    lock = threading.Lock()

    def load_alone(*args: Any, **options: Any) -> Any:
        # transformers does not load two models at once.
        with lock:
            return loader.load_model(*args, **options)

    monkeypatch.setattr("engine.models.paged_model.load_model", load_alone)
    monkeypatch.setattr("engine.parallel.group._TIMEOUT", timedelta(seconds=60))

    def make(*args: object, **options: object) -> ThreadedRanks:
        made.append(ThreadedRanks(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for model in made:
        model.close()
