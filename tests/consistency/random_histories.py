"""Histories of a made-up cluster that keeps its word, for tests of the checker.

Changes happen one after the other; what clients see of each is stretched at random around it. A
request sees any state from the last change that was answered before it started to the last one that
had happened when it was answered.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.consistency.history import Answer, Change, History, Kind, Outcome


@dataclass(frozen=True, slots=True)
class _State:
    since: float
    known_by: float
    content: str | None


def make_history(seed: int, *, num_changes: int = 12, num_answers: int = 20) -> History:
    """Make one name's history."""
    chance = random.Random(seed)
    states = [_State(-math.inf, -math.inf, None)]
    history = History()
    for index in range(num_changes):
        change, happened_at = _change(chance, index, states[-1].content)
        history.changes.append(change)
        if happened_at is not None:
            states.append(_State(happened_at, change.known_by, change.content))
    history.answers += _answers(chance, states, num_answers, until=num_changes + 3.0)
    chance.shuffle(history.changes)
    return history


def _change(chance: random.Random, index: int, current: str | None) -> tuple[Change, float | None]:
    """A change around the time ``index``, and when it happened if it did."""
    at = index + chance.random()
    kind = chance.choice(list(Kind))
    change = Change(
        name="sql",
        kind=kind,
        content=None if kind is Kind.UNLOAD else f"v{index}",
        started=at - chance.choice([0.01, 0.5, 3.0]),
        ended=at + chance.choice([0.01, 0.5, 3.0]),
    )
    if kind is Kind.LOAD and current is not None:
        change = replace(change, outcome=Outcome.TAKEN)
    elif kind is Kind.UNLOAD and current is None:
        change = replace(change, outcome=Outcome.MISSING)
    happened = change.outcome is Outcome.DONE
    if chance.random() < 0.25:
        # Its answer got lost, or it did.
        change = replace(change, outcome=Outcome.UNKNOWN, ended=at)
        happened = happened and chance.random() < 0.5
    elif chance.random() < 0.1:
        change, happened = replace(change, outcome=Outcome.REJECTED), False
    return change, at if happened else None


def _answers(
    chance: random.Random, states: list[_State], count: int, *, until: float
) -> Iterator[Answer]:
    for _ in range(count):
        started = chance.uniform(-1.0, until)
        answered = started + chance.choice([0.01, 0.5, 2.0])
        first = max(i for i, state in enumerate(states) if state.known_by < started)
        last = max(i for i, state in enumerate(states) if state.since <= answered)
        content = states[chance.randint(first, last)].content
        yield Answer(
            name="sql",
            started=started,
            answered=answered,
            contents=() if content is None else (content,) * chance.randint(1, 3),
        )
