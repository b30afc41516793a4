"""Rows of `compare` for one request or for many; the memory of devices is ignored."""

from collections.abc import Iterable, Mapping
from typing import Any

from cdpsim.limits import UNLIMITED
from cdpsim.request import Request, end_check
from cdpsim.runs.evaluation import evaluate_request, evaluate_requests
from cdpsim.schedules import Schedule
from cdpsim.studies.compare import Measured, measured_of


def evaluate(schedule: str | Schedule | Request, n: int | None = None, **options: Any) -> Measured:
    """Return the metrics of a request, or of a schedule and options; the memory of devices is ignored.

    A run that would be too large for this machine can be evaluated if what has to be run of it is not.

    >>> evaluate("1f1b", 4, m=8).bubble == 3 / 11
    True
    >>> evaluate("1f1b", 4, m=10**6).step
    2000006
    """
    return measure_request(
        schedule if isinstance(schedule, Request) else _read_request({"schedule": schedule, "n": n} | options)
    )


def evaluate_all(requests: Iterable[Request | Mapping[str, Any]]) -> list[Measured]:
    """Return the metrics of many requests, or options of requests; requests that differ only in costs are run at once.

    >>> rows = evaluate_all({"schedule": "1f1b", "n": 4, "m": m} for m in (4, 8))
    >>> [row.step for row in rows]
    [14, 22]
    """
    made = [each if isinstance(each, Request) else _read_request(each) for each in requests]
    end_check()
    return [measured_of(*each) for each in evaluate_requests(made)]


def measure_request(request: Request) -> Measured:
    """Return the metrics of a request."""
    end_check()
    return measured_of(*evaluate_request(request))


def _read_request(options: Mapping[str, Any]) -> Request:
    """Return a request of options, which may be too large for this machine in all."""
    request = Request(**{**options, "ignore_memory": True, "max_memory": UNLIMITED})
    return request.with_limit(options.get("max_memory"))
