"""Step functions: sums, times that rounding keeps apart, and what is left out where a page cannot show it."""

import numpy as np
import pytest

from cdpsim.draw.step_functions import PIXEL_COLUMNS, Series, rates, sum_at_times, sum_changes, thinned
from cdpsim.numeric.close_times import merge_close_times


def noise(points: int) -> Series:
    """A random walk with a single spike, on irregular times."""
    random = np.random.default_rng(0)
    value = random.integers(0, 100, (2, points))
    value[1, 2 * points // 3] = 1_000
    return Series(np.sort(random.uniform(0, 50, points)), value)


@pytest.mark.parametrize("points", [10, 100_000])
def test_thinning_keeps_what_can_be_seen(points: int) -> None:
    series = noise(points)
    few = thinned(series, 50)
    assert len(few.time) <= 4 * PIXEL_COLUMNS
    rows = np.searchsorted(series.time, few.time)
    assert (series.time[rows] == few.time).all()
    assert (series.value[:, rows] == few.value).all()
    column, kept = (np.floor(each.time / 50 * PIXEL_COLUMNS) for each in (series, few))
    for k in np.unique(column).tolist():
        every, some = series.total[column == k], few.total[kept == k]
        assert (some.max(), some.min(), some[-1]) == (every.max(), every.min(), every[-1])


def test_thinning_leaves_alone_what_is_short() -> None:
    series = noise(4 * PIXEL_COLUMNS)
    assert thinned(series, 50) is series


def test_sums_are_net_and_begin_at_nothing() -> None:
    series = sum_changes(np.array([0, 1, 0, 0, 1]), np.array([2, 2, 5, 5, 7]), np.array([3, 4, -3, 1, -4]), 2)
    assert series.time.tolist() == [0, 2, 5, 7]
    assert series.value.tolist() == [[0, 3, 1, 1], [0, 4, 4, 0]]
    assert series.total.tolist() == [0, 7, 5, 1]


def test_times_that_rounding_keeps_apart_are_one() -> None:
    late = 0.1 + 0.2
    assert late != 0.3
    assert merge_close_times(np.array([late, 0.3, 0.4, 0.3]), 1.0).tolist() == [0.3, 0.3, 0.4, 0.3]
    assert merge_close_times(np.array([3, 1, 3]), 5).tolist() == [3, 1, 3]
    assert merge_close_times(np.zeros(0), 1.0).tolist() == []


def test_rates_and_moments() -> None:
    key, size = np.array([0, 1]), np.array([10, 6])
    series = rates(key, np.array([0.1 + 0.2, 1.0]), np.array([2.3, 3.0]), size, 2, 3.0)
    assert series.time.tolist() == [0, 0.1 + 0.2, 1, 2.3, 3]
    assert series.value == pytest.approx(np.array([[0, 5, 5, 0, 0], [0, 0, 3, 3, 0]]))
    assert series.value[:, -1].tolist() == [0, 0]  # exactly, so that nothing is drawn there
    series = sum_at_times(np.array([0, 1, 1]), np.array([4, 4, 2]), np.array([1, 2, 3]), 2)
    assert (series.time.tolist(), series.value.tolist()) == ([2, 4], [[0, 1], [3, 2]])
