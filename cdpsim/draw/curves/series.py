"""Step functions of a trace on common times: summed exactly, and thinned where a page could not show all of it."""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Ints, Times, group_starts
from cdpsim.program import Category
from cdpsim.trace import Trace

COLUMNS = 1_000  # about as many pixels as a figure is wide
MOST = 4 * COLUMNS  # points of a curve that are all drawn
SAME = 1e-9  # of the run: real times closer than that are one time


class Series(NamedTuple):
    """Step functions: `value[k, c]` holds from `time[c]` until `time[c + 1]`, the last until the end of the run."""

    time: Times
    value: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum of all functions."""
        total: np.ndarray = self.value.sum(axis=0)
        return total


class Changes(NamedTuple):
    """By how much a device holds more of a category from a time on, or less."""

    device: Ints
    category: Ints
    time: Times
    change: np.ndarray


class Band(NamedTuple):
    """The least, the middle and the most of several step functions, from each time on."""

    time: Times
    least: np.ndarray
    median: np.ndarray
    most: np.ndarray


def span(trace: Trace) -> float:
    """When a run ends."""
    ends = (trace.tasks["end"], trace.messages["end"], trace.memory["time"])
    latest = max((column.max().item() for column in ends if len(column)), default=0)
    return latest or 1


def devices(trace: Trace) -> Ints:
    """The devices that do or hold something."""
    return np.unique(np.concatenate([trace.tasks["device"], trace.memory["device"]]).astype(np.int64))


def changes(trace: Trace) -> Changes:
    """What each row of `trace.memory` changes."""
    memory = trace.memory
    device, category, size = memory["device"], memory["category"], memory["size"].astype(np.int64)
    first = group_starts(device, category)
    before = np.append(0, size[:-1])[: len(size)]
    before[first] = 0
    number = np.zeros(len(size), dtype=np.int64)
    for member in Category:
        number[category == member.name.lower()] = member
    return Changes(device, number, memory["time"], size - before)


def merged(time: Times, end: float) -> Times:
    """Real times that differ by rounding as one: what one device frees and another takes is not held twice."""
    if time.dtype.kind == "i" or not len(time):
        return time
    distinct, where = np.unique(time, return_inverse=True)
    first = np.append(True, np.diff(distinct) > SAME * end)
    one: Times = distinct[first][np.cumsum(first)[where] - 1]
    return one


def summed(key: Ints, time: Times, change: np.ndarray, keys: int) -> Series:
    """Add up what changes for each key from 0 to `keys`; everything is 0 before."""
    distinct, where = np.unique(np.append(time, time.dtype.type(0)), return_inverse=True)
    value = np.zeros((keys, len(distinct)), dtype=change.dtype)
    np.add.at(value, (key, where[:-1]), change)
    return Series(distinct, value.cumsum(axis=1))


def held(trace: Trace) -> Series:
    """What all devices hold together, a function per category in the order of its members."""
    found = changes(trace)
    several = len(devices(trace)) > 1
    time = merged(found.time, span(trace)) if several else found.time
    return summed(found.category, time, found.change, len(Category))


def held_by(found: Changes, device: int) -> Series:
    """What one device holds, a function per category in the order of its members."""
    low, high = np.searchsorted(found.device, [device, device + 1])
    return summed(found.category[low:high], found.time[low:high], found.change[low:high], len(Category))


def rates(key: Ints, begin: Times, end: Times, size: np.ndarray, keys: int, run: float) -> Series:
    """Size over duration while something is on its way, summed for each key."""
    time = merged(np.concatenate([begin, end]), run)
    rate = size / (end - begin)
    series = summed(np.append(key, key), time, np.concatenate([rate, -rate]), keys)
    smallest = SAME * np.abs(series.value).max(initial=0)  # what rounding leaves where nothing is on its way
    return series._replace(value=np.where(series.value > smallest, series.value, 0.0))


def moments(key: Ints, time: Times, size: np.ndarray, keys: int, run: float) -> Series:
    """What is sent at each moment at which something is, summed for each key; not a step function."""
    distinct, where = np.unique(merged(time, run), return_inverse=True)
    value = np.zeros((keys, len(distinct)), dtype=size.dtype)
    np.add.at(value, (key, where), size)
    return Series(distinct, value)


def thinned(series: Series, end: float, columns: int = COLUMNS) -> Series:
    """Leave out what a page could not show: of a column of pixels stay the first, last, least and largest total."""
    if len(series.time) <= 4 * columns:
        return series
    column = np.minimum((series.time / end * columns).astype(np.int64), columns - 1)
    first = group_starts(column)
    by_size = np.lexsort((series.total, column))
    last = np.append(first[1:], len(column)) - 1
    rows = np.unique(np.concatenate([first, last, by_size[first], by_size[last]]))
    return Series(series.time[rows], series.value[:, rows])


def band(functions: list[Series], end: float, *, at_once: bool) -> Band:
    """The least, median and most of several totals: at each time that one changes, or in each of many columns.

    What is of single moments is nothing at all others.
    """
    time = np.unique(np.concatenate([series.time for series in functions]))
    if len(time) > MOST:
        time = np.arange(COLUMNS) * (end / COLUMNS)
    at, low, high = (np.zeros((len(functions), len(time))) for _ in range(3))
    for k, series in enumerate(functions):
        column = np.searchsorted(time, series.time, side="right") - 1
        if at_once:
            np.maximum.at(at[k], column, series.total)
            low[k] = high[k] = at[k]
            continue
        at[k] = series.total[np.searchsorted(series.time, time, side="right") - 1]
        low[k] = high[k] = at[k]
        np.minimum.at(low[k], column, series.total)
        np.maximum.at(high[k], column, series.total)
    return Band(time, low.min(axis=0), np.median(at, axis=0), high.max(axis=0))
