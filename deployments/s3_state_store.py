"""The journal in one object in S3, for clusters without a disk that outlives their head node.

The database is kept in memory. Each write of the object replaces it as a whole, compressed, on
condition that it still is what this controller wrote last: of two controllers, the one that
started first notices at its next write, or before it grants the next lease, and stops for good.
Changes that come while a write is under way share the next one. Knows nothing of what changes mean.
"""

import asyncio
import logging
import sqlite3
import time
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from deployments.errors import JournalLostError, JournalUnavailableError
from deployments.journal import Journal
from deployments.journal_object import JournalObject, ObjectChangedError, ObjectError, ObjectState
from deployments.state_store import StateStore

logger = logging.getLogger(__name__)

# They are written with everything else each time, so fewer than on a disk.
MAX_ENDED_OPERATIONS = 1000
# Level 1: 60 ms for 10,000 names, and a tenth larger than the highest (benchmarks/journal.py).
_COMPRESSION = 1
_MAX_CLAIMS = 5
_NO_ETAG = '"00000000000000000000000000000000"'
# How long a write that certainly did not happen, or a look, is tried again.
_PATIENCE_S = 5.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0

T = TypeVar("T")


class S3StateStore(StateStore):
    """The journal in one object. ``open`` makes one."""

    def __init__(self, place: JournalObject, journal: Journal, found: ObjectState | None) -> None:
        super().__init__(journal)
        self._place = place
        self._etag = None if found is None else found.etag
        self._owner = uuid.uuid4().hex
        self._num_writes = 0
        self._durable = journal.image()
        self._lost: JournalLostError | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._is_dirty = False
        self._saving: asyncio.Task[None] | None = None
        # Looks at the object, writes among them, by when they began.
        self._looks_begun = 0
        self._looks_confirmed = 0
        self._looking = asyncio.Lock()
        # Of its own: no other work delays a write, and a look does not wait for one.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="journal")

    @classmethod
    async def open(cls, place: JournalObject) -> "S3StateStore":
        """Read the journal and take it over from whoever has it now."""
        try:
            for _ in range(_MAX_CLAIMS):
                found = await asyncio.to_thread(place.read)
                state, body = found or (None, b"")
                store = cls(place, _read(body), state)
                try:
                    await store._claim()
                except JournalLostError:
                    # Another controller was a moment quicker; take over from that one.
                    store._threads.shutdown(wait=False)
                    continue
                return store
        except ObjectError as error:
            raise JournalUnavailableError(f"cannot open the journal: {error}") from error
        raise JournalUnavailableError(f"other controllers keep taking the journal {place.uri}")

    # -- the store's side

    async def write(self, change: Callable[[], T]) -> T:
        """Do something to the journal and have it in the object, or undo it and raise."""
        self.check_held()
        result = change()
        durable = asyncio.get_running_loop().create_future()
        self._waiting.append(durable)
        self._save_soon()
        await durable
        return result

    def _note(self, change: Callable[[], None]) -> None:
        self.check_held()
        change()
        self._save_soon()

    def check_held(self) -> None:
        """Raise JournalLostError if it is known that another controller took over."""
        if self._lost is not None:
            raise self._lost

    def mark(self) -> int:
        """A point in time for ``confirm``."""
        return self._looks_begun

    async def confirm(self, since: int) -> None:
        """Return if some look that began since then found the object to be ours, else look."""
        while self._looks_confirmed <= since:
            async with self._looking:
                if self._looks_confirmed <= since:
                    await self._look()

    async def close(self) -> None:
        """Write what is left. The next controller takes over without being let."""
        while self._saving is not None:
            await asyncio.wait((self._saving,))
        self.journal.close()
        self._threads.shutdown(wait=False)

    # -- writing

    def _save_soon(self) -> None:
        self._is_dirty = True
        if self._saving is None:
            self._saving = asyncio.ensure_future(self._save_all())

    async def _save_all(self) -> None:
        try:
            while self._is_dirty:
                self._is_dirty = False
                waiting, self._waiting = self._waiting, []
                try:
                    await self._save()
                except JournalUnavailableError as error:
                    self._take_back(waiting + self._waiting, error)
                except BaseException as error:
                    self._take_back(waiting + self._waiting, error)
                    raise
                else:
                    _resolve(waiting, None)
        finally:
            self._saving = None

    async def _save(self) -> None:
        self._num_writes += 1
        writer = f"{self._owner}-{self._num_writes}"
        # In the content too, so that two writers' objects never have the same etag.
        self.journal.write_setting("writer", writer)
        image = self.journal.image()
        body = await self._in_thread(lambda: zlib.compress(image, _COMPRESSION))
        look = self._begin_look()
        state = await self._put(body, writer)
        self._etag = state.etag
        self._durable = image
        self._confirm_look(look)

    async def _put(self, body: bytes, writer: str) -> ObjectState:
        """Write until it is known to have happened, or known not to have and hopeless."""
        is_certain, until, pause_s = True, time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
        while True:
            try:
                return await self._in_thread(
                    lambda: self._place.write(body, writer, replaces=self._etag)
                )
            except ObjectChangedError as error:
                found = await self._find_state()
                if found is not None and found.writer == writer:
                    return found  # An earlier try of ours, whose answer was lost.
                raise self._lose() from error
            except ObjectError as error:
                is_certain = is_certain and error.is_certain
                is_hopeless = not error.may_pass or time.monotonic() > until
                if is_certain and is_hopeless:
                    raise JournalUnavailableError(
                        f"the journal cannot be written: {error}"
                    ) from error
                logger.warning("writing the journal again: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _find_state(self) -> ObjectState | None:
        """What the object is now; asked until somebody answers, since it decides who goes on."""
        while True:
            try:
                return await self._in_thread(self._place.head)
            except ObjectError as error:
                logger.warning("looking at the journal again: %s", error)
                await asyncio.sleep(_MAX_PAUSE_S)

    def _take_back(self, waiting: list[asyncio.Future[None]], error: BaseException) -> None:
        """Undo all that is not in the object."""
        logger.warning("%s changes are taken back: %s", len(waiting), error)
        self._waiting, self._is_dirty = [], False
        self.journal.return_to(self._durable)
        _resolve(waiting, error)

    # -- taking over and losing

    async def _claim(self) -> None:
        await self.write(lambda: None)
        # A store that ignores conditions would let two controllers write: ask for the impossible.
        body = await self._in_thread(lambda: zlib.compress(self._durable, _COMPRESSION))
        try:
            await self._in_thread(lambda: self._place.write(body, self._owner, replaces=_NO_ETAG))
        except ObjectChangedError:
            return
        raise JournalUnavailableError(f"{self._place.uri}: this store ignores If-Match")

    async def _look(self) -> None:
        self.check_held()
        look = self._begin_look()
        until, pause_s = time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
        while True:
            try:
                found = await self._in_thread(self._place.head)
            except ObjectError as error:
                if not error.may_pass or time.monotonic() > until:
                    raise JournalUnavailableError(f"the journal cannot be read: {error}") from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                continue
            if found is None or not found.writer.startswith(self._owner):
                raise self._lose()
            return self._confirm_look(look)

    def _begin_look(self) -> int:
        self._looks_begun += 1
        return self._looks_begun

    def _confirm_look(self, look: int) -> None:
        self._looks_confirmed = max(self._looks_confirmed, look)

    def _lose(self) -> JournalLostError:
        if self._lost is None:
            self._lost = JournalLostError(
                f"another controller has taken over the journal {self._place.uri}; "
                "this one has stopped"
            )
            logger.error("%s", self._lost)
        return self._lost

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


async def read_object(place: JournalObject) -> Journal:
    """The journal in an object as it is now, without taking it over."""
    try:
        found = await asyncio.to_thread(place.read)
    except ObjectError as error:
        raise JournalUnavailableError(f"cannot read the journal: {error}") from error
    if found is None:
        raise ValueError(f"there is no journal {place.uri}")
    return _read(found[1])


def _read(body: bytes) -> Journal:
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    if body:
        try:
            db.deserialize(zlib.decompress(body))
            return Journal(db, max_ended_operations=MAX_ENDED_OPERATIONS)
        except (zlib.error, sqlite3.Error) as error:
            raise JournalUnavailableError(f"the journal is damaged: {error}") from error
    return Journal(db, max_ended_operations=MAX_ENDED_OPERATIONS)


def _resolve(waiting: list[asyncio.Future[None]], error: BaseException | None) -> None:
    for future in waiting:
        if future.done():
            continue  # Its caller went away.
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
