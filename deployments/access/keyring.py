"""Finds the holder of a key, and keeps up with the file of keys while it changes.

Knows secrets only as hashes. Knows nothing of HTTP.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

from deployments.access.key_document import Keys, KeysError, parse_keys
from deployments.access.key_holder import KeyHolder
from deployments.clock import Clock

_log = logging.getLogger(__name__)

CHECK_PERIOD_S = 1.0
_MAX_FILE_BYTES = 16 << 20

# What tells one content of a file from another without reading it.
_Signature = tuple[int, int, int, int]


class Keyring:
    """The keys of the settings, which stay, and those of a file, which is followed.

    A changed file is read once it has looked the same at two checks in a row: half of it, written
    at that moment, could be a valid document with shorter keys. What cannot be used changes
    nothing, and ``is_stale`` says so.
    """

    def __init__(
        self,
        fixed: Mapping[str, KeyHolder],
        path: Path | None,
        *,
        num_ingresses: int,
        clock: Clock,
    ) -> None:
        self._pepper = secrets.token_bytes(32)
        self._fixed = {
            digest: holder for secret, holder in fixed.items() for digest in _digests(secret)
        }
        self._path = path
        self._num_ingresses = num_ingresses
        self._clock = clock
        self._next_check = clock.now() + CHECK_PERIOD_S
        self._used: _Signature | None = None
        self._seen: _Signature | None = None
        self._stale_reason: str | None = None
        self.keys = Keys({})
        if path is not None:
            self._used = self._seen = _signature(path)
            self.keys = self._read(path)
        self._index = self._indexed()

    def find(self, secret: bytes) -> KeyHolder | None:
        """Return who holds this key, in a time that tells nothing about any other key."""
        self._follow_file()
        # Under a key of this process' own, nobody can choose what is compared here with what.
        return self._index.get(self._peppered(hashlib.sha256(secret).digest()))

    @property
    def is_stale(self) -> bool:
        """Whether the file says something that is not in use, because it cannot be."""
        return self._stale_reason is not None

    @property
    def has_admins(self) -> bool:
        """Whether any key is an administrator's."""
        return any(holder.is_admin for holder in self._index.values())

    def _follow_file(self) -> None:
        if self._path is None or self._clock.now() < self._next_check:
            return
        self._next_check = self._clock.now() + CHECK_PERIOD_S
        seen, self._seen = self._seen, None
        try:
            self._seen = _signature(self._path)
            if self._seen == self._used or self._seen != seen:
                return
            self._used = self._seen
            keys = self._read(self._path)
        except OSError as error:
            self._used = None
            self._keep_earlier(f"the file of keys cannot be read: {error.strerror}")
            return
        except KeysError as error:
            self._keep_earlier(str(error))
            return
        self.keys, self._stale_reason = keys, None
        self._index = self._indexed()
        _log.info("new keys are in use, of %d holders", len(set(keys.holders.values())))

    def _keep_earlier(self, reason: str) -> None:
        if reason != self._stale_reason:
            _log.error("the earlier keys stay in use: %s", reason)
        self._stale_reason = reason

    def _read(self, path: Path) -> Keys:
        before = _signature(path)
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) > _MAX_FILE_BYTES:
            raise KeysError(f"the file of keys is larger than {_MAX_FILE_BYTES} bytes")
        try:
            keys = parse_keys(content.decode(), num_ingresses=self._num_ingresses)
        except UnicodeDecodeError:
            raise KeysError("the file of keys is not UTF-8") from None
        except KeysError as error:
            raise KeysError(f"the file of keys cannot be used: {error}") from None
        if _signature(path) != before:
            raise KeysError("the file of keys changed while it was read")
        return keys

    def _indexed(self) -> dict[bytes, KeyHolder]:
        everyone = {**self.keys.holders, **self._fixed}
        return {self._peppered(digest): holder for digest, holder in everyone.items()}

    def _peppered(self, digest: bytes) -> bytes:
        return hmac.digest(self._pepper, digest, "sha256")


def _signature(path: Path) -> _Signature:
    status = path.stat()
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _digests(secret: str) -> set[bytes]:
    """A key of the settings may be any text, and clients differ in how they send odd letters."""
    spellings = {secret.encode(), secret.encode("latin-1", errors="replace")}
    return {hashlib.sha256(spelling).digest() for spelling in spellings}
