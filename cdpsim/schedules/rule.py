"""Which parameters: whether micro-batch i reads stage j's newest version theta_t or the one before it."""

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

Fresh = NDArray[np.bool_]  # u[i, j]


@dataclass(frozen=True)
class Rule:
    """u[i, j] as a function of index arrays: True reads theta_t, False theta_{t-1}.

    `barrier`: new parameters appear for all stages together, when the last micro-batch has finished its pass.
    """

    name: str
    fresh: Callable[[Ints, Ints, int, int], Fresh]  # i, j, stages, micro-batches
    barrier: bool = False

    def matrix(self, n: int, m: int) -> Fresh:
        """u[i, j] for n stages and m micro-batches."""
        i, j = np.indices((m, n))
        return np.broadcast_to(self.fresh(i, j, n, m), (m, n))


DP = Rule("dp", lambda i, j, n, m: np.ones_like(i, dtype=bool))
CDP_V1 = Rule("cdp-v1", lambda i, j, n, m: np.zeros_like(i, dtype=bool), barrier=True)
CDP_V2 = Rule("cdp-v2", lambda i, j, n, m: i + j >= m - 1)
RULES = {rule.name: rule for rule in (DP, CDP_V1, CDP_V2)}


def matrix_rule(matrix: Fresh, name: str = "custom") -> Rule:
    """Any boolean u[i, j], one row a micro-batch, one column a stage."""

    def fresh(i: Ints, j: Ints, n: int, m: int) -> Fresh:
        if matrix.shape != (m, n):
            rows, columns = matrix.shape if matrix.ndim == 2 else (len(matrix), 0)
            raise RequestError(
                name,
                f"the rule has {rows} rows of {columns}, but {m} micro-batches and {n} stages need {m} rows of {n}",
            )
        return matrix[i, j]

    return Rule(name, fresh)


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
