"""Finding a key's holder, and following a file of keys through every way of changing it."""

import logging
import os
from pathlib import Path

import pytest

from deployments.access.key_document import KeysError
from deployments.access.key_holder import KeyHolder
from deployments.access.keyring import CHECK_PERIOD_S, Keyring
from tests.deployments.fake_clock import FakeClock, SteppedClock

OLD, NEW = b"sk-old-0123456789abc", b"sk-new-0123456789abc"


def text_of(*secrets: bytes) -> str:
    return f"keys: [{{name: team, secrets: [{', '.join(map(bytes.decode, secrets))}]}}]"


class Rotation:
    """A keyring on a file, and a clock that passes its checks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = SteppedClock()
        path.write_text(text_of(OLD))
        self.keyring = Keyring({}, path, num_ingresses=1, clock=self.clock)

    def pass_check(self) -> None:
        self.clock.step(CHECK_PERIOD_S)
        self.keyring.find(b"")

    def known(self) -> set[bytes]:
        """Which keys are valid once the file was looked at twice."""
        self.pass_check()
        self.pass_check()
        return {key for key in (OLD, NEW) if self.keyring.find(key)}


@pytest.fixture
def rotation(tmp_path: Path) -> Rotation:
    return Rotation(tmp_path / "keys.yaml")


def test_odd_keys_of_the_settings_are_found_however_a_client_sends_them() -> None:
    odd = "k\u00e9y-\u20ac"
    holder = KeyHolder(name="api-key")
    keyring = Keyring({odd: holder, "k\u00e9": holder}, None, num_ingresses=1, clock=FakeClock())
    assert keyring.find(odd.encode()) is holder
    assert keyring.find("k\u00e9".encode("latin-1")) is holder
    for wrong in (b"", b"\x00", b"k\xff\xfe", odd.encode()[:-1], odd.encode() + b" ", b"x" * 99999):
        assert keyring.find(wrong) is None


def test_keys_overlap_while_they_are_rotated(rotation: Rotation) -> None:
    assert rotation.known() == {OLD}
    rotation.path.write_text(text_of(OLD, NEW))
    assert rotation.known() == {OLD, NEW}
    rotation.path.write_text(text_of(NEW))
    assert rotation.known() == {NEW}


def test_a_file_put_in_place_by_a_link_is_followed(rotation: Rotation, tmp_path: Path) -> None:
    (tmp_path / "next").write_text(text_of(NEW))
    os.symlink(tmp_path / "next", tmp_path / "link")
    os.replace(tmp_path / "link", rotation.path)
    assert rotation.known() == {NEW}


def test_a_file_that_is_still_being_written_is_not_believed(rotation: Rotation) -> None:
    """Cut short, it may be a valid document with a shorter key."""
    whole = f"keys:\n- name: team\n  secrets:\n  - {NEW.decode()}{NEW.decode()}\n"
    cut = whole[: whole.index(NEW.decode()) + len(NEW)]
    for length in range(len(cut) - 3, len(cut) + 1):
        rotation.path.write_text(whole[:length])
        rotation.pass_check()
        assert rotation.keyring.find(NEW) is None
        assert rotation.keyring.find(OLD)
    rotation.path.write_text(whole)
    assert rotation.known() == set()
    assert rotation.keyring.find(NEW + NEW)


@pytest.mark.parametrize("content", ["", "keys: [", "\x00\xff", "keys: []", f"keys: {OLD!r}"])
def test_what_cannot_be_used_changes_nothing_and_is_told_once(
    rotation: Rotation, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rotation.path.write_bytes(content.encode("latin-1"))
    for _ in range(3):
        assert rotation.known() == {OLD}
    assert rotation.keyring.is_stale
    (record,) = caplog.records
    assert "the earlier keys stay" in record.getMessage()
    assert OLD.decode() not in record.getMessage()
    rotation.path.write_text(text_of(NEW))
    assert rotation.known() == {NEW}
    assert not rotation.keyring.is_stale


def test_a_file_that_is_gone_for_a_while_keeps_its_keys(rotation: Rotation) -> None:
    away = rotation.path.with_name("away")
    rotation.path.rename(away)
    assert rotation.known() == {OLD}
    assert rotation.keyring.is_stale
    away.rename(rotation.path)
    assert rotation.known() == {OLD}
    assert not rotation.keyring.is_stale


def test_a_change_of_one_letter_at_the_same_size_and_time_is_seen(rotation: Rotation) -> None:
    status = rotation.path.stat()
    rotation.path.write_text(text_of(NEW))
    os.utime(rotation.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert rotation.known() == {NEW}


def test_without_a_usable_file_nothing_starts(tmp_path: Path) -> None:
    def start() -> None:
        Keyring({}, tmp_path / "keys.yaml", num_ingresses=1, clock=FakeClock())

    with pytest.raises(FileNotFoundError):
        start()
    (tmp_path / "keys.yaml").write_text("keys: [")
    with pytest.raises(KeysError):
        start()
