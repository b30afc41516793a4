"""Traces that no run has: parts of one, or made by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cdpsim import Trace
from cdpsim.numeric.columns import Columns
from cdpsim.trace import TABLES
from cdpsim.trace.table import Table


def changed(trace: Trace, summary: Mapping[str, Any] | None = None, **tables: Columns) -> Trace:
    """Return a trace of the same tables, but for those given; it has no run."""
    same = {name: getattr(trace, name) for name in TABLES}
    return Trace(**same | tables, summary=trace.summary() if summary is None else summary)


def some_rows(table: Table[Any], rows: Any) -> Columns:
    """Return some rows of a table."""
    return {name: column[rows] for name, column in table.items()}


def empty() -> Trace:
    """Return a trace without any rows."""
    return Trace(*({name: np.zeros(0, dtype=np.int64) for name in header} for header in TABLES.values()))
