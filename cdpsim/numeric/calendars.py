"""Calendars: a task begins when its device is at work, pauses while the device stands still, and goes on after.

So a task ends when its device has been at work, from its start on, for as long as it takes: a piecewise linear function
of its start that never falls.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdpsim.numeric.columns import Ints, Times

FOREVER = 2**61  # in slots; twice that is still a number of 64 bits


def never(kind: np.dtype[Any]) -> Any:
    """Return a time later than all others, in numbers of that type."""
    return kind.type(FOREVER if kind.kind == "i" else np.inf)


@dataclass(frozen=True, eq=False)
class Calendar:
    """The stops of each device, a row for each: from `at` until `until`, in order and apart; unused places at the end.

    The last row is that of nodes that no stop concerns.
    """

    row: Ints  # of each node
    at: Times
    until: Times

    @property
    def never(self) -> Any:
        """A time later than all others."""
        return never(self.at.dtype)

    def worked(self, nodes: Any, ready: Times, duration: Times) -> tuple[Times, Times]:
        """Return when nodes that are ready then start and end; times may have a column for each of several runs."""
        row = self.row[nodes]
        where = row if ready.ndim == 1 else row[:, None]
        start, now, left = ready, ready, duration
        with np.errstate(invalid="ignore"):  # from one time that never comes to another
            for k in range(self.at.shape[1]):
                at, until = self.at[where, k], self.until[where, k]
                waits = (at <= now) & (now < until)
                start = np.where(waits, until, start)
                pauses = (now < at) & (now + left > at)
                left = np.where(pauses, np.maximum(left - (at - now), 0), left)
                now = np.where(waits | pauses, until, now)
            return start, np.minimum(now + left, self.never)

    def pauses(self, nodes: Ints, start: Times, end: Times) -> tuple[Times, Times]:
        """Return from when until when devices stood still while nodes were under way on them."""
        row = self.row[nodes]
        begin, until = np.maximum(self.at[row], start[:, None]), np.minimum(self.until[row], end[:, None])
        paused = begin < until
        return begin[paused], until[paused]


def merge_stops(stops: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the stops (at, until) of one device in order; join those that touch, leave out those of no length."""
    result: list[tuple[Any, Any]] = []
    for at, until in sorted(stops):
        if at == until:
            continue
        if result and at <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], until))
        else:
            result.append((at, until))
    return result
