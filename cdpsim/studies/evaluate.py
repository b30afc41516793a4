"""The figures of a request's run at rest, without its tables, and without what only repeats itself.

Steps repeat each other, and so do micro-batches in the middle of a step, and replicas. Of all of them only as many are
run as it takes to know the others: what comes out is what comes out of a run of all.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cdpsim.cluster.disorder import Disorder
from cdpsim.front import end_check, price_request, run_all, simulate
from cdpsim.limits import UNLIMITED
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.schedules import Schedule
from cdpsim.studies.at_rest import FewSteps, steps_at_rest
from cdpsim.studies.compare import Measured, measure, measured_of
from cdpsim.studies.figures import Figures, figures_of_steps
from cdpsim.studies.folding import fold_micro_batches

_MOST_SHARED = 2**14  # passes of a step through stages; of programs that are run under many costs at once


def evaluate(schedule: str | Schedule | Request, n: int | None = None, **options: Any) -> Measured:
    """Return the figures of a request, or of a schedule and options, whatever memory its devices have.

    A run that would be too large for this machine can be evaluated if what has to be run of it is not.

    >>> evaluate("1f1b", 4, m=8).bubble == 3 / 11
    True
    >>> evaluate("1f1b", 4, m=10**6).step
    2000006
    """
    return evaluate_request(
        schedule if isinstance(schedule, Request) else _read_request({"schedule": schedule, "n": n} | options)
    )


def evaluate_all(requests: Iterable[Request | Mapping[str, Any]]) -> list[Measured]:
    """Return the figures of many requests, or options of requests; those that cost alone tells apart are run at once.

    >>> rows = evaluate_all({"schedule": "1f1b", "n": 4, "m": m} for m in (4, 8))
    >>> [row.step for row in rows]
    [14, 22]
    """
    made = [each if isinstance(each, Request) else _read_request(each) for each in requests]
    groups: dict[int, list[int]] = {}
    few: list[FewSteps | None] = [steps_at_rest(each) if _may_share(each) else None for each in made]
    for number, found in enumerate(few):
        groups.setdefault(-1 - number if found is None else id(found.program), []).append(number)
    rows: dict[int, Measured] = {}
    for numbers in groups.values():
        shared = [found for number in numbers if (found := few[number]) is not None] if len(numbers) > 1 else []
        if not shared:
            rows[numbers[0]] = evaluate_request(made[numbers[0]])
            continue
        costs = [price_request(program, request) for request, program in shared]
        for number, one in zip(numbers, run_all(shared[0][1], costs), strict=True):
            rows[number] = _measured_by_part(made[number], one, figures_of_steps(one, made[number].steps))
    return [rows[number] for number in range(len(made))]


def _read_request(options: Mapping[str, Any]) -> Request:
    """Return a request of options, which may be too large for this machine in all."""
    request = Request(**{**options, "ignore_memory": True, "max_memory": UNLIMITED})
    return request.with_limit(options.get("max_memory"))


def evaluate_request(request: Request) -> Measured:
    """Return the figures of a request."""
    end_check()
    if not _may_fold(request):
        return measure(simulate(request.with_steps(request.steps, ignore_memory=True)))
    folded = None if request.disorder != Disorder() else fold_micro_batches(request)
    if folded:
        return _measured_by_part(request, *folded)
    one = steps_at_rest(request).run()
    return _measured_by_part(request, one, figures_of_steps(one, request.steps))


def _measured_by_part(request: Request, one: Run, figures: Figures) -> Measured:
    """Return the figures of a request by a run of a part of it, if its steps may repeat each other."""
    if not one.may_repeat:
        return measure(simulate(request))
    return measured_of(request, figures, one.devices, one.program.untied)


def _may_fold(request: Request) -> bool:
    """Return whether steps of a request may repeat each other: all but what depends on chance, stops and turns."""
    varies = request.disorder.is_random or request.disorder.stop or request.expands
    return request.schedule.order.waits and not varies and request.counts is None


def _may_share(request: Request) -> bool:
    """Return whether a request may be run together with others: steps repeat, and few micro-batches need no folding."""
    return _may_fold(request) and request.shape.m * request.shape.n <= _MOST_SHARED
