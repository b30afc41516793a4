"""Counts of rounds: how many micro-batches workers that do not wait compute, as the times of a request ask for."""

from dataclasses import replace

import numpy as np

from cdpsim.errors import RequestError
from cdpsim.numeric.columns import Ints
from cdpsim.request import Request
from cdpsim.request.options import CountRows
from cdpsim.runs.assembling import assemble_one, assemble_replicas, price_resolved, request_of
from cdpsim.timing.engine import find_engine, refuse_stalled
from cdpsim.timing.round_times import RoundTimes, counts_by_times, play_program, play_rounds

_MOST_TRIALS = 200  # runs until counts of rounds are those that they ask for


def with_counts(request: Request) -> Request:
    """Return a request with the counts of its rounds: those that its own times ask for; refuse others if it has some.

    They come from the times of a program of one update, where these are fixed. Else runs with the counts of the run
    before are made until these are their own.
    """
    if request.schedule.order.rounds is None:
        return request
    given = request.counts
    if given is None or not request.counts_vary:
        request = _of_each_task(request.with_rounds(play_of_request(request).counts))
    if request.counts_vary:
        request = _settled(request, given)
    refuse_other_counts(given, request.counts)
    return request


def refuse_other_counts(given: CountRows | None, found: CountRows | Ints | None) -> None:
    """Refuse counts of rounds that are not those that their times ask for."""
    if given is None or found is None or np.array_equal(given, found):
        return
    row, device = np.argwhere(np.array(given) != np.array(found))[0].tolist()
    problem = f"say {given[row][device]} micro-batches for device {device} in round {row}, whose times ask for"
    raise RequestError("counts", f"{problem} {found[row][device]}; leave them out, and they are found")


def play_of_request(request: Request) -> RoundTimes:
    """Return the rounds of a request if everything takes its mean time."""
    shape, overlapped = request.shape, request.schedule.order.rounds
    assert overlapped is not None
    probe = request.fixed(shape.warm_up + 1)
    program = assemble_one(probe)
    costs = price_resolved(program, request_of(program))
    found = play_rounds(program, costs, shape.m, overlapped.steps(request.steps) - 1, shape.warm_up)
    each = {name: getattr(found, name) for name in ("counts", "posted", "ended")}
    return replace(found, **{name: np.broadcast_to(own, (len(own), shape.replicas)) for name, own in each.items()})


def _of_each_task(request: Request) -> Request:
    """Return a request with the counts by the recurrence if times of tasks differ from one to the next."""
    counts, complete = np.array(request.counts), not (request.disorder.is_random or request.disorder.stop)
    while not complete:
        counts[-1] += request.shape.m * len(counts)  # tasks for rounds that are longer than usual
        program = assemble_replicas(request.with_rounds(counts).alone())
        costs = price_resolved(program, request_of(program))
        counts, complete = play_program(program, costs, request.shape.m, request.shape.warm_up)
    return request.with_rounds(counts)


def _settled(request: Request, given: CountRows | None) -> Request:
    """Return a request whose counts are those that the times of its run ask for; of given ones, after one trial."""
    shape = request.shape
    request = request if given is None else request.with_rounds(np.array(given))
    most = _MOST_TRIALS + 4 * len(request.counts or ())
    for _ in range(most):
        program = assemble_replicas(request)
        costs = price_resolved(program, request_of(program))
        start, end = find_engine(request.engine, request.contention)(program, costs)
        refuse_stalled(program, costs, start, end, f"the run of {request.schedule.name}")
        counts = counts_by_times(program, start, end, shape.m, shape.warm_up)
        if (counts == np.array(request.counts)).all():
            return request
        request = request.with_rounds(counts)
        if given is not None:
            return request
    raise RequestError("rounds", f"are not settled after {most} runs; take fewer steps")
