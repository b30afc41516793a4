"""Step functions of a trace on common times: summed exactly, and thinned where a page could not show all times."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cdpsim.draw.views import Views
from cdpsim.numeric.columns import CLOSE_TIMES, Ints, Times, group_starts, merge_close_times
from cdpsim.program import Category
from cdpsim.trace import Trace

PIXEL_COLUMNS = 1_000  # about as many pixels as a figure is wide


class Series(NamedTuple):
    """Step functions: `value[k, c]` holds from `time[c]` until `time[c + 1]`, the last until the end of the run."""

    time: Times
    value: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The sum of all functions."""
        total: np.ndarray = self.value.sum(axis=0)
        return total

    def peak(self) -> tuple[float, float]:
        """Return (time, value) of the first largest total; totals that differ by rounding alone are equal."""
        if not len(self.time):
            return 0, 0
        total = self.total
        most = total.max()
        at = int((total >= most - (CLOSE_TIMES * most if total.dtype.kind == "f" else 0)).argmax())
        return self.time[at].item(), most.item()


def end_of_run(trace: Trace) -> float:
    """Return the latest time of a trace, or 1 if nothing takes time."""
    ends = (trace.tasks["end"], trace.messages["end"], trace.memory["time"])
    latest = max((column.max().item() for column in ends if len(column)), default=0)
    return latest or 1


def used_devices(trace: Trace) -> Ints:
    """Return the devices that have tasks or memory."""
    return np.unique(np.concatenate([trace.tasks["device"], trace.memory["device"]]).astype(np.int64))


def sum_at_times(key: Ints, time: Times, size: np.ndarray, keys: int) -> Series:
    """Return the sums of sizes for each key from 0 to `keys` and each time; the result is no step function."""
    distinct, column = np.unique(time, return_inverse=True)
    value = np.zeros((keys, len(distinct)), dtype=size.dtype)
    np.add.at(value, (key, column), size)
    return Series(distinct, value)


def sum_changes(key: Ints, time: Times, change: np.ndarray, keys: int) -> Series:
    """Return the step functions with these changes for each key from 0 to `keys`, beginning with 0 at time 0."""
    sums = sum_at_times(np.append(key, 0), np.append(time, 0), np.append(change, 0), keys)
    return sums._replace(value=sums.value.cumsum(axis=1))


def sum_spans(key: Ints, begin: Times, end: Times, size: np.ndarray, keys: int, run: float) -> Series:
    """Return the sum of the sizes of all spans at each time of a run until `run`, for each key from 0 to `keys`."""
    time = merge_close_times(np.concatenate([begin, end]), run)
    return sum_changes(np.tile(key, 2), time, np.concatenate([size, -size]), keys)


def total_memory(trace: Trace) -> Series:
    """Return the memory of all devices together, a function for each category in the order of its members."""
    views, time = Views(trace), trace.memory["time"]
    if len(used_devices(trace)) > 1:
        time = merge_close_times(time, end_of_run(trace))
    return sum_changes(views.category, time, views.memory_change, len(Category))


def ends_of_devices(each: Mapping[int, Series], end: float) -> dict[int, float]:
    """Return when each device, by its memory, lets go of its parameters for good; the end of the run if it keeps some.

    Training would go on there: in a longer run they stay, or others come.
    """
    ends = {}
    for device, (time, value) in each.items():
        held = np.flatnonzero(value[Category.PARAMETERS])
        after = held[-1] + 1 if len(held) else len(time)
        ends[device] = time[after].item() if after < len(time) else end
    return ends


def memory_of_devices(trace: Trace) -> dict[int, Series]:
    """Return the memory of each device, a function for each category in the order of its members."""
    views, time, each = Views(trace), trace.memory["time"], {}
    for device in used_devices(trace).tolist():
        rows = slice(*np.searchsorted(trace.memory["device"], [device, device + 1]))
        each[device] = sum_changes(views.category[rows], time[rows], views.memory_change[rows], len(Category))
    return each


def rates(key: Ints, begin: Times, end: Times, size: np.ndarray, keys: int, run: float) -> Series:
    """Return size over duration while a message travels, summed for each key from 0 to `keys`."""
    series = sum_spans(key, begin, end, size / (end - begin), keys, run)
    smallest = CLOSE_TIMES * np.abs(series.value).max(initial=0)  # the rounding that is left where nothing travels
    return series._replace(value=np.where(series.value > smallest, series.value, 0.0))


def thinned(series: Series, end: float, columns: int = PIXEL_COLUMNS) -> Series:
    """Keep the times that a page can show: those of the first, last, least and largest total of each pixel column."""
    if len(series.time) <= 4 * columns:
        return series
    column = np.minimum((series.time / end * columns).astype(np.int64), columns - 1)
    first = group_starts(column)
    by_size = np.lexsort((series.total, column))
    last = np.append(first[1:], len(column)) - 1
    rows = np.unique(np.concatenate([first, last, by_size[first], by_size[last]]))
    return Series(series.time[rows], series.value[:, rows])
