"""One run: clients and nemesis against an application for some time, then the verdict."""

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tests.consistency.adapter_makers import AdapterMaker
from tests.consistency.checker import Violation, check
from tests.consistency.clients import Clients, Recorder
from tests.consistency.history import Kind, Outcome
from tests.consistency.nemesis import Deed, Nemesis
from tests.consistency.served import Served

_ALIAS = "alias-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many clients and names, and how fast they change."""

    num_clients: int = 6
    num_names: int = 5
    num_aliases: int = 2
    change_pause_s: float = 0.4
    generate_pause_s: float = 0.0
    gap_s: float = 1.0

    def names(self) -> list[str]:
        """The names in use."""
        return [*(f"policy-{index}" for index in range(self.num_names)), *self.aliases()]

    def aliases(self) -> list[str]:
        """Those names that are aliases."""
        return [f"{_ALIAS}{index}" for index in range(self.num_aliases)]


def is_alias(name: str) -> bool:
    """Whether a name of a ``Load`` is an alias."""
    return name.startswith(_ALIAS)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What happened and whether the promise was kept."""

    seconds: float
    recorder: Recorder
    deeds: list[Deed]

    @cached_property
    def violations(self) -> list[Violation]:
        """The broken promises; finding out takes a while for a long history."""
        return check(self.recorder.history)

    def figures(self) -> dict[str, Any]:
        """The report for people and files."""
        history = self.recorder.history
        waits = [c.ended - c.started for c in history.changes if c.outcome is Outcome.DONE]
        outcomes = Counter(f"{c.kind.value} {c.outcome.value}" for c in history.changes)
        return {
            "seconds": round(self.seconds, 1),
            "generations_checked": sum(answer.num_generations for answer in history.answers),
            "requests_checked": len(history.answers),
            "of_these_not_found": sum(answer.content is None for answer in history.answers),
            "changes": dict(sorted(outcomes.items())),
            "changes_of_aliases": sum(is_alias(c.name) for c in history.changes),
            "nemesis": dict(sorted(Counter(deed.action for deed in self.deeds).items())),
            "change_s": _spread(waits) if waits else {},
            "violations": [asdict(violation) for violation in self.violations],
            "no_answer": self.recorder.reasons(),
            "broken_off": self.recorder.broken,
            "recovery_s": _recoveries(self.deeds),
        }


async def run_experiment(
    served: Served,
    adapters: AdapterMaker,
    load: Load,
    *,
    seconds: float,
    seed: int,
    with_nemesis: bool = True,
) -> Report:
    """Run clients for so long, with something breaking all the time."""
    recorder = Recorder()
    clients = Clients(served.url, adapters, load.names(), recorder, seed, aliases=load.aliases())
    nemesis = Nemesis(served, seed)
    started = time.monotonic()
    tasks = [
        *(clients.keep_generating(load.generate_pause_s) for _ in range(load.num_clients)),
        *(clients.keep_changing([name], load.change_pause_s) for name in load.names()),
        # Two at a time on one name, now and then.
        clients.keep_changing(load.names(), load.change_pause_s),
    ]
    if with_nemesis:
        tasks.append(nemesis.run(clients.is_over, gap_s=load.gap_s))
    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(task)
        await asyncio.sleep(seconds)
        clients.is_over.set()
    # The last word on every name, when nothing is broken any more.
    for name in load.names():
        await clients.change(name, Kind.REPLACE)
    await asyncio.gather(*(clients.generate(name) for name in load.names() * 10))
    await clients.close()
    return Report(
        seconds=time.monotonic() - started,
        recorder=recorder,
        deeds=nemesis.deeds,
    )


def _recoveries(deeds: list[Deed]) -> dict[str, dict[str, float]]:
    times: dict[str, list[float]] = {}
    for deed in deeds:
        times.setdefault(deed.action, []).append(deed.recovered_s)
    return {action: _spread(found) for action, found in sorted(times.items())}


def _spread(seconds: list[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "median": round(statistics.median(seconds), 2),
        "max": round(max(seconds), 2),
    }


def final_changes_done(report: Report, load: Load) -> bool:
    """Whether the changes after everything recovered took effect."""
    last = {change.name: change for change in report.recorder.history.changes}
    return all(last[name].outcome is Outcome.DONE for name in load.names())
