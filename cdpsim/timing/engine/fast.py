"""The exact engine: start times are longest paths through the program."""

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
