"""What clients of a cluster saw: changes to names, and answers generated under names.

Times are one process's monotonic clock, taken before a call is sent and after its answer arrived.
Plain data; what is allowed is ``checker.py``'s.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a change does to its name. A LOAD refuses a name that is taken."""

    LOAD = "load"
    REPLACE = "replace"
    UNLOAD = "unload"


class Outcome(StrEnum):
    """How a change was answered.

    TAKEN and MISSING are refusals that say what the name meant: something, nothing. UNKNOWN may
    have happened, or may happen at any later time.
    """

    DONE = "done"
    TAKEN = "taken"
    MISSING = "missing"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One load, replace or unload. ``content`` is what it puts in service, unique in a history."""

    name: str
    kind: Kind
    started: float
    ended: float
    outcome: Outcome = Outcome.DONE
    content: str | None = None

    @property
    def known_by(self) -> float:
        """When its caller knew that it had happened; never, if nobody told."""
        return math.inf if self.outcome is Outcome.UNKNOWN else self.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request: the contents that its chunks showed, or nothing for an unknown name.

    ``answered`` is when the first of it arrived: by then the request had been admitted. A request
    may ask for several generations, which must agree.
    """

    name: str
    started: float
    answered: float
    contents: tuple[str, ...] = ()
    generation: int | None = None
    num_generations: int = 1

    @property
    def content(self) -> str | None:
        """What the name meant to this request."""
        return self.contents[0] if self.contents else None


@dataclass(slots=True)
class History:
    """Everything that was recorded, in any order."""

    changes: list[Change] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def names(self) -> list[str]:
        """Every name that occurs."""
        records: Iterable[Change | Answer] = (*self.changes, *self.answers)
        return sorted({record.name for record in records})

    def of(self, name: str) -> "History":
        """The part about one name."""
        return History(
            [change for change in self.changes if change.name == name],
            [answer for answer in self.answers if answer.name == name],
        )
