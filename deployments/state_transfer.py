"""What a journal holds as one JSON document, to move it to another cluster or keep a copy.

Names, versions and aliases go along; operations, members and settings stay: they belong to one
cluster's life. Knows the document; knows nothing of who runs it.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias
from deployments.journal import Journal, StoredState

_FORMAT = "lorafleet-state-1"


class StateDocument(BaseModel):
    """The document. ``generation`` and ``table_version`` are the last that were ever used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str = Field(default=_FORMAT, pattern=f"^{_FORMAT}$")
    generation: int = Field(ge=0)
    table_version: int = Field(ge=0)
    adapters: dict[str, AdapterVersion]
    kept: dict[str, tuple[AdapterVersion, ...]]
    aliases: dict[str, AdapterAlias]
    unloaded: tuple[str, ...]


class JournalNotEmptyError(ValueError):
    """The journal holds names already, which an import would replace."""


def export_state(journal: Journal) -> dict[str, Any]:
    """Read a journal into a document."""
    stored = journal.load()
    document = StateDocument(
        generation=journal.last_generation(),
        table_version=stored.table_version,
        adapters=stored.adapters,
        kept=stored.kept,
        aliases=stored.aliases,
        unloaded=tuple(sorted(stored.unloaded)),
    )
    return document.model_dump(mode="json")


def import_state(journal: Journal, text: str | bytes, *, replace: bool = False) -> int:
    """Write a document to a journal and return how many names it holds.

    Raises JournalNotEmptyError unless the journal is empty or ``replace`` is given, and a
    ValueError for what is no such document.
    """
    document = TypeAdapter(StateDocument).validate_json(text)
    present = journal.load()
    if (present.adapters or present.aliases or present.unloaded) and not replace:
        raise JournalNotEmptyError(
            f"the journal holds {len(present.adapters)} adapters and {len(present.aliases)} "
            f"aliases already"
        )
    # A version that any replica has seen must not come again with another meaning.
    journal.restore(
        StoredState(
            journal_id=present.journal_id,
            table_version=max(document.table_version, present.table_version) + 1,
            adapters=document.adapters,
            kept=document.kept,
            aliases=document.aliases,
            unloaded=frozenset(document.unloaded),
        ),
        generation=max(document.generation, journal.last_generation()),
    )
    return len(document.adapters)


def describe(document: dict[str, Any]) -> dict[str, int]:
    """How much a document holds."""
    return {part: len(document[part]) for part in ("adapters", "aliases", "unloaded")}
