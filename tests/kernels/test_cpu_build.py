"""Where the CPU extension lies and what the build says when it cannot build."""

from pathlib import Path

import pytest

from kernels import build


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORAFLEET_HOME", str(tmp_path))
    return tmp_path


def test_extension_lies_under_home(home: Path) -> None:
    assert build.extension_path().parent == home / "kernels"


def test_changed_sources_or_torch_are_another_file(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "SOURCE_DIR", sources)
    first = build.extension_path()
    assert build.extension_path() == first
    (sources / "a.cpp").write_text("int b;")
    second = build.extension_path()
    monkeypatch.setattr("torch.__version__", "0.0")
    assert len({first, second, build.extension_path()}) == 3


def test_without_a_compiler_the_build_succeeds_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert build.main() == 0
    assert "no C++ compiler" in capsys.readouterr().out


def test_failed_compilation_is_reported_and_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: "false")
    assert build.main() == 1
    assert "the ops run on torch" in capsys.readouterr().out
    assert list((home / "kernels").iterdir()) == []


def test_only_x86_compiles_for_several_instruction_sets() -> None:
    assert [unit.name for unit in build.units("aarch64")] == ["module", "portable"]
    assert [unit.name for unit in build.units("x86_64")] == [
        "module",
        "avx512_bf16",
        "avx512",
        "avx2",
        "portable",
    ]
