"""Times of a run, for tests that know them by hand."""

from cdpsim.runs import Run


def named(run: Run) -> dict[str, tuple[float, float]]:
    """Return when each node starts and ends, by its name without the step."""
    names = (run.program.describe(node).replace("t=0,", "") for node in range(run.program.nodes))
    return {name: (run.start[node], run.end[node]) for node, name in enumerate(names)}


def makespan(trace: Run) -> float:
    """Return the makespan of a run."""
    return float(trace.summary()["makespan"])
