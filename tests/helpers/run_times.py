"""When things happen in a run, for tests that know it by hand."""

from cdpsim.runs import Run


def named(trace: Run) -> dict[str, tuple[float, float]]:
    """When each node starts and ends, by its name without the step."""
    run = trace
    names = (run.program.describe(node).replace("t=0,", "") for node in range(run.program.nodes))
    return {name: (run.start[node], run.end[node]) for node, name in enumerate(names)}


def makespan(trace: Run) -> float:
    """How long a run is."""
    return float(trace.summary()["makespan"])
