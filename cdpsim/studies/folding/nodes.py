"""Times of runs that differ in micro-batches alone, and how much later all comes with each further unit of these.

Times are exact: slots, or seconds in ticks of one size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cdpsim.numeric.columns import Times
from cdpsim.runs import Run
from cdpsim.studies.folding.matches import NodeMatches, match_nodes, moments_of
from cdpsim.trace.metrics import memory


class GrowingTimes(NamedTuple):
    """When the nodes of a run start and end, and how much later with each further unit; NaN of those in the middle."""

    start: Times
    end: Times
    start_grows: Times
    end_grows: Times


def may_grow(runs: Sequence[Run]) -> bool:
    """Return whether a third run might show with two others how nodes come later with each unit."""
    matches = _match(runs)
    return matches is not None and all(_grow_alike(matches, second - first) for first, second in _times(runs, matches))


def growing_times(runs: Sequence[Run]) -> GrowingTimes | None:
    """Return how much later each node of the last of three runs starts and ends with each unit.

    Return None where the runs do not differ in their middle alone, by units that repeat each other.
    """
    matches = _match(runs)
    if matches is None or matches.middle is None:
        return None
    found: list[Times] = []
    whole = ((runs[1].start, runs[2].start), (runs[1].end, runs[2].end))
    for (first, second, third), (before, now) in zip(_times(runs, matches), whole, strict=True):
        later = third - second
        if (later != second - first).any() or not _grow_alike(matches, later):
            return None
        if not matches.middle.grows_alike(before, now, later):
            return None
        for column in (third, later):
            found.append(np.full(runs[-1].program.nodes, np.nan))
            found[-1][matches.rows[-1]] = column
    start, start_grows, end, end_grows = found
    return GrowingTimes(start, end, start_grows, end_grows)


def _match(runs: Sequence[Run]) -> NodeMatches | None:
    """Return the nodes of runs that match, if all times are in ticks of one size."""
    *before, last = (run.program for run in runs)
    return match_nodes(last, *before) if len({run.costs.tick for run in runs}) == 1 else None


def _times(runs: Sequence[Run], matches: NodeMatches) -> list[list[Times]]:
    """Return the starts of nodes that match, of each run, and their ends."""
    return [
        [column[rows] for column, rows in zip(columns, matches.rows, strict=True)]
        for columns in ([run.start for run in runs], [run.end for run in runs])
    ]


def _grow_alike(matches: NodeMatches, later: Times) -> bool:
    """Return whether all nodes of a kind and a half are as much later as each other."""
    rows, leader = matches.alike
    return bool((later[rows] == later[leader]).all())


def most_units(runs: Sequence[Run], times: GrowingTimes) -> float:
    """Return the units up to which nodes start when those for which they wait have ended."""
    matches = _match(runs)
    assert matches is not None
    before, after = matches.waits
    less = times.end_grows[before] - times.start_grows[after]  # with each unit
    rows = np.flatnonzero(less > 0)
    left = times.start[after[rows]] - times.end[before[rows]]
    return float((left / less[rows]).min(initial=np.inf))


def keeps_moments(runs: Sequence[Run], times: GrowingTimes) -> bool:
    """Return whether devices begin and end to hold things in the same order, whatever the units.

    Of what begins and what ends, the later one then grows at least as much; and what is at one time grows alike. So it
    is with all that grows in number, and with what does not.
    """
    *before, program = (run.program for run in runs)
    buffers, moments = program.buffers, moments_of(program, *before)
    row, first, begun, ended = moments.row, moments.first, *moments.opposite
    with np.errstate(invalid="ignore"):
        now, grows, then = (
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
    if (then - now != grows).any() or (grows != grown[moments.number]).any():
        return False
    earliest, latest = np.minimum.reduceat(now, first), np.maximum.reduceat(now, first)
    crossed = (grown[begun] < grown[ended]) & (latest[begun] >= earliest[ended])
    crossed |= (grown[begun] > grown[ended]) & (latest[ended] >= earliest[begun])
    return not crossed.any()
