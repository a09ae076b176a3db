"""Searches an order of one name's changes that explains every answer given under it.

Depth first over the changes that may come next, remembering what was tried, as linearizability
checkers do. A change is a bit; a set of changes is an integer.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.consistency.history import Answer, Change, Kind, Outcome

# Far more than any allowed history needs: its first guesses are nearly always right.
MAX_STEPS = 200_000


class UndecidedError(Exception):
    """The search took too long to say either."""


@dataclass(frozen=True, slots=True)
class _State:
    """After the changes ``done``: what the name means, and which 404s nothing explains so far."""

    done: int
    content: str | None
    unmet: int


@dataclass(frozen=True, slots=True)
class _Absence:
    """Requests that found nothing: after all of ``needs``, before any of ``too_late``."""

    needs: int
    too_late: int


class _Search:
    def __init__(self, changes: Sequence[Change], answers: Sequence[Answer]) -> None:
        relevant = [change for change in changes if change.outcome is not Outcome.REJECTED]
        # Likely order: as they were answered, those never answered last.
        self.changes = sorted(relevant, key=lambda change: (change.known_by, change.started))
        seen = _seen_by(answers)
        asked = _last_asked(answers)
        happened_by = [min(c.known_by, seen.get(c.content, math.inf)) for c in self.changes]
        self.before = [self._before(change, happened_by, asked) for change in self.changes]
        self.must = _bits(
            change.outcome is not Outcome.UNKNOWN or change.content in seen
            for change in self.changes
        )
        self.absences = self._absences(answers)

    def _before(
        self, change: Change, happened_by: list[float], asked: dict[str | None, float]
    ) -> int:
        """Changes that came first: ended when it started, or known while its content was seen."""
        last_asked = asked.get(change.content, -math.inf) if change.content else -math.inf
        return _bits(
            other is not change
            and (happened < change.started or (_is_done(other) and other.ended < last_asked))
            for other, happened in zip(self.changes, happened_by, strict=True)
        )

    def _absences(self, answers: Sequence[Answer]) -> list[_Absence]:
        latest: dict[int, float] = {}
        for answer in answers:
            if answer.content is None:
                needs = _bits(_is_done(c) and c.ended < answer.started for c in self.changes)
                latest[needs] = min(answer.answered, latest.get(needs, math.inf))
        return [
            _Absence(needs, _bits(change.started > by for change in self.changes))
            for needs, by in latest.items()
        ]

    def run(self) -> bool:
        every = (1 << len(self.absences)) - 1
        stack = [_State(0, None, self._unmet(0, every))]
        tried = set(stack)
        steps = 0
        while stack:
            state = stack.pop()
            if not self.must & ~state.done and not state.unmet:
                return True
            steps += 1
            if steps > MAX_STEPS:
                raise UndecidedError(f"{len(self.changes)} changes, {steps} steps")
            following = [s for s in self._following(state) if s not in tried]
            tried.update(following)
            stack += reversed(following)
        return False

    def _following(self, state: _State) -> Iterator[_State]:
        for index, change in enumerate(self.changes):
            bit = 1 << index
            if state.done & bit or self.before[index] & ~state.done:
                continue
            next_state = self._after(state, change, bit)
            if next_state is not None and self._is_hopeful(next_state):
                yield next_state

    def _after(self, state: _State, change: Change, bit: int) -> _State | None:
        done = state.done | bit
        is_taken = state.content is not None
        if change.outcome is Outcome.TAKEN or change.outcome is Outcome.MISSING:
            is_right = is_taken == (change.outcome is Outcome.TAKEN)
            return _State(done, state.content, state.unmet) if is_right else None
        if is_taken == (change.kind is Kind.LOAD) and change.kind is not Kind.REPLACE:
            return None
        if change.kind is not Kind.UNLOAD:
            return _State(done, change.content, state.unmet)
        return _State(done, None, self._unmet(done, state.unmet))

    def _unmet(self, done: int, unmet: int) -> int:
        """The absences that are not explained by the name meaning nothing after ``done``."""
        for index in _indices(unmet):
            absence = self.absences[index]
            if not absence.needs & ~done and not absence.too_late & done:
                unmet &= ~(1 << index)
        return unmet

    def _is_hopeful(self, state: _State) -> bool:
        return not any(
            self.absences[index].too_late & state.done for index in _indices(state.unmet)
        )


def find_order(changes: Sequence[Change], answers: Sequence[Answer]) -> bool:
    """Return whether some order of one name's changes explains every answer."""
    return _Search(changes, answers).run()


def _is_done(change: Change) -> bool:
    return change.outcome is Outcome.DONE


def _seen_by(answers: Sequence[Answer]) -> dict[str | None, float]:
    """When each content had been seen: its load had happened by then."""
    seen: dict[str | None, float] = {}
    for answer in answers:
        if answer.content is not None:
            seen[answer.content] = min(answer.answered, seen.get(answer.content, math.inf))
    return seen


def _last_asked(answers: Sequence[Answer]) -> dict[str | None, float]:
    """When the last request started that saw each content: it was in service until then."""
    asked: dict[str | None, float] = {}
    for answer in answers:
        asked[answer.content] = max(answer.started, asked.get(answer.content, -math.inf))
    return asked


def _bits(flags: Iterable[bool]) -> int:
    bits = 0
    for index, flag in enumerate(flags):
        bits |= flag << index
    return bits


def _indices(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
