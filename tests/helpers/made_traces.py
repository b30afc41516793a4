"""Traces that no run shows: what is left of one, or written by hand."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from cdpsim import Trace
from cdpsim.numeric.columns import Columns
from cdpsim.trace import TABLES


def changed(trace: Trace, summary: Mapping[str, Any] | None = None, **tables: Columns) -> Trace:
    """The tables of a trace, of which some are others; without what made them."""
    own = {name: getattr(trace, name) for name in TABLES}
    return Trace(**own | tables, summary=trace.summary() if summary is None else summary)


def some_rows(table: Columns, rows: Any) -> Columns:
    """Some rows of a table."""
    return {name: column[rows] for name, column in table.items()}


def empty() -> Trace:
    """A trace in which nothing happens."""
    return Trace(*({name: np.zeros(0, dtype=np.int64) for name in header} for header in TABLES.values()))
