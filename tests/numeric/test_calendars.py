"""Calendars held against a clock that ticks: a device works in each tick in which it does not stand still."""

from collections.abc import Sequence

import numpy as np
import pytest
from cdpsim.numeric.disturbances import FOREVER, Calendar, merge_stops
from hypothesis import given
from hypothesis import strategies as st

from cdpsim.numeric.columns import Times

Stops = Sequence[tuple[int, float]]

stops = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=4).map(
    lambda pairs: [(at, at + length) for at, length in pairs]
)


def calendar_of(rows: list[Stops], kind: type = np.int64) -> Calendar:
    """The calendar of devices with these stops, and of one without; node k is on device k."""
    never = FOREVER if kind is np.int64 else np.inf
    pairs = [merge_stops(row) for row in rows]
    shape = len(rows) + 1, max(map(len, pairs), default=0)
    at: Times = np.full(shape, never, dtype=kind)
    until: Times = np.full(shape, never, dtype=kind)
    for k, row in enumerate(pairs):
        for c, (low, high) in enumerate(row):
            at[k, c], until[k, c] = low, high
    return Calendar(np.arange(len(rows) + 1), at, until)


def by_ticks(row: Stops, ready: int, duration: int) -> tuple[int, int]:
    """Go on tick by tick from the one in which the task is ready."""
    now, start, left = ready, None, duration
    while start is None or left:
        if not any(at <= now < until for at, until in row):
            start = now if start is None else start
            if not left:
                break
            left -= 1
        now += 1
    return start, now if duration else start


@given(st.lists(stops, min_size=1, max_size=4), st.integers(0, 25), st.integers(0, 12))
def test_times_are_those_of_a_ticking_clock(rows: list[Stops], ready: int, duration: int) -> None:
    """In whole numbers, exactly, and in real ones the same; also for a column of each of several runs."""
    expected = [by_ticks(row, ready, duration) for row in rows] + [(ready, ready + duration)]
    nodes = np.arange(len(rows) + 1)
    for kind in (np.int64, np.float64):
        column = np.full(len(nodes), ready, dtype=kind)
        lasts = np.full(len(nodes), duration, dtype=kind)
        calendar = calendar_of(rows, kind)
        start, end = calendar.worked(nodes, column, lasts)
        assert list(zip(start.tolist(), end.tolist(), strict=True)) == expected
        both = calendar.worked(nodes, np.stack([column] * 2, axis=1), np.stack([lasts] * 2, axis=1))
        assert [part[:, 1].tolist() for part in both] == [start.tolist(), end.tolist()]
        begin, until = calendar.pauses(nodes, start, end)
        assert (until - begin).sum() == (end - start - lasts).sum()


@given(stops, st.tuples(st.floats(0, 25), st.floats(0, 25)), st.tuples(st.floats(0, 9), st.floats(0, 9)))
def test_who_is_ready_later_or_takes_longer_ends_no_earlier(
    row: Stops, ready: tuple[float, float], duration: tuple[float, float]
) -> None:
    """To the last bit, which sums of rounded numbers do not give by themselves."""
    calendar = calendar_of([row], np.float64)
    nodes = np.zeros(2, dtype=np.int64)
    start, end = calendar.worked(nodes, np.array(sorted(ready)), np.full(2, duration[0]))
    assert start[0] <= start[1]
    assert end[0] <= end[1]
    _, end = calendar.worked(nodes, np.full(2, ready[0]), np.array(sorted(duration)))
    assert end[0] <= end[1]


@given(stops, st.integers(0, 9), st.integers(0, 25), st.integers(0, 9))
def test_shifting_all_shifts_the_end(row: Stops, shift: int, ready: int, duration: int) -> None:
    ends = []
    for by in (0, shift):
        calendar = calendar_of([[(at + by, until + by) for at, until in row]])
        _, end = calendar.worked(np.zeros(1, dtype=np.int64), np.array([ready + by]), np.array([duration]))
        ends.append(int(end[0]))
    assert ends[1] - ends[0] == shift


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_what_stops_for_good_does_not_end(kind: type) -> None:
    """Under way at 5 it began; ready at 5 it does not; done by 5 it is; and what is ready never does nothing more."""
    never = FOREVER if kind is np.int64 else np.inf
    calendar = calendar_of([[(5, never)]], kind)
    start, end = calendar.worked(
        np.zeros(4, dtype=int), np.array([3, 5, 3, never], dtype=kind), np.full(4, 2 + 1, kind)
    )
    assert start.tolist() == [3, never, 3, never]
    assert end.tolist() == [never] * 4
    _, end = calendar.worked(np.zeros(1, dtype=int), np.array([3], dtype=kind), np.array([2], dtype=kind))
    assert end.tolist() == [5]


def test_stops_that_touch_are_one() -> None:
    assert merge_stops([(8, 9), (1, 3), (3, 5), (2, 4), (6, 6)]) == [(1, 5), (8, 9)]
