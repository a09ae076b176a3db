"""The rules of the source tree that no single file can keep: layers, sizes, names.

Knows the layout of the repository. Knows nothing of what the code does.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 399
VAGUE_NAMES = {"utils", "common", "helpers"}


def source_files() -> list[Path]:
    """Return the Python files of the project, leaving out hidden folders and build outputs."""
    files = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name != "build"]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return files


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_imports_keep_to_the_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    report = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stdout + report.stderr


@pytest.mark.parametrize("package", ["engine", "kernels"])
def test_package_imports_without_ray(package: str) -> None:
    """Every module of it, since an import inside a function passes on a machine with ray."""
    code = f"""
import importlib, pkgutil, sys
sys.modules["ray"] = None
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
    importlib.import_module(module.name)
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_adapters_and_resolvers_import_without_torch() -> None:
    result = run_python("import sys; sys.modules['torch'] = None; import adapters, resolvers")
    assert result.returncode == 0, result.stderr


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files()
    }
    assert lengths
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_files_and_folders_are_named_after_what_they_hold() -> None:
    vague = [
        str(path.relative_to(ROOT))
        for path in source_files()
        if VAGUE_NAMES & {*path.relative_to(ROOT).parent.parts, path.stem}
    ]
    assert vague == []


def test_configs_hold_only_data() -> None:
    assert list((ROOT / "configs").rglob("*.py")) == []


def test_no_distribution_shadows_our_kernels() -> None:
    """With that distribution present, transformers imports it and finds ours."""
    names = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    assert "kernels" not in names, (
        "uninstall the distribution 'kernels': it breaks transformers here"
    )
