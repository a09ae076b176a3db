"""What every name means now, and how to bring a replica's table there.

Pure bookkeeping behind the journal. Knows nothing of replicas or operations.
"""

from collections import deque

from adapters import AdapterVersion
from deployments.aliases import split_adapter
from deployments.cluster_protocol import AliasChange, ForcedEnd, TableChange, TableUpdate
from deployments.journal import MAX_FORCED, StoredState
from deployments.operations import Operation
from deployments.table_fingerprint import fingerprint

# A replica further behind than this gets a snapshot.
_MAX_CHANGES = 4096


class DesiredState:
    """The table of names with its recent changes."""

    def __init__(self, stored: StoredState) -> None:
        self.journal_id = stored.journal_id
        self.table_version = stored.table_version
        self.adapters = dict(stored.adapters)
        self.kept = dict(stored.kept)
        self.aliases = dict(stored.aliases)
        self.unloaded = set(stored.unloaded)
        self._fingerprint: tuple[int, int] | None = None
        self._changes: deque[tuple[int, TableChange | AliasChange]] = deque(maxlen=_MAX_CHANGES)
        self._forced: deque[tuple[int, ForcedEnd]] = deque(maxlen=MAX_FORCED)
        for operation in stored.forced:
            # An import may have brought back what was forced out.
            if all(v.generation > operation.generation for v in self._versions_of(operation.name)):
                self.force(operation)

    def apply(self, change: TableChange, table_version: int) -> None:
        """Take in a change that the journal holds already."""
        if change.version is None:
            self.adapters.pop(change.name, None)
            self.kept.pop(change.name, None)
            self.unloaded.add(change.name)
        else:
            self.adapters[change.name] = change.version
            self.kept[change.name] = change.kept
            self.unloaded.discard(change.name)
        self._append(change, table_version)

    def apply_alias(self, change: AliasChange, table_version: int) -> None:
        """Take in a change of an alias that the journal holds already."""
        if change.alias is None:
            self.aliases.pop(change.name, None)
        else:
            self.aliases[change.name] = change.alias
        self._append(change, table_version)

    def force(self, operation: Operation) -> None:
        """Have what runs on an unloaded name aborted, also by a replica that gets a snapshot."""
        assert operation.table_version is not None
        end = ForcedEnd(operation.name, operation.generation)
        self._forced.append((operation.table_version, end))

    def _append(self, change: TableChange | AliasChange, table_version: int) -> None:
        # A replica at one version is told what came later: one out of order would be left out.
        assert table_version == self.table_version + 1
        self.table_version = table_version
        self._changes.append((table_version, change))

    def alias_of(self, name: str) -> str | None:
        """An alias that stands for an adapter, whichever generation; None if there is none."""
        for alias in self.aliases.values():
            if any(split_adapter(target.adapter)[0] == name for target in alias.targets):
                return alias.name
        return None

    def _versions_of(self, name: str) -> tuple[AdapterVersion, ...]:
        current = self.adapters.get(name)
        return () if current is None else (current, *self.kept.get(name, ()))

    def kept_beside(self, version: AdapterVersion, limit: int) -> tuple[AdapterVersion, ...]:
        """The earlier versions to keep once this one is in service, latest first.

        Generations that an alias stands for are kept beyond the limit.
        """
        current = self.adapters.get(version.name)
        if current is None:
            return ()
        kept = self.kept.get(version.name, ())
        if current.generation != version.generation:
            kept = (current, *kept)
        aliased = self._aliased_generations(version.name)
        return tuple(
            earlier
            for index, earlier in enumerate(kept)
            if index < limit or earlier.generation in aliased
        )

    def _aliased_generations(self, name: str) -> set[int | None]:
        targets = (target for alias in self.aliases.values() for target in alias.targets)
        pairs = (split_adapter(target.adapter) for target in targets)
        return {generation for aliased, generation in pairs if aliased == name}

    def digests(self) -> set[str]:
        """Of all versions in service or kept."""
        kept = (version for versions in self.kept.values() for version in versions)
        return {version.digest for version in (*self.adapters.values(), *kept)}

    def fingerprint(self) -> int:
        """What a replica's table at this version must have as its fingerprint."""
        if self._fingerprint is None or self._fingerprint[0] != self.table_version:
            found = fingerprint(self.adapters, self.kept, self.aliases.values())
            self._fingerprint = (self.table_version, found)
        return self._fingerprint[1]

    def snapshot(self) -> TableUpdate:
        """The whole table."""
        return TableUpdate(
            journal_id=self.journal_id,
            table_version=self.table_version,
            changes=tuple(
                TableChange(name=name, version=version, kept=self.kept.get(name, ()))
                for name, version in self.adapters.items()
            ),
            aliases=tuple(
                AliasChange(name=name, alias=alias) for name, alias in self.aliases.items()
            ),
            forced=tuple(end for _, end in self._forced),
            snapshot=True,
        )

    def update_since(self, journal_id: str, table_version: int) -> TableUpdate | None:
        """What a replica at this version is missing; None if it is up to date."""
        if journal_id == self.journal_id and table_version == self.table_version:
            return None
        oldest = self._changes[0][0] if self._changes else self.table_version + 1
        is_covered = oldest - 1 <= table_version <= self.table_version
        if journal_id != self.journal_id or not is_covered:
            return self.snapshot()
        missing = [change for version, change in self._changes if version > table_version]
        return TableUpdate(
            journal_id=self.journal_id,
            table_version=self.table_version,
            changes=tuple(change for change in missing if isinstance(change, TableChange)),
            aliases=tuple(change for change in missing if isinstance(change, AliasChange)),
            forced=tuple(end for version, end in self._forced if version > table_version),
        )
