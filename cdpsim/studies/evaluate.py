"""The figures of a request's run at rest, without its tables."""

from typing import Any

from cdpsim.front import simulate
from cdpsim.request import Request
from cdpsim.schedules import Schedule
from cdpsim.studies.compare import Measured, measure


def evaluate(schedule: str | Schedule | Request, n: int | None = None, **options: Any) -> Measured:
    """Return the figures of a request, or of a schedule and options, whatever memory its devices have.

    >>> evaluate("1f1b", 4, m=8).bubble == 3 / 11
    True
    """
    request = schedule if isinstance(schedule, Request) else Request(schedule, n, **{"ignore_memory": True} | options)
    return measure(simulate(request))
