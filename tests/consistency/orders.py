"""Searches an order of one name's changes that explains every answer given under it.

Depth first over the changes that may come next, remembering what was tried, as linearizability
checkers do. A change is a bit; a set of changes is an integer.

What keeps long histories easy: changes of which nobody knows anything, and whose content nobody
saw, may happen at any later time or never. Of those of one kind that could come next, the one that
began first stands for all; and what cannot go on after few of them cannot after more.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.consistency.history import Answer, Change, Kind, Outcome

# Far more than any allowed history needs: its first guesses are nearly always right.
MAX_STEPS = 200_000


class UndecidedError(Exception):
    """The search took too long to say either."""


@dataclass(frozen=True, slots=True)
class _State:
    """After the changes ``done``: if the name is taken, and which 404s nothing explains so far."""

    done: int
    is_taken: bool
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
        self.spare = {
            kind: _bits(change.kind is kind for change in self.changes) & ~self.must
            for kind in Kind
        }
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
        stack = [_State(0, False, self._unmet(0, every))]
        tried: dict[_State, list[int]] = {}
        steps = 0
        while stack:
            state = stack.pop()
            if not self.must & ~state.done and not state.unmet:
                return True
            if self._is_hopeless(state, tried):
                continue
            steps += 1
            if steps > MAX_STEPS:
                raise UndecidedError(f"{len(self.changes)} changes, {steps} steps")
            stack += reversed(list(self._following(state)))
        return False

    def _is_hopeless(self, state: _State, tried: dict[_State, list[int]]) -> bool:
        """Whether the same was tried with no more spare changes; if not, it is from now on."""
        spent = state.done & ~self.must
        before = tried.setdefault(replace(state, done=state.done & self.must), [])
        if any(not other & ~spent for other in before):
            return True
        before[:] = [other for other in before if spent & ~other] + [spent]
        return False

    def _following(self, state: _State) -> Iterator[_State]:
        open_kinds = set(Kind)
        for index, change in enumerate(self.changes):
            bit = 1 << index
            if state.done & bit or self.before[index] & ~state.done:
                continue
            if self.spare[change.kind] & bit:
                if change.kind not in open_kinds:
                    continue
                open_kinds.remove(change.kind)
            next_state = self._after(state, change, bit)
            if next_state is not None and self._is_hopeful(next_state):
                yield next_state

    def _after(self, state: _State, change: Change, bit: int) -> _State | None:
        done = state.done | bit
        if change.outcome is Outcome.TAKEN or change.outcome is Outcome.MISSING:
            is_right = state.is_taken == (change.outcome is Outcome.TAKEN)
            return _State(done, state.is_taken, state.unmet) if is_right else None
        if state.is_taken == (change.kind is Kind.LOAD) and change.kind is not Kind.REPLACE:
            return None
        if change.kind is not Kind.UNLOAD:
            return _State(done, True, state.unmet)
        return _State(done, False, self._unmet(done, state.unmet))

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
