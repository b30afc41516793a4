"""Loops that numba compiles: imported only for large programs, and only where numba is installed."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import numba
import numpy as np
from numba.extending import register_jitable

from cdpsim.numeric import fair_shares
from cdpsim.numeric.columns import Ints, Times

for _loop in fair_shares.LOOPS:
    register_jitable(_loop)


def compile_and_cache(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a loop when it is first called, and keep the outcome in a file, for later processes.

    Where that file is damaged, or cannot be written, it is emptied and the loop compiled for this process alone.
    """
    swift, uncached = numba.njit(cache=True, nogil=True)(loop), numba.njit(nogil=True)(loop)

    @wraps(loop)
    def call(*arguments: Any) -> Any:
        try:
            return swift(*arguments)
        except Exception:  # reading a damaged pickle may raise any; what is wrong with the arguments comes up again
            with suppress(Exception):
                swift._cache.flush()
            return uncached(*arguments)

    return call


CompiledFairRates = partial(fair_shares.FairRates, compiled=compile_and_cache(fair_shares.share))


@register_jitable  # type: ignore[untyped-decorator]
def _find_followers(before: Ints, after: Ints, waits_for: Ints, first: Ints, reach: Ints) -> None:
    """Fill in the last three arrays as `cdpsim.numeric.paths.successors` does; the first two of them are zeros."""
    for edge in range(len(before)):
        first[before[edge]] += 1
        waits_for[after[edge]] += 1
    for node in range(len(waits_for)):
        first[node + 1] += first[node]
    # From here on `first` is where a node's followers end; as they are filled in from the back, where they begin.
    for edge in range(len(before)):
        first[before[edge]] -= 1
        reach[first[before[edge]]] = after[edge]


@compile_and_cache
def sweep_nodes(
    before: Ints, after: Ints, duration: Times, start: Times, waits_for: Ints, first: Ints, reach: Ints
) -> int:
    """Do what `cdpsim.numeric.paths.longest_paths` does, one node after another, in the array of earliest starts.

    The last three arrays are work space: nodes (zeros), nodes + 1 (zeros) and edges long.
    Returns how many nodes were reached.
    """
    _find_followers(before, after, waits_for, first, reach)
    # A stack of nodes that may start: `waits_for`, which is 0 of these, names the one below.
    top = -1
    for node in range(len(duration) - 1, -1, -1):
        if waits_for[node] == 0:
            waits_for[node] = top
            top = node
    done = 0
    while top >= 0:
        node = top
        top = waits_for[node]
        done += 1
        ended = start[node] + duration[node]
        for k in range(first[node], first[node + 1]):
            follower = reach[k]
            if ended > start[follower]:
                start[follower] = ended
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                waits_for[follower] = top
                top = follower
    return done


@compile_and_cache
def times_of_moments(moments: Ints, starts: Times, ends: Times) -> Ints:
    """Return the times, below 2^31, of moments: of the start of a node, of its end, or of the start of the run."""
    times = np.zeros(len(moments), dtype=np.int32)
    for row in range(len(moments)):
        moment = moments[row]
        if moment >= 0:
            times[row] = ends[moment >> 1] if moment & 1 else starts[moment >> 1]
    return times


@compile_and_cache
def step_function_of_slots(
    key: Ints, size: Ints, begin: Ints, finish: Ints, starts: Ints, ends: Ints, changes: Ints
) -> tuple[Ints, Ints, Ints]:
    """Do what `cdpsim.trace.metrics.memory.step_function` does, for whole times.

    Buffers are held from their `begin` moments, whose times are looked up here, to their `finish` times. `changes` is
    an array of zeros, a row for each key and a column for each time, in which they are added up.
    """
    for row in range(len(key)):
        # Written out: a call for each row would cost more than all the rest.
        moment = begin[row]
        time = starts[0] * 0
        if moment >= 0:
            time = ends[moment >> 1] if moment & 1 else starts[moment >> 1]
        changes[key[row], time] += size[row]
        changes[key[row], finish[row]] -= size[row]
    rows = 0
    for k in range(len(changes)):
        for time in range(changes.shape[1]):
            rows += changes[k, time] != 0
    keys, times = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.int64)
    totals = np.empty(rows, dtype=np.int64)
    row = 0
    for k in range(len(changes)):
        total = 0
        for time in range(changes.shape[1]):
            if changes[k, time] != 0:
                total += changes[k, time]
                keys[row], times[row], totals[row] = k, time, total
                row += 1
    return keys, times, totals


@compile_and_cache
def fill_in_levels(
    order: Ints,
    time: Times,
    device: Ints,
    category: Ints,
    size: Ints,
    held: Ints,
    peaks: Ints,
    of_category: Ints,
    of_all: Ints,
) -> None:
    """Fill in what its device holds when each buffer begins, of its category and in all, and each device's peaks.

    Events are the beginnings of buffers, and then their ends. They come in the order of their times, and those of one
    time count together. `held` and `peaks` are zeros, for each device, category and the sum of these.
    """
    every, first = held.shape[1] - 1, 0
    while first < len(order):
        now, last = time[order[first]], first
        while last < len(order) and time[order[last]] == now:
            event = order[last]
            ends = event >= len(size)
            buffer = event - len(size) if ends else event
            change = -size[buffer] if ends else size[buffer]
            held[device[buffer], category[buffer]] += change
            held[device[buffer], every] += change
            last += 1
        for k in range(first, last):
            buffer = order[k]
            if buffer < len(size):
                d, c = device[buffer], category[buffer]
                of_category[buffer], of_all[buffer] = held[d, c], held[d, every]
                peaks[d, c], peaks[d, every] = max(peaks[d, c], held[d, c]), max(peaks[d, every], held[d, every])
        first = last


@compile_and_cache
def find_last_waits(before: Ints, after: Ints, end: Times, found: Ints) -> None:
    """Fill in, for each node, the one before it that ended last, the highest of several; `found` is -1 throughout."""
    for edge in range(len(before)):
        node, last = before[edge], found[after[edge]]
        if last < 0 or end[node] > end[last] or (end[node] == end[last] and node > last):
            found[after[edge]] = node


@register_jitable  # type: ignore[untyped-decorator]
def _length_within(begin: float, end: float, low: float, high: float) -> float:
    return max(min(end, high) - max(begin, low), 0)


@compile_and_cache
def trace_waits(
    waits_for: Ints,
    passes_on: Ints,
    device_of: Ints,
    start: Times,
    end: Times,
    node: Ints,
    free: Times,
    device: Ints,
    low: Times,
    high: Times,
    first: Ints,
    waits: Times,
) -> None:
    """Follow back what each gap, from `low` to `high`, waited for, through all nodes that only pass it on.

    Those are messages, of which `passes_on` is 1, and updates, 2, or 3 if on the device of the gap alone; of all others
    it is 0. `node` is replaced by the node found, -1 if there is none; `first` becomes the first one of the messages.
    `waits` is how much of the gap was for messages, or for streams, which the gap's own task left at `free`.
    """
    for gap in range(len(node)):
        through, begin, until = node[gap], low[gap], high[gap]
        there = end[through] if through >= 0 else 0
        waited = _length_within(there, free[gap], begin, until)
        while through >= 0 and passes_on[through]:
            before, kind = waits_for[through], passes_on[through]
            if kind == 3 and device_of[through] != device[gap]:
                break
            if kind == 1:
                made = end[before] if before >= 0 else 0
                waited += _length_within(start[through], end[through], begin, until)
                waited += _length_within(made, start[through], begin, until)
                first[gap] = through
            through = before
        node[gap], waits[gap] = through, waited
