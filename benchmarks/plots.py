"""The committed scaling results as the pictures of ``docs/performance.md``.

    python -m benchmarks.plots

Reads ``benchmarks/results/scaling.json`` alone, measures nothing, and writes ``docs/images``. The
same results give the same files: no dates, no random ids.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import RESULTS
from benchmarks.scaling_fit import fit_line

SOURCE = RESULTS / "scaling.json"
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"

Curves = Mapping[str, Mapping[str, Sequence[float]]]

_STYLE: Any = {
    # Text as text: small files that can be searched and read aloud.
    "svg.fonttype": "none",
    "svg.hashsalt": "lorafleet",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}
_COLORS = ("#1f77b4", "#d95f02")


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture: which curves, by their labels, against what."""

    name: str
    curves: Mapping[str, str]
    x_label: str
    is_log: bool = False
    has_line: bool = True


PLOTS = (
    Plot("batch", {"batch_base": "base model", "batch_mixed": "an adapter each"}, "batch"),
    Plot("context", {"context": "base model, batch of 4"}, "context, tokens"),
    Plot(
        "resident",
        {"resident": "batch of 16"},
        "resident adapters",
        is_log=True,
        has_line=False,
    ),
    Plot("rank", {"rank": "8 adapters in a batch of 8"}, "rank"),
    Plot(
        "names",
        {"names": "8 adapters in a batch of 8"},
        "registered names",
        is_log=True,
        has_line=False,
    ),
)


def draw(plot: Plot, curves: Curves) -> Figure:
    """Points as measured, the line through them, and the floor."""
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    for color, (name, label) in zip(_COLORS, plot.curves.items(), strict=False):
        _draw_curve(axes, plot, curves[name], color, label)
    if plot.is_log:
        xs = curves[next(iter(plot.curves))]["x"]
        axes.set_xscale("log", base=2 if max(xs) <= 64 else 10)
        axes.set_xticks(xs, [f"{x:,}" for x in xs])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel("decode step, ms")
    axes.legend(loc="best")
    return figure


def _draw_curve(
    axes: Axes, plot: Plot, curve: Mapping[str, Sequence[float]], color: str, label: str
) -> None:
    xs = curve["x"]
    axes.plot(xs, _ms(curve["seconds"]), "o", color=color, label=label, markersize=4)
    if plot.has_line:
        line = fit_line(xs, curve["seconds"])
        axes.plot(xs, _ms([line.at(x) for x in xs]), "-", color=color, linewidth=1)
    axes.plot(xs, _ms(curve["floor_s"]), ":", color=color, linewidth=1, label=f"floor, {label}")


def write_plots(source: Path, target: Path) -> Iterator[Path]:
    """Write every picture and yield where."""
    content = source.read_bytes()
    curves: Curves = json.loads(content)["curves"]
    # Tells whether a picture is of these very results, whatever library drew it.
    metadata: dict[str, Any] = {
        "Date": None,
        "Creator": None,
        "Source": f"sha256:{digest(content)}",
    }
    with matplotlib.rc_context(rc=_STYLE):
        for plot in PLOTS:
            path = target / f"scaling-{plot.name}.svg"
            draw(plot, curves).savefig(path, metadata=metadata)
            yield path


def digest(content: bytes) -> str:
    """What a picture says it was made from."""
    return hashlib.sha256(content).hexdigest()


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def main() -> None:
    """Write all pictures."""
    for path in write_plots(SOURCE, IMAGES):
        print(path.name)


if __name__ == "__main__":
    main()
