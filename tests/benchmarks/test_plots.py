"""Pictures of the scaling results: repeatable, with text in them, and of what is committed."""

import json
from pathlib import Path

import pytest

from benchmarks.plots import IMAGES, PLOTS, SOURCE, Plot, digest, write_plots
from tests.docs.code_blocks import ROOT


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Made-up results that have every curve."""
    curve = {"x": [1, 2, 4, 64], "seconds": [0.5, 0.6, 0.8, 6.8], "floor_s": [0.4, 0.5, 0.7, 6.4]}
    names = [name for plot in PLOTS for name in plot.curves]
    path = tmp_path / "scaling.json"
    path.write_text(json.dumps({"curves": dict.fromkeys(names, curve)}))
    return path


def test_the_same_results_give_the_same_files(source: Path, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    first = {path.name: path.read_bytes() for path in write_plots(source, tmp_path / "first")}
    second = {path.name: path.read_bytes() for path in write_plots(source, tmp_path / "second")}
    assert first == second
    assert len(first) == len(PLOTS)


def test_labels_are_text(source: Path, tmp_path: Path) -> None:
    for plot, path in zip(PLOTS, write_plots(source, tmp_path), strict=True):
        text = path.read_text()
        assert f">{plot.x_label}</text>" in text
        assert all(f">{label}</text>" in text for label in plot.curves.values())
        assert len(text) < 60_000


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_committed_pictures_are_of_the_committed_results(plot: Plot) -> None:
    path = IMAGES / f"scaling-{plot.name}.svg"
    assert f"sha256:{digest(SOURCE.read_bytes())}" in path.read_text()
    assert f"images/{path.name}" in (ROOT / "docs" / "performance.md").read_text()
