"""What names mean on one replica, and which adapters' bytes are in use there.

A digest is in use while a name means it, a prepare works on it, or a request runs on it. Pure
bookkeeping on the replica's event loop; knows nothing of the engine or the controller.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from adapters import AdapterVersion
from deployments.aliases import AdapterAlias, split_adapter
from deployments.cluster_protocol import TableUpdate
from deployments.table_fingerprint import fingerprint


class AdapterTable:
    """Names to versions, with use counts by digest.

    ``on_unused`` is called with a digest whose last use ended.
    """

    def __init__(self, on_unused: Callable[[str], None]) -> None:
        self.journal_id = ""
        self.table_version = -1
        self._on_unused = on_unused
        self._versions: dict[str, AdapterVersion] = {}
        self._aliases: dict[str, AdapterAlias] = {}
        self._kept: dict[str, tuple[AdapterVersion, ...]] = {}
        self._asked: dict[str, dict[int, str]] = {}
        self._uses: Counter[str] = Counter()

    def find(self, name: str) -> AdapterVersion | None:
        """Return what a name means now."""
        return self._versions.get(name)

    def find_kept(self, name: str, generation: int) -> AdapterVersion | None:
        """Return an earlier version, or the present one, if it may still be asked for.

        Once asked for, its bytes stay in use while it is kept: whoever insists on a version will
        ask for it again.
        """
        versions = (self._versions.get(name), *self._kept.get(name, ()))
        found = next((v for v in versions if v is not None and v.generation == generation), None)
        if found is not None and found is not versions[0]:
            self._keep_bytes(found)
        return found

    def _keep_bytes(self, version: AdapterVersion) -> None:
        asked = self._asked.setdefault(version.name, {})
        if version.generation not in asked:
            asked[version.generation] = version.digest
            self.acquire(version.digest)

    def find_alias(self, name: str) -> AdapterAlias | None:
        """Return what an alias stands for now."""
        return self._aliases.get(name)

    def pinned(self) -> list[AdapterVersion]:
        """Versions that should stay in memory."""
        return [version for version in self._versions.values() if version.pinned]

    def names_of(self, digests: Iterable[str]) -> list[str]:
        """Names that mean one of these bytes, and aliases that stand for one of those names."""
        wanted = set(digests)
        names = {name for name, version in self._versions.items() if version.digest in wanted}
        aliases = [
            alias.name
            for alias in self._aliases.values()
            if any(split_adapter(target.adapter)[0] in names for target in alias.targets)
        ]
        return [*names, *aliases]

    def fingerprint(self) -> int:
        """What tells this table from one that says something else."""
        return fingerprint(self._versions, self._kept, self._aliases.values())

    def is_used(self, digest: str) -> bool:
        """Whether anything still needs these bytes."""
        return self._uses[digest] > 0

    def apply(self, update: TableUpdate) -> None:
        """Change what names mean."""
        unused = []
        if update.snapshot:
            unused = [version.digest for version in self._versions.values()]
            self._versions, self._kept, self._aliases = {}, {}, {}
        for change in update.changes:
            old = self._versions.pop(change.name, None)
            if old is not None:
                unused.append(old.digest)
            self._kept.pop(change.name, None)
            if change.version is not None:
                self._versions[change.name] = change.version
                self.acquire(change.version.digest)
            if change.kept:
                self._kept[change.name] = change.kept
        self._apply_aliases(update)
        unused += self._forget_asked()
        self.journal_id = update.journal_id
        self.table_version = update.table_version
        # After the new uses, so that bytes which only change their name stay.
        for digest in unused:
            self.release(digest)

    def _apply_aliases(self, update: TableUpdate) -> None:
        for change in update.aliases:
            self._aliases.pop(change.name, None)
            if change.alias is None:
                continue
            self._aliases[change.name] = change.alias
            for target in change.alias.targets:
                name, generation = split_adapter(target.adapter)
                if generation is not None:
                    self.find_kept(name, generation)  # It will be asked for.

    def _forget_asked(self) -> list[str]:
        """Forget which generations were asked for and are kept no longer; returns their digests."""
        forgotten = []
        for name, asked in tuple(self._asked.items()):
            kept = {version.generation for version in self._kept.get(name, ())}
            for generation in asked.keys() - kept:
                forgotten.append(asked.pop(generation))
            if not asked:
                del self._asked[name]
        return forgotten

    @contextmanager
    def hold(self, digest: str) -> Iterator[None]:
        """Keep bytes in use."""
        self.acquire(digest)
        try:
            yield
        finally:
            self.release(digest)

    def acquire(self, digest: str) -> None:
        """Begin a use."""
        self._uses[digest] += 1

    def release(self, digest: str) -> None:
        """End a use."""
        self._uses[digest] -= 1
        if self._uses[digest] <= 0:
            del self._uses[digest]
            self._on_unused(digest)
