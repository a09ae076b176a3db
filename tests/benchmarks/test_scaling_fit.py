"""Lines and exponents of curves whose shape is known."""

import pytest

from benchmarks.scaling_fit import end_exponent, fit_line

XS = (1, 2, 4, 8, 16, 32)


def test_a_line_is_found_again() -> None:
    line = fit_line(XS, [5.0 + 0.25 * x for x in XS])
    assert (line.intercept, line.slope) == pytest.approx((5.0, 0.25))
    assert line.worst == pytest.approx(0, abs=1e-12)
    assert line.at(100) == pytest.approx(30)


def test_the_worst_point_is_named_as_a_share_of_itself() -> None:
    ys = [10.0] * len(XS)
    ys[2] = 12.0
    assert 1.0 / 12.0 < fit_line(XS, ys).worst < 2.0 / 12.0


def test_small_points_count_as_much_as_large_ones() -> None:
    ys = [1.0, 2.0, 4.0, 8.0, 16.0, 64.0]
    line = fit_line(XS, ys)
    assert line.at(1) == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_a_power_is_found_again(exponent: float) -> None:
    assert end_exponent(XS, [3.0 * x**exponent for x in XS]) == pytest.approx(exponent)


def test_a_line_with_a_constant_is_never_called_superlinear() -> None:
    assert 0.5 < end_exponent(XS, [5.0 + x for x in XS]) < 1.0


def test_a_quadratic_part_shows_once_it_matters() -> None:
    assert end_exponent(XS, [5.0 + 0.1 * x**2 for x in XS]) > 1.2
