"""Times of runs that differ in micro-batches alone, and how much later all comes with each further unit of these.

Times are exact: slots, or seconds in ticks of one size.
"""

from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Times
from cdpsim.runs import Run
from cdpsim.studies.folding.matches import match_nodes, moments_of
from cdpsim.trace.metrics import memory


class GrowingTimes(NamedTuple):
    """When the nodes of a run start and end, and how much later with each further unit; NaN of those in the middle."""

    start: Times
    end: Times
    start_grows: Times
    end_grows: Times


def growing_times(before: Run, now: Run) -> GrowingTimes | None:
    """Return how much later each node of the second of two runs starts and ends with each unit.

    Return None where the runs do not differ in their middle alone, by units that repeat each other.
    """
    matches = match_nodes(now.program, before.program) if now.costs.tick == before.costs.tick else None
    if matches is None:
        return None
    found: list[Times] = []
    for earlier, column in ((before.start, now.start), (before.end, now.end)):
        times = column[matches.now]
        later = times - earlier[matches.before]
        rows, leader = matches.alike
        if (later[rows] != later[leader]).any() or not matches.middle.grows_alike(earlier, column, later):
            return None
        for values in (times, later):
            found.append(np.full(now.program.nodes, np.nan))
            found[-1][matches.now] = values
    start, start_grows, end, end_grows = found
    return GrowingTimes(start, end, start_grows, end_grows)


def most_units(before: Run, now: Run, times: GrowingTimes) -> float:
    """Return the units up to which nodes start when those for which they wait have ended."""
    matches = match_nodes(now.program, before.program)
    assert matches is not None
    earlier, later = matches.waits
    less = times.end_grows[earlier] - times.start_grows[later]  # with each unit
    rows = np.flatnonzero(less > 0)
    left = times.start[later[rows]] - times.end[earlier[rows]]
    return float((left / less[rows]).min(initial=np.inf))


def keeps_moments(before: Run, now: Run, times: GrowingTimes) -> bool:
    """Return whether devices begin and end to hold things in the same order, whatever the units.

    Of what begins and what ends, the later one then grows at least as much; and what is at one time grows alike. So it
    is with all that grows in number, and with what does not.
    """
    buffers, moments = now.program.buffers, moments_of(now.program, before.program)
    row, first, begun, ended = moments.row, moments.first, *moments.opposite
    with np.errstate(invalid="ignore"):
        at, grows, then = (
            np.concatenate(memory.buffer_spans(buffers, *spans))[row]
            for spans in (
                (times.start, times.end),
                (times.start_grows, times.end_grows),
                (times.start + times.start_grows, times.end + times.end_grows),
            )
        )
    if not len(row):
        return True
    grown = grows[first]
    # Of several ends of a buffer the last one must stay the last.
    if (then - at != grows).any() or (grows != grown[moments.number]).any():
        return False
    earliest, latest = np.minimum.reduceat(at, first), np.maximum.reduceat(at, first)
    crossed = (grown[begun] < grown[ended]) & (latest[begun] >= earliest[ended])
    crossed |= (grown[begun] > grown[ended]) & (latest[ended] >= earliest[begun])
    return not crossed.any()
