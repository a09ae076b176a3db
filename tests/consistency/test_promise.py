"""The promise on a real application with things breaking, and a controller that does not keep it.

Three minutes in all. The long version is ``python -m tests.consistency.soak``.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import serve

from tests.consistency.adapter_makers import NamedAdapters
from tests.consistency.experiment import Load, Report, final_changes_done, run_experiment
from tests.consistency.served import Served, local_ray, run_app
from tests.consistency.slow_controllers import HastyController, SlowController
from tests.consistency.soak import promise_config
from tests.consistency.versioned_engine import make_versioned_engine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with local_ray() as address:
        yield address


def experiment(
    served: Served, root: Path, load: Load, *, seconds: float, with_nemesis: bool
) -> Report:
    adapters = NamedAdapters(root / "adapters")
    return asyncio.run(
        run_experiment(served, adapters, load, seconds=seconds, seed=1, with_nemesis=with_nemesis)
    )


def test_every_request_sees_what_was_answered_whatever_breaks(address: str, tmp_path: Path) -> None:
    config = promise_config(tmp_path, "fake", "kept")
    served = run_app(address, config, make_versioned_engine, controller_class=SlowController)
    load = Load(num_clients=4)
    report = experiment(served, tmp_path, load, seconds=160, with_nemesis=True)
    serve.delete(served.app)
    assert report.violations == []
    assert final_changes_done(report, load)
    assert len(report.deeds) >= 6
    figures = report.figures()
    assert figures["generations_checked"] > 600
    assert figures["changes_of_aliases"] > 10


def test_a_change_answered_before_all_replicas_have_it_is_found(
    address: str, tmp_path: Path
) -> None:
    config = promise_config(tmp_path, "fake", "broken").model_copy(update={"num_replicas": 2})
    served = run_app(address, config, make_versioned_engine, controller_class=HastyController)
    # Small, so that a request soon follows a change of the name that it asks for.
    load = Load(num_clients=3, num_names=2, num_aliases=1, change_pause_s=0.2)
    report = experiment(served, tmp_path, load, seconds=15, with_nemesis=False)
    serve.delete(served.app)
    assert "stale" in {violation.kind for violation in report.violations}
