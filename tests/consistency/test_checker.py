"""The checker accepts what the promise allows and nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.consistency.checker import check
from tests.consistency.history import Answer, Change, History, Kind, Outcome
from tests.consistency.random_histories import make_history

NAME = "sql"


def load(content: str, started: float, ended: float, **options: Outcome) -> Change:
    return Change(
        name=NAME, kind=Kind.LOAD, content=content, started=started, ended=ended, **options
    )


def replaced(content: str, started: float, ended: float, **options: Outcome) -> Change:
    return Change(
        name=NAME, kind=Kind.REPLACE, content=content, started=started, ended=ended, **options
    )


def unload(started: float, ended: float, **options: Outcome) -> Change:
    return Change(name=NAME, kind=Kind.UNLOAD, started=started, ended=ended, **options)


def saw(*contents: str, at: tuple[float, float], generation: int | None = None) -> Answer:
    return Answer(
        name=NAME, started=at[0], answered=at[1], contents=contents, generation=generation
    )


LOADED = load("a", 0, 1)
UNKNOWN = Outcome.UNKNOWN

ALLOWED: dict[str, list[Change | Answer]] = {
    "nothing before a load": [saw(at=(-2, -1)), LOADED],
    "either side while a load runs": [LOADED, saw("a", at=(0.1, 0.2)), saw(at=(0.3, 0.4))],
    "either side while a replace runs": [
        LOADED,
        replaced("b", 2, 5),
        saw("b", at=(2.1, 2.2)),
        saw("a", at=(2.3, 2.4)),
        saw("b", at=(5.1, 5.2)),
    ],
    "a long request finishes on the version that it started with": [
        LOADED,
        replaced("b", 2, 3),
        saw("a", "a", at=(1.5, 9)),
    ],
    "an unclear replace that happened": [
        LOADED,
        replaced("b", 2, 3, outcome=UNKNOWN),
        saw("a", at=(4, 5)),
        saw("b", at=(6, 7)),
    ],
    "an unclear replace that did not happen": [
        LOADED,
        replaced("b", 2, 3, outcome=UNKNOWN),
        saw("a", at=(9, 10)),
    ],
    "an unclear unload, then a load that found the name free": [
        LOADED,
        unload(2, 3, outcome=UNKNOWN),
        load("b", 4, 5),
        saw("b", at=(6, 7)),
    ],
    "concurrent replaces in either order": [
        LOADED,
        replaced("b", 2, 5),
        replaced("c", 2.5, 4),
        saw("b", at=(6, 7)),
    ],
    "refusals that say what was so": [
        unload(-2, -1, outcome=Outcome.MISSING),
        LOADED,
        load("b", 2, 3, outcome=Outcome.TAKEN),
        unload(4, 5),
        saw(at=(6, 7)),
    ],
    "one number for one version": [
        LOADED,
        saw("a", at=(2, 3), generation=7),
        saw("a", at=(4, 5), generation=7),
    ],
}

REFUSED: dict[str, tuple[str, list[Change | Answer]]] = {
    "stale after a replace": ("stale", [LOADED, replaced("b", 2, 3), saw("a", at=(4, 5))]),
    "stale after an unload": ("stale", [LOADED, unload(2, 3), saw("a", at=(4, 5))]),
    "resurrected": (
        "stale",
        [LOADED, unload(2, 3), load("b", 4, 5), saw("b", at=(6, 7)), saw("a", at=(8, 9))],
    ),
    "lost": ("unexplained", [LOADED, saw(at=(2, 3))]),
    "lost for a moment between two replaces": (
        "unexplained",
        [LOADED, replaced("b", 2, 5), saw(at=(3, 4)), saw("b", at=(6, 7))],
    ),
    "an unload that found nothing where something was": (
        "unexplained",
        [LOADED, unload(2, 3, outcome=Outcome.MISSING), saw("a", at=(4, 5))],
    ),
    "a load that found something where nothing was": (
        "unexplained",
        [load("b", 0, 1, outcome=Outcome.TAKEN)],
    ),
    "mixed": (
        "mixed",
        [LOADED, replaced("b", 2, 5), saw("a", "b", at=(3, 4))],
    ),
    "never loaded": ("never committed", [LOADED, saw("x", at=(2, 3))]),
    "refused and yet served": (
        "never committed",
        [load("a", 0, 1, outcome=Outcome.REJECTED), saw("a", at=(2, 3))],
    ),
    "seen before it was loaded": ("before its load", [saw("a", at=(-2, -1)), LOADED]),
    "an unclear change that happened twice": (
        "unexplained",
        [
            LOADED,
            replaced("b", 2, 3, outcome=UNKNOWN),
            saw("b", at=(4, 5)),
            replaced("c", 6, 7),
            saw("c", at=(8, 9)),
            saw("b", at=(10, 11)),
        ],
    ),
    "an unclear unload that happened twice": (
        "unexplained",
        [
            LOADED,
            unload(2, 3, outcome=UNKNOWN),
            saw(at=(4, 5)),
            replaced("b", 6, 7),
            saw(at=(8, 9)),
        ],
    ),
    "two orders of concurrent replaces at once": (
        "unexplained",
        [
            LOADED,
            replaced("b", 2, 5),
            replaced("c", 2, 5),
            saw("b", at=(6, 7)),
            saw("c", at=(8, 9)),
        ],
    ),
    "one version under two numbers": (
        "generation reused",
        [LOADED, saw("a", at=(2, 3), generation=7), saw("a", at=(4, 5), generation=8)],
    ),
    "one number for two versions": (
        "generation reused",
        [
            LOADED,
            saw("a", at=(2, 3), generation=7),
            replaced("b", 4, 5),
            saw("b", at=(6, 7), generation=7),
        ],
    ),
}


def history(records: list[Change | Answer]) -> History:
    return History(
        [record for record in records if isinstance(record, Change)],
        [record for record in records if isinstance(record, Answer)],
    )


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case: str) -> None:
    assert check(history(ALLOWED[case])) == []


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    kind, records = REFUSED[case]
    assert kind in {violation.kind for violation in check(history(records))}


def test_names_are_judged_apart() -> None:
    other = replace(LOADED, name="other", content="b")
    records: list[Change | Answer] = [
        LOADED,
        other,
        unload(2, 3),
        replace(saw("b", at=(4, 5)), name="other"),
    ]
    assert check(history(records)) == []
    records.append(saw("b", at=(4, 5)))
    assert [violation.name for violation in check(history(records))] == [NAME]


def test_content_must_be_unique() -> None:
    with pytest.raises(ValueError, match="content of its own"):
        check(history([LOADED, replaced("a", 2, 3)]))


@given(st.integers(0, 2**32))
def test_every_history_of_a_faithful_cluster_is_allowed(seed: int) -> None:
    assert check(make_history(seed)) == []


@given(st.integers(0, 2**32), st.data())
def test_any_version_seen_after_its_end_is_refused(seed: int, data: st.DataObject) -> None:
    made = make_history(seed)
    done = [change for change in made.changes if change.outcome is Outcome.DONE]
    pairs = [
        (old, new)
        for old in done
        for new in done
        if old.content is not None and old.ended < new.started
    ]
    if pairs:
        old, new = data.draw(st.sampled_from(pairs))
        late = data.draw(st.floats(0.001, 10))
        made.answers.append(saw(str(old.content), at=(new.ended + late, new.ended + late)))
        assert "stale" in {violation.kind for violation in check(made)}


@given(st.integers(0, 2**32), st.data())
def test_any_name_lost_while_in_service_is_refused(seed: int, data: st.DataObject) -> None:
    made = make_history(seed)
    # Nothing takes the name out of service from here on.
    end = max(change.ended for change in made.changes) + 10
    made.changes = [
        change
        for change in made.changes
        if not (change.kind is Kind.UNLOAD and change.outcome is UNKNOWN)
    ]
    made.changes.append(replaced("last", end, end + 1))
    if check(made) == []:
        late = data.draw(st.floats(0.001, 10))
        made.answers.append(saw(at=(end + 1 + late, end + 2 + late)))
        assert [violation.kind for violation in check(made)] == ["unexplained"]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_a_long_history_is_decided_either_way(seed: int) -> None:
    made = make_history(seed, num_changes=150, num_answers=300)
    assert check(made) == []
    # In the middle of much that is unclear: an unload that found nothing in a name that is taken.
    made.changes = [
        change
        for change in made.changes
        if change.kind is not Kind.UNLOAD or change.outcome is not UNKNOWN
    ]
    made.answers = []
    end = max(change.ended for change in made.changes)
    made.changes += [replaced("last", end + 1, end + 2)]
    made.changes += [unload(end + 3, end + 4, outcome=Outcome.MISSING)]
    assert [violation.kind for violation in check(made)] == ["unexplained"]
