"""The metrics of a request's run in steady state, without its tables, and without what only repeats itself.

Steps repeat each other, and so do micro-batches in the middle of a step, and replicas. Only a representative part is
run; the metrics are those of a run of all.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cdpsim.cluster.disorder import Disorder
from cdpsim.request import Request
from cdpsim.runs import Run
from cdpsim.runs.assembling import price_request, with_counts
from cdpsim.runs.micro_batches import fold_micro_batches
from cdpsim.runs.playing import run_all, run_request
from cdpsim.runs.steady_metrics import FewSteps, Metrics, metrics_of, metrics_of_steps, steady_steps

_MOST_SHARED = 2**14  # passes of a step through stages; of programs that are run under many costs at once


class Evaluation(NamedTuple):
    """A request, its metrics, its devices, and the stages that it has apart though the model ties them."""

    request: Request
    metrics: Metrics
    devices: int
    untied: tuple[tuple[int, ...], ...]


def evaluation_of(run: Run) -> Evaluation:
    """Return the evaluation that a run is."""
    rest = run.steady_state.run
    return Evaluation(run.request, metrics_of(run), rest.devices, rest.program.untied)


def evaluate_requests(requests: Iterable[Request]) -> list[Evaluation]:
    """Return the evaluations of many requests; those that cost alone tells apart are run at once."""
    made, groups = [*requests], dict[int, list[int]]()
    small = [_may_fold(each) and each.shape.m * each.shape.n <= _MOST_SHARED for each in made]
    few: list[FewSteps | None] = [steady_steps(each) if one else None for each, one in zip(made, small, strict=True)]
    for number, found in enumerate(few):
        groups.setdefault(-1 - number if found is None else id(found.program), []).append(number)
    rows: dict[int, Evaluation] = {}
    for numbers in groups.values():
        shared = [found for number in numbers if (found := few[number]) is not None] if len(numbers) > 1 else []
        if not shared:
            rows[numbers[0]] = evaluate_request(made[numbers[0]])
            continue
        costs = [price_request(program, request) for request, program in shared]
        for number, one in zip(numbers, run_all(shared[0].program, costs), strict=True):
            rows[number] = _by_part(made[number], one, metrics_of_steps(one, made[number].steps))
    return [rows[number] for number in range(len(made))]


def evaluate_request(request: Request) -> Evaluation:
    """Return the evaluation of a request: of few steps, few micro-batches and one replica, where these show all."""
    if not _may_fold(request):
        return _of_all(request)
    folded = None if request.disorder != Disorder() else fold_micro_batches(request)
    if folded:
        return _by_part(request, *folded)
    one = steady_steps(request).run()
    return _by_part(request, one, metrics_of_steps(one, request.steps))


def _of_all(request: Request) -> Evaluation:
    return evaluation_of(run_request(with_counts(request.with_steps(request.steps, ignore_memory=True))))


def _by_part(request: Request, one: Run, metrics: Metrics) -> Evaluation:
    """Return the evaluation of a request by a run of a part of it, if its steps may repeat each other."""
    return Evaluation(request, metrics, one.devices, one.program.untied) if one.may_repeat else _of_all(request)


def _may_fold(request: Request) -> bool:
    """Return whether steps of a request may repeat each other: all but what depends on chance, stops and turns."""
    varies = request.disorder.is_random or request.disorder.stop or request.expands
    return request.schedule.order.waits and not varies and request.counts is None
