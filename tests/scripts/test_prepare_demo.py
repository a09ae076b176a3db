"""The demo model is taken as complete only when all its bytes are the ones that were written."""

import json
from pathlib import Path

import pytest

from scripts import prepare_demo


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    stamp = prepare_demo.describe(directory, ["config.json"])
    (directory / prepare_demo.STAMP_NAME).write_text(json.dumps(stamp))
    return directory


def test_untouched_checkpoint_is_complete(checkpoint: Path) -> None:
    assert prepare_demo.is_complete(checkpoint)


def test_changed_file_is_noticed(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{ }")
    assert not prepare_demo.is_complete(checkpoint)


def test_missing_file_is_noticed(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert not prepare_demo.is_complete(checkpoint)


def test_missing_directory_is_not_complete(tmp_path: Path) -> None:
    assert not prepare_demo.is_complete(tmp_path / "absent")


def test_unreadable_stamp_is_not_complete(checkpoint: Path) -> None:
    (checkpoint / prepare_demo.STAMP_NAME).write_text("[]")
    assert not prepare_demo.is_complete(checkpoint)


def test_older_conversion_is_not_complete(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_demo, "CONVERSION", prepare_demo.CONVERSION + 1)
    assert not prepare_demo.is_complete(checkpoint)


def test_publishing_replaces_a_damaged_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "leftover").write_text("")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    prepare_demo.publish(checkpoint.rename(scratch / "model"), target)
    assert prepare_demo.is_complete(target)
    assert not (target / "leftover").exists()


def test_home_variable_moves_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path))
    assert prepare_demo.models_directory() == tmp_path / "models"
