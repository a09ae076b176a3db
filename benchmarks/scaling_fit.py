"""The shape of a measured curve: its best line, and how fast it grows at its end. Plain numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

# How many of the last points say how a curve goes on.
_TAIL = 3


@dataclass(frozen=True, slots=True)
class LineFit:
    """``y = intercept + slope * x``, and the largest distance of a point as a share of its y."""

    intercept: float
    slope: float
    worst: float

    def at(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> LineFit:
    """Fit by least squares of what each point is off as a share of itself.

    Plain least squares would look at the largest points alone.
    """
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    joint = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True))
    slope = joint / spread
    intercept = mean_y - slope * mean_x
    worst = max(abs(intercept + slope * x - y) / y for x, y in zip(xs, ys, strict=True))
    return LineFit(intercept, slope, worst)


def end_exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The e of ``y ~ x ** e`` through the last points: 0 is flat, 1 linear, more superlinear."""
    log_x, log_y = ([math.log(value) for value in values[-_TAIL:]] for values in (xs, ys))
    return linear_regression(log_x, log_y).slope
