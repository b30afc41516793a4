"""The exact engine: start times are longest paths through the program."""

from collections.abc import Sequence

import numpy as np

from cdpsim.numeric.columns import Times
from cdpsim.numeric.paths import longest_paths
from cdpsim.program import Program
from cdpsim.program.check import refuse_deadlock
from cdpsim.timing.costs import Costs


def run_by_longest_paths(program: Program, costs: Costs) -> tuple[Times, Times]:
    """Start every node when it is released and the last one it waits for has ended; return starts and ends."""
    earliest = np.zeros_like(costs.duration)
    for (task, _), release in zip(program.releases, costs.release, strict=True):
        earliest[task] = release
    start, end, reached = longest_paths(*program.waits(), costs.duration, earliest, costs.calendar)
    if reached < program.nodes:
        refuse_deadlock(program)
    return start, end


def sweep_together(program: Program, costs: Sequence[Costs], durations: Times | None = None) -> Times:
    """Return the ends of all nodes under each of some costs, a column for each.

    Or under one, with other durations of all nodes: a row for each of many runs.
    """
    graph, duration = program.levels, np.array([each.duration for each in costs]) if durations is None else durations
    earliest = np.zeros((program.nodes, len(costs)), dtype=duration.dtype)
    earliest[[task for task, _ in program.releases]] = np.array([each.release for each in costs]).T
    swept = graph.sweep(np.ascontiguousarray(duration.T[graph.order]), earliest[graph.order], costs[0].calendar)
    ends = np.empty_like(swept)
    ends[graph.order] = swept
    return ends
