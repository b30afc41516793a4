"""Costs of programs, by the requests that they were assembled for or by others that assemble to them."""

from dataclasses import replace

from cdpsim.cluster.disorder import Disorder
from cdpsim.errors import RequestError
from cdpsim.program import Program
from cdpsim.program.collectives import DEFAULT
from cdpsim.request import Request
from cdpsim.runs.assembling import resolve_request, unexpanded_costs
from cdpsim.timing.costs import Costs, disturbed_costs, node_costs
from cdpsim.timing.expand import with_piece_times


def price_request(program: Program, request: Request) -> Costs:
    """Return the costs of a program for a request that assembles to it; refuse devices that are not there."""
    return price_resolved(program, resolve_request(request, program.unexpanded or program))


def price_resolved(program: Program, request: Request, collapsed: Costs | None = None) -> Costs:
    """Return the disturbed costs of a program; `collapsed` are those of its unexpanded one, if they are known."""
    cluster = request.cluster
    costs = node_costs(program, request.timed_model, cluster, request.collective or DEFAULT, request.contention)
    costs = replace(costs, request=request)
    if program.unexpanded is not None and not request.contends:
        collapsed = collapsed or unexpanded_costs(program.unexpanded, request)
        costs = with_piece_times(program, costs, program.unexpanded, collapsed, cluster)
    if request.disorder == Disorder():
        return costs
    return replace(disturbed_costs(program, costs, request.disorder, request.seed, request.run), undisturbed=costs)


def request_of(made: Program | Costs) -> Request:
    """Return the request of a program or of costs; refuse those that have none."""
    if not isinstance(made.request, Request):
        raise RequestError("program", "does not say what it was assembled for; assemble a request")
    return made.request
