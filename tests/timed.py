"""When things happen in a run, for tests that know it by hand."""

from cdpsim import Trace
from cdpsim.runs import Run


def run_of(trace: Trace) -> Run:
    """The run behind a simulated trace."""
    assert trace.run is not None
    return trace.run


def named(trace: Trace) -> dict[str, tuple[float, float]]:
    """When each node starts and ends, by its name without the step."""
    run = run_of(trace)
    names = (run.program.describe(node).replace("t=0,", "") for node in range(run.program.nodes))
    return {name: (run.start[node], run.end[node]) for node, name in enumerate(names)}


def makespan(trace: Trace) -> float:
    """How long a run is."""
    return float(trace.summary()["makespan"])
