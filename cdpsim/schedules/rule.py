"""Which parameters: how much older than theta_t the version of stage j is that micro-batch i reads."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cdpsim.columns import Ints
from cdpsim.errors import RequestError, nearest
from cdpsim.files import read_text
from cdpsim.schedules.shape import Shape

Fresh = NDArray[np.bool_]  # u[i, j]
Lag = Callable[[Ints, Ints, Shape], Ints]  # of i and j: how many steps older than theta_t the parameters are


@dataclass(frozen=True)
class Rule:
    """How old the parameters are that micro-batch i reads of stage j: theta_{t - lag}, theta_0 if there is none.

    In the CDP paper u[i, j] is true where the lag is 0; elsewhere it is 1. `barrier`: new parameters appear for all
    stages together, when the last micro-batch has finished its pass. `backward`: the lag of backwards, where they do
    not read what their forward has read.
    """

    name: str
    lag: Lag
    barrier: bool = False
    backward: Lag | None = None

    def lags(self, shape: Shape) -> Ints:
        """The lag of forwards: a row a micro-batch, a column a stage."""
        return _over(self.lag, shape)

    def backward_lags(self, shape: Shape) -> Ints:
        """The lag of backwards, in the same form."""
        return _over(self.backward or self.lag, shape)

    def matrix(self, n: int, m: int) -> Fresh:
        """u[i, j] for n stages and m micro-batches."""
        fresh: Fresh = self.lags(Shape(n, m)) == 0
        return fresh


def _over(lag: Lag, shape: Shape) -> Ints:
    i, j = np.indices((shape.m, shape.n), dtype=np.int32)
    return lag(i, j, shape)


def _newest(i: Ints, j: Ints, shape: Shape) -> Ints:
    """What a stage has when a micro-batch comes, one every two slots: those in flight there have not updated it yet."""
    in_flight = shape.n - 1 - j
    lag: Ints = np.maximum(-((i - in_flight) // shape.m), 0)
    return lag


DP = Rule("dp", lambda i, j, shape: 0 * i)
CDP_V1 = Rule("cdp-v1", lambda i, j, shape: 0 * i + 1, barrier=True)
CDP_V2 = Rule("cdp-v2", lambda i, j, shape: (i + j < shape.m - 1).astype(np.int32))
RULES = {rule.name: rule for rule in (DP, CDP_V1, CDP_V2)}
# Rules of their own that schedules have, of which none is given by --rule.
NEWEST = Rule("newest", _newest)
VERTICAL_SYNC = Rule("vertical-sync", lambda i, j, shape: _newest(i, 0 * j, shape))
NEWEST_EACH = Rule("newest-each", _newest, backward=lambda i, j, shape: 0 * i)
NAMED = RULES | {rule.name: rule for rule in (NEWEST, VERTICAL_SYNC, NEWEST_EACH)}


def matrix_rule(matrix: Fresh, name: str = "custom") -> Rule:
    """Any boolean u[i, j], one row a micro-batch, one column a stage."""

    def lag(i: Ints, j: Ints, shape: Shape) -> Ints:
        if matrix.shape != (shape.m, shape.n):
            rows, columns = matrix.shape if matrix.ndim == 2 else (len(matrix), 0)
            needed = f"{shape.m} micro-batches and {shape.n} stages need {shape.m} rows of {shape.n}"
            raise RequestError(name, f"the rule has {rows} rows of {columns}, but {needed}")
        older: Ints = (~matrix[i, j]).astype(np.int32)
        return older

    return Rule(name, lag)


def find_rule(name: str | Path) -> Rule:
    """A rule by its name, or from a CSV file of 0 and 1 (row i, column j: 1 reads the fresh parameters)."""
    name = str(name)
    if name in RULES:
        return RULES[name]
    if not (Path(name).exists() or name.endswith(".csv") or "/" in name):
        raise RequestError("rule", f"unknown rule {name!r}; {nearest(name, RULES)} (or a CSV file of 0 and 1)")
    rows = [row for row in csv.reader(StringIO(read_text(name))) if row]
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            if cell.strip() not in ("0", "1"):
                raise RequestError(
                    name, f"row {i}, column {j} is {cell[:40]!r}; write 1 for fresh, 0 for one step older"
                )
        if len(row) != len(rows[0]):
            raise RequestError(name, f"row {i} has {len(row)} columns, row 0 has {len(rows[0])}; make them equal")
    return matrix_rule(np.array([[cell.strip() == "1" for cell in row] for row in rows]), name)
