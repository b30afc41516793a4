"""The order of candidates by an objective, and the Pareto front of their metrics."""

import numpy as np

from cdpsim.numeric.columns import Flags, Floats, Ints

# The metrics of a candidate, all of which are the better the less they are, by the objectives that ask for them.
OBJECTIVES = ("samples", "memory", "devices", "staleness")


def best_first(metrics: Floats, objective: str) -> Ints:
    """Return the rows of metrics, the best first: by the objective, then by the other metrics, then by their order."""
    columns = sorted_by(objective)
    return np.lexsort([metrics[:, column] for column in reversed(columns)])


def sorted_by(objective: str) -> list[int]:
    """Return the columns of metrics by which an objective sorts, the first one first."""
    first = OBJECTIVES.index(objective)
    return [first, *(column for column in range(len(OBJECTIVES)) if column != first)]


def dominated_by(point: Floats, metrics: Floats) -> Flags:
    """Return which rows a point dominates: it is at least as good in all metrics, and better in one."""
    return np.asarray((point <= metrics).all(axis=1) & (point < metrics).any(axis=1), dtype=np.bool_)


def is_dominated(point: Floats, metrics: Floats) -> bool:
    """Return whether one of some rows dominates a point."""
    return bool(((metrics <= point).all(axis=1) & (metrics < point).any(axis=1)).any())


def front_of(metrics: Floats) -> Ints:
    """Return the rows that no other row dominates, in their order.

    >>> front_of(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 4.0]])).tolist()
    [0, 1]
    """
    beaten = np.zeros(len(metrics), dtype=bool)
    for point in metrics:
        beaten |= dominated_by(point, metrics)
    return np.flatnonzero(~beaten)
