"""Decides whether a history keeps the promise about adapter names.

The promise: once a load, replace or unload has been answered, every request that starts later
sees that state or a later one, wherever it arrives; a request shows one version from its first
chunk to its last; a version that was never committed is never seen. Between the beginning of a
change and its answer a request may see either side, and two requests may see them in either order:
replicas flip one after the other. Changes themselves are linearizable, each name for itself.

Most violations show in a few records and are reported as such. What remains is whether any order of
the changes explains all answers: ``orders.py`` searches for one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.consistency.history import Answer, Change, History, Kind, Outcome
from tests.consistency.orders import find_order


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: what kind, for which name, and the evidence."""

    kind: str
    name: str
    evidence: str


def check(history: History) -> list[Violation]:
    """Return the broken promises of a history; none if it is allowed."""
    _check_usable(history)
    violations = list(_generation_clashes(history))
    for name in history.names():
        violations += _check_name(name, history.of(name))
    return violations


def _check_usable(history: History) -> None:
    loaded = [change.content for change in history.changes if change.content is not None]
    if len(set(loaded)) != len(loaded):
        raise ValueError("each load must have content of its own")
    for change in history.changes:
        if (change.content is None) != (change.kind is Kind.UNLOAD):
            raise ValueError(f"loads and only they have content: {change}")


def _check_name(name: str, part: History) -> list[Violation]:
    found = [*_wrong_answers(name, part), *_stale_answers(name, part)]
    # The search would only say less about what is known already.
    if not found and not find_order(part.changes, part.answers):
        found.append(Violation("unexplained", name, _timeline(part)))
    return found


def _wrong_answers(name: str, part: History) -> Iterator[Violation]:
    loads = _loads(part)
    for answer in part.answers:
        if len(set(answer.contents)) > 1:
            yield Violation("mixed", name, str(answer))
        if answer.content is None:
            continue
        load = loads.get(answer.content)
        if load is None or load.outcome not in (Outcome.DONE, Outcome.UNKNOWN):
            yield Violation("never committed", name, f"{answer} from {load}")
        elif answer.answered < load.started:
            yield Violation("before its load", name, f"{answer} from {load}")


def _stale_answers(name: str, part: History) -> Iterator[Violation]:
    """Answers with a version that was out of service, whatever the order of unclear changes."""
    loads = _loads(part)
    done = sorted(
        (change for change in part.changes if change.outcome is Outcome.DONE),
        key=lambda change: change.started,
    )
    ends = {}
    for content, load in loads.items():
        later = [change for change in done if change.started > load.known_by]
        ends[content] = min(later, key=lambda change: change.ended, default=None)
    for answer in part.answers:
        end = ends.get(answer.content) if answer.content is not None else None
        if end is not None and end.ended < answer.started:
            yield Violation("stale", name, f"{answer} after {end}")


def _generation_clashes(history: History) -> Iterator[Violation]:
    """A generation number means one name and content for ever, and each content has one number."""
    meanings: dict[int, tuple[str, str]] = {}
    numbers: dict[tuple[str, str], int] = {}
    for answer in history.answers:
        if answer.generation is None or answer.content is None:
            continue
        meaning = (answer.name, answer.content)
        known = meanings.setdefault(answer.generation, meaning)
        number = numbers.setdefault(meaning, answer.generation)
        if known != meaning or number != answer.generation:
            evidence = f"{answer}; {answer.generation} is {known}, {meaning} is {number}"
            yield Violation("generation reused", answer.name, evidence)


def _loads(part: History) -> dict[str, Change]:
    return {change.content: change for change in part.changes if change.content is not None}


def _timeline(part: History) -> str:
    records: list[Change | Answer] = [*part.changes, *part.answers]
    records.sort(key=lambda record: record.started)
    return "\n".join(map(str, records))
